"""Images in the demo are put once, seen by every worker, and part of the computation."""

import re
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from engine.batching import Batcher, ImageReference, Request
from engine.image_store import ImageReader, ImageWriter
from engine.images import PLACEHOLDERS, SIDES, TOKENS, Image, Pixels, draw_images, image_of
from engine.model import Shard
from engine.reference import run_reference
from memlane import StoreFull
from tests.examples.demo import PROMPTS, run, write_prompts
from tests.examples.test_engine import BLOCKS, CONFIG, batcher, compute, decision, generated
from tests.examples.test_trace import GOOD, replay, write_trace
from tests.support import start

FIRST, SECOND = (3 * side * side for side in SIDES[:2])

IN_WORKER_1 = """
import multiprocessing, os, signal
import numpy
from engine.model import Shard

def see(self, sequence, pixels, see=Shard.see):
    if multiprocessing.current_process().name == "worker-1":
        {deed}
    see(self, sequence, pixels)

Shard.see = see
"""
"""Runs in every process of the demo before anything else, as sitecustomize.py."""


def test_image_is_put_once_and_read_by_every_worker_for_every_request(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, [*PROMPTS, *PROMPTS[:3]])  # two images, none, and so on
    finished = run("--workers", "2", "--tokens", "8", "--images", "2", "--prompts", prompts)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "come with 5 of the requests" in finished.stdout
    assert "2 puts, 3 hits, 0 evictions; 0 requests" in finished.stdout
    put, inline = FIRST + SECOND, 2 * (3 * FIRST + 2 * SECOND)
    assert f"{put / 1e6:.1f} MB put, {(inline - put) / 1e6:.1f} MB saved" in finished.stdout
    assert f"{inline / 1e6:.1f} MB)" in finished.stdout
    assert re.search(r"image reads +10 views, p50 \d+ us, p99 \d+ us", finished.stdout)
    assert "nothing left of 5 segments" in finished.stdout
    assert "single process      the same tokens\n" in finished.stdout


