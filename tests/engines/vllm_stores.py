"""vLLM's processes with its shared image cache; `running.run` runs each function."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memlane import InvalidArgument, ObjectGone, SegmentMissing
from memlane.engines.vllm import register
from tests.engines.scenario import fresh_processes
from tests.engines.stores import item, same
from tests.support import PATIENCE

fresh = fresh_processes(__name__)  # they find the engine's modules, too
SHM = Path("/dev/shm")
NAME = "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"
MIB = 1 << 20
IS_SIGNED = int(os.environ["TEST_RELEASE"].split(".")[1]) >= 32  # the handles of vLLM's caches


def config(size: int = MIB, n_readers: int = 2) -> Any:
    """As much of vLLM's as its caches ask for."""
    multimodal = SimpleNamespace(
        mm_processor_cache_gb=size / (1 << 30), mm_shm_cache_max_object_size_mb=1
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=n_readers),
        model_config=SimpleNamespace(get_multimodal_config=lambda: multimodal),
    )


def caches_of_vllm() -> Any:
    """The module of vLLM's caches."""
    from vllm.multimodal import cache

    return cache if hasattr(cache, "__file__") else import_module("vllm.multimodal.cache.shm")


def sender(**options: Any) -> Any:
    """vLLM's cache of the client, which writes."""
    register()
    return caches_of_vllm().ShmObjectStoreSenderCache(config(**options))


def receiver(lock: Any, **options: Any) -> Any:
    """vLLM's cache of a worker."""
    register()
    return caches_of_vllm().ShmObjectStoreReceiverCache(config(**options), lock)


def named() -> list[str]:
    """Returns the names of memlane's files in /dev/shm; each scenario is alone there."""
    return sorted(name for name in os.listdir(SHM) if name.startswith("memlane-"))


def through_plugins() -> None:
    """Modules that copied the names are rebound; the serde and vLLM's module stay."""
    import vllm.distributed.device_communicators.shm_object_storage as home
    import vllm.plugins

    shm = caches_of_vllm()
    early = SimpleNamespace(copy=home.SingleWriterShmObjectStorage)
    sys.modules["an_early_importer"] = early  # type: ignore[assignment]
    vllm.plugins.load_general_plugins()
    ours = [home.SingleWriterShmRingBuffer, home.SingleWriterShmObjectStorage]
    assert [found.__module__ for found in ours] == ["memlane.engines.vllm.store"] * 2
    assert [shm.SingleWriterShmRingBuffer, shm.SingleWriterShmObjectStorage] == ours
    assert early.copy is ours[1]
    assert shm.MsgpackSerde.__module__ == home.__name__


def _work(pipe: Any, lock: Any, switched: str, cache: str | None = None) -> None:
    os.environ["MEMLANE_VLLM"] = switched
    if cache is not None:
        os.environ[NAME] = cache
    try:
        receives = receiver(lock)
    except Exception as error:
        pipe.send(error)
        return
    pipe.send("attached")
    for request, key, handle in iter(pipe.recv, None):
        try:
            if request == "touch":
                receives.touch_receiver_cache_item(key, handle)
                pipe.send("touched")
            elif request == "clear":
                receives.clear_cache()
                pipe.send("cleared")
            else:
                pipe.send(receives.get_and_update_item(handle, key))
        except ValueError as error:
            pipe.send(error)


class Worker:
    """A process with vLLM's receiving cache, and what it says."""

    def __init__(self, lock: Any, switched: str = "store", cache: str | None = None) -> None:
        self.pipe, there = fresh.Pipe()
        self.process = fresh.Process(target=_work, args=(there, lock, switched, cache))
        self.process.start()
        there.close()
        assert self.pipe.poll(60), "the worker says nothing"
        self.first = self.pipe.recv()

    def ask(self, request: str, key: str = "", handle: Any = None) -> Any:
        self.pipe.send((request, key, handle))
        assert self.pipe.poll(30), "the worker says nothing"
        return self.pipe.recv()

    def leave(self) -> None:
        self.pipe.send(None)
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0


def caches() -> None:
    """Images through vLLM's caches: workers get what the client put, and evict nothing early."""
    client, lock = sender(), fresh.Lock()
    workers = [Worker(lock), Worker(lock)]
    assert [worker.first for worker in workers] == ["attached"] * 2
    assert named() == [], "all have attached, so the name is gone"
    images = {f"image {n}": item(n, 300_000) for n in range(8)}  # more than the cache holds
    for turn in range(2):
        for key, image in images.items():
            client.touch_sender_cache_item(key)  # silent if it is not there
            sent, _ = client.get_and_update_item((image, ()), key)
            if IS_SIGNED:
                client.release_sender_touches()
                client.validate_input_item(sent, key)
            assert "address" in sent, f"{key} was not cached in turn {turn}"
            again, _ = client.get_and_update_item(None, key)
            for worker in workers:
                assert worker.ask("touch", key, sent) == "touched"
                for handle in (sent, again):
                    assert same(worker.ask("get", key, handle), image)
    for worker in workers:
        worker.leave()
    client.close()


def worker_dies() -> None:
    """Objects that a killed worker had not read are evicted all the same."""
    client, lock = sender(), fresh.Lock()
    workers = [Worker(lock), Worker(lock)]
    dead, alive = workers
    dead.process.kill()
    dead.process.join()
    for n in range(8):
        sent, _ = client.get_and_update_item((item(n, 300_000), ()), str(n))
        assert "address" in sent, f"image {n} was not cached"
        assert same(alive.ask("get", str(n), sent), item(n, 300_000))
    alive.leave()
    client.close()


def cleared() -> None:
    """Readers' clear() does nothing; older handles can be read until their space is used."""
    client, lock = sender(), fresh.Lock()
    workers = [Worker(lock), Worker(lock)]
    image = item(1, 1000)
    sent, _ = client.get_and_update_item((image, ()), "image")
    assert workers[0].ask("clear") == "cleared"
    assert client.is_cached_item("image")
    client.clear_cache()
    assert not client.is_cached_item("image")
    with pytest.raises(ValueError, match="SHM handle signature"):
        client.validate_input_item(sent, "image")
    for worker in workers:
        assert same(worker.ask("get", "image", sent), image)
    client.get_and_update_item((item(2, 1000), ()), "image")
    for request in ("get", "touch"):
        assert isinstance(workers[0].ask(request, "image", sent), ObjectGone)
    for worker in workers:
        worker.leave()
    client.close()


def forged() -> None:
    """A handle that no writer signed is refused before the address is looked at."""
    client, lock = sender(), fresh.Lock()
    worker = Worker(lock)
    sent, _ = client.get_and_update_item((item(1, 1000), ()), "image")
    address, number, signature = (
        sent[name].data for name in ("address", "monotonic_id", "signature")
    )
    bad = [
        (address + 64, number, signature),
        (address, number + 1, signature),
        (address, number, [signature[0] ^ 1, *signature[1:]]),
        (address, number, signature[:-1]),
        (address, number, [256] * 32),
        (address, number, [signature]),
        (address, number, [1.5] * 32),
        (2**64 - 1, 2**32 - 1, signature),
    ]
    for handle in bad:
        forged_item = client.address_as_item(*handle)
        for request in ("get", "touch"):
            answer = worker.ask(request, "image", forged_item)
            assert isinstance(answer, InvalidArgument), answer
            assert "SHM handle signature" in str(answer)
        with pytest.raises(ValueError, match="SHM handle signature"):
            client.validate_input_item(forged_item, "image")
    assert isinstance(worker.ask("get", "another image", sent), InvalidArgument)
    worker.leave()
    client.close()