def test_request_waits_for_a_step_while_the_store_is_full(tmp_path: Path) -> None:
    """All images together are more than twice as large as the store."""
    prompts = write_prompts(tmp_path, PROMPTS * 3)
    finished = run(
        *("--workers", "2", "--tokens", "4", "--batch", "12", "--prompts", prompts),
        *("--images", "5", "--store-mib", "4"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    told = re.search(r"(\d+) puts, (\d+) hits, (\d+) evictions; (\d+) requests", finished.stdout)
    assert told is not None
    puts, hits, evictions, postponed = map(int, told.groups())
    assert puts + hits == 10
    assert evictions >= puts - 4  # five never fit
    assert evictions > 0
    assert postponed > 0
    assert "the same tokens" in finished.stdout


def test_without_images_there_is_no_store(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, PROMPTS)
    finished = run("--workers", "1", "--tokens", "2", "--images", "0", "--prompts", prompts)
    assert finished.returncode == 0, finished.stderr
    assert "image" not in finished.stdout
    assert "store" not in finished.stdout
    assert "nothing left of 3 segments" in finished.stdout


def test_trace_is_replayed_with_images(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, GOOD, GOOD, GOOD)
    finished = run("--workers", "1", "--trace", str(trace), "--images", "1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "1 puts, 1 hits" in finished.stdout
    tokens = 2 * (TOKENS + 10 + 2 - 1) + (10 + 2 - 1)  # as in test_trace, and two images
    assert f"3 answered, {tokens} tokens run" in finished.stdout
    assert "the same tokens" in finished.stdout


def test_check_fails_if_one_worker_reads_wrong_bytes(tmp_path: Path) -> None:
    """Bytes from an address that is 64 too low."""
    deed = IN_WORKER_1.format(deed="pixels = numpy.roll(pixels, 64)")
    (tmp_path / "sitecustomize.py").write_text(deed)
    prompts = write_prompts(tmp_path, PROMPTS)
    finished = run(
        *("--workers", "2", "--tokens", "16", "--images", "1", "--prompts", prompts),
        first=tmp_path,
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "single process      differs for requests [0, 2]\n" in finished.stdout


def test_worker_that_dies_over_an_image_is_named(tmp_path: Path) -> None:
    deed = IN_WORKER_1.format(deed="os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "sitecustomize.py").write_text(deed)
    prompts = write_prompts(tmp_path, PROMPTS)
    finished = run("--workers", "2", "--prompts", prompts, first=tmp_path)
    assert finished.returncode == 1
    ready = re.search(r"ready \(pids \d+, (\d+);", finished.stdout)
    assert ready is not None
    *_, last = finished.stderr.splitlines()  # the other may tell, too, if it was still starting
    assert last.startswith(f"engine: worker 1 (pid {ready[1]}) died")


def with_image(prompt: bytes, image: Image) -> Request:
    return Request(PLACEHOLDERS + prompt, new_tokens=6, image=image, may_end_early=False)


def small(value: int) -> Image:
    """An image of 2352 bytes."""
    return image_of(np.full((3, 28, 28), value, np.uint8))


def answers(*requests: Request) -> list[bytes]:
    batches = Batcher(requests, max_batch=3, max_step_tokens=16)
    run_reference(CONFIG, 2, batches)
    return [generated(sequence) for sequence in batches.sequences]


def test_tokens_depend_on_the_image() -> None:
    one, other = islice(draw_images(), 2)
    requests = [with_image(PROMPTS[0], image) for image in (one, other, one)]
    first, second, third = answers(*requests)
    assert first == third
    assert first != second
    changed = one.pixels.copy()
    changed[:, 100:120] = 0
    (fourth,) = answers(with_image(PROMPTS[0], image_of(changed)))
    assert fourth != first


@pytest.mark.parametrize("chunk", [1, 5, 17])
def test_image_may_be_run_in_several_steps(chunk: int) -> None:
    (image,) = islice(draw_images(), 1)
    text = PLACEHOLDERS + PROMPTS[0]
    whole, parts = Shard(CONFIG, 0, 1, BLOCKS), Shard(CONFIG, 0, 1, BLOCKS)
    whole.see(3, image.pixels)
    parts.see(3, image.pixels)
    alone, _ = compute([whole], decision([(0, 0, b"xy"), (3, 0, text)]))
    for first in range(0, len(text), chunk):
        beside = (8, first // chunk, b"x")
        hidden, _ = compute([parts], decision([beside, (3, first, text[first : first + chunk])]))
    np.testing.assert_allclose(hidden[1], alone[1], rtol=0, atol=1e-3)


def test_key_is_of_the_content() -> None:
    again = list(islice(draw_images(), len(SIDES) + 1))
    for one, same in zip(draw_images(), again, strict=False):
        assert one.key == same.key == image_of(one.pixels.copy()).key
    assert len({image.key for image in again}) == len(again)
    flat = np.zeros((3, 28, 56), np.uint8)
    assert image_of(flat).key != image_of(flat.reshape(3, 56, 28)).key


def test_who_is_not_admitted_waits_and_nobody_overtakes() -> None:
    batches = batcher(PROMPTS, max_batch=3)
    assert batches.decide(0.0, lambda number, _request: number < 1) is not None
    assert batches.joined == 1
    asked: list[int] = []

    def refuse(number: int, request: Request) -> bool:
        asked.append(number)
        assert request is batches.sequences[number].request
        return False

    step = batches.decide(0.0, refuse)
    assert step is not None
    assert asked == [1]
    assert [sequence for sequence, _, _ in step["run"]] == [0]
    batches.decide(0.0)
    assert batches.joined == 3


@pytest.fixture
def ends() -> Iterator[tuple[ImageWriter, ImageReader]]:
    """A store with room for two small images, and its one reader."""
    with closing(ImageWriter(6000, 1)) as writer, closing(ImageReader(writer.handle())) as reader:
        yield writer, reader


def test_store_makes_room_once_a_step_went_through(ends: tuple[ImageWriter, ImageReader]) -> None:
    writer, reader = ends
    images = [small(value) for value in range(4)]
    assert writer.refer(0, images[0])
    assert writer.refer(1, images[1])
    assert writer.refer(2, images[0])
    assert not writer.refer(3, images[2])
    assert writer.postponed == 1
    step = writer.take_references()
    assert [sequence for sequence, _, _ in step] == [0, 1, 2]
    assert step[0][1:] == step[2][1:]
    assert shown(reader, step) == [0, 1, 0]
    assert len(reader.view_ns) == 3
    assert writer.refer(3, images[2])
    assert shown(reader, writer.take_references()) == [2]
    assert writer.put_bytes == 3 * 2352
    assert writer.referred_bytes == 4 * 2352
    told = writer.statistics()
    assert (told.puts, told.hits) == (3, 1)
    assert told.evictions >= 1


def test_full_store_is_an_error_if_nobody_has_to_read(
    ends: tuple[ImageWriter, ImageReader],
) -> None:
    writer, _ = ends
    with pytest.raises(StoreFull):
        writer.refer(0, image_of(np.zeros((3, 56, 56), np.uint8)))
    assert writer.refer(0, small(0))
    assert not writer.refer(1, image_of(np.zeros((3, 56, 56), np.uint8)))


def shown(reader: ImageReader, step: list[ImageReference]) -> list[int]:
    """The values of the small images as the reader sees them, in shared memory."""
    values = []

    def see(_sequence: int, pixels: Pixels) -> None:
        assert not pixels.flags.owndata
        assert not pixels.flags.writeable
        assert (pixels == pixels[0, 0, 0]).all()
        values.append(int(pixels[0, 0, 0]))

    reader.show(step, see)
    return values


def test_engine_without_a_store_refuses_images() -> None:
    with pytest.raises(ValueError, match="request 0 has an image, and this engine has no store"):
        start(replay, [with_image(b"?", small(0))], None).result()