def documented_signature() -> None:
    """HMAC-SHA256 over sha256 of the key, 8 bytes of address and 4 of id, little-endian."""
    import hashlib
    import hmac

    client = sender()
    storage = client._shm_cache
    client.get_and_update_item((item(1, 1000), ()), "image")
    address, number = storage.key_index["image"]
    signed = hashlib.sha256(b"image").digest()
    signed += address.to_bytes(8, "little") + number.to_bytes(4, "little")
    secret = storage._end.secret
    assert len(secret) == 32
    assert len(set(secret)) > 8
    expected = hmac.new(secret, signed, hashlib.sha256).digest()
    assert storage.get_signature("image") == list(expected)
    client.close()


def half_switched() -> None:
    """A worker whose store is not the client's learns so before it gets anything."""
    lock = fresh.Lock()
    client = sender()
    for words in ("", "queue"):
        error = Worker(lock, words).first
        assert isinstance(error, InvalidArgument), error
        assert "set MEMLANE_VLLM=store in every process" in str(error)
    client.close()


def half_switched_the_other_way() -> None:
    """The client goes on with vLLM's own store; a worker has switched."""
    from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache

    client = ShmObjectStoreSenderCache(config())
    error = Worker(fresh.Lock(), "store").first
    assert isinstance(error, InvalidArgument), error
    assert "uses the engine's own store" in str(error)
    assert "set MEMLANE_VLLM=store in every process" in str(error)
    client.close()
    error = Worker(fresh.Lock(), "store").first
    assert isinstance(error, SegmentMissing), error


def handles() -> None:
    """No handle carries the secret, and none of vLLM's own is taken."""
    from vllm.distributed.device_communicators import shm_object_storage as home

    with sender()._shm_cache as storage:
        assert storage._end.secret not in pickle.dumps(storage.handle())
        theirs = home.ShmObjectStorageHandle(1, 1, (1, "name"), home.MsgpackSerde, None)
        with pytest.raises(TypeError, match="a ShmObjectStorageHandle is needed"):
            home.SingleWriterShmObjectStorage.create_from_handle(theirs)


def killed() -> None:
    """The next start sweeps the name of a client that was killed before its workers came."""
    here, there = fresh.Pipe()
    client = fresh.Process(target=_send_name, args=(there,))
    client.start()
    assert here.poll(60)
    here.recv()
    (left,) = named()
    os.kill(client.pid or 0, signal.SIGKILL)
    client.join()
    assert named() == [left]
    other = sender()
    assert len(named()) == 1
    assert named() != [left]
    other.close()
    assert named() == []


def _send_name(pipe: Any) -> None:
    client = sender()
    pipe.send("made")
    signal.pause()
    client.close()


def full_shm() -> None:
    """Space is taken as the cache grows; an image for which there is none is not cached.

    In a small /dev/shm of its own.
    """

    def space() -> int:
        facts = os.statvfs(SHM)
        return facts.f_bavail * facts.f_frsize

    before = space()
    assert before < 256 * MIB
    client = sender(size=64 * MIB, n_readers=1)
    receives = receiver(fresh.Lock(), size=64 * MIB, n_readers=1)
    taken = before - space()
    assert taken < 16 * MIB, f"{taken} bytes for an empty cache"
    with (SHM / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, space() - 8 * MIB)
        kept: dict[str, Any] = {}
        for n in range(40):
            image = item(n, 900_000)
            sent, _ = client.get_and_update_item((image, ()), str(n))
            if "address" not in sent:
                break
            kept[str(n)] = sent, image
        assert 4 < len(kept) < 40
        for key, (sent, image) in kept.items():
            assert same(receives.get_and_update_item(sent, key), image)
        os.unlink(SHM / "filler")
    sent, _ = client.get_and_update_item((item(99, 900_000), ()), "later")
    assert "address" in sent
    assert torch.equal(
        receives.get_and_update_item(sent, "later")["image"].data, item(99, 900_000)["image"].data
    )
    client.close()
