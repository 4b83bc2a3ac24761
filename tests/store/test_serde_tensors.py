"""torch CPU tensors through a serde: every dtype, shape and layout, as copies and in place."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memlane import InvalidType, MsgpackSerde, ViewInUse
from tests.support.missing import package
from tests.support.queues import refuses
from tests.support.serdes import MSGPACK, PICKLE, both_ways, exact, exported, is_in_use, laid
from tests.support.stores import store_of

pytestmark = pytest.mark.unit

torch = package("torch")

torch.set_num_threads(1)  # or the first test would leave torch's threads behind

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
SHAPES = [(), (0,), (0, 3), (7,), (50, 60), (100, 30, 10)]


def test_every_torch_dtype_and_shape_comes_back() -> None:
    """bfloat16, float8 and narrower included; by copy and by view, and without a warning."""
    seen = set()
    for dtype in DTYPES:
        if "qint" in str(dtype) or "quint" in str(dtype):
            continue
        for shape in SHAPES:
            content = torch.arange(int(np.prod(shape)) * dtype.itemsize) % 2
            with warnings.catch_warnings(action="ignore"):  # complex32 is an experiment
                tensor = content.to(torch.uint8).view(dtype).reshape(shape)
            with warnings.catch_warnings(action="error"):
                lying = laid(MSGPACK, [tensor])
                (owned,), (viewed,) = MSGPACK.deserialize(lying), MSGPACK.deserialize_view(lying)
            assert exact(owned) == exact(viewed) == exact(tensor)
            start = np.asarray(lying).ctypes.data
            assert not start <= viewed.data_ptr() < start + len(lying)
            seen.add(dtype)
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool} <= seen


def test_tensors_of_any_layout_come_back() -> None:
    """Gaps, transposition, lazy conjugation; what required a gradient comes back detached."""
    base = torch.arange(6000.0).reshape(20, 30, 10)
    layouts = [
        base,
        base.permute(2, 1, 0),
        base[::2],
        base[..., 3],
        base[3:3],
        base[0, 0].expand(7, 10),
    ]
    layouts += [layout.to(dtype) for layout in layouts for dtype in (torch.bfloat16, torch.int8)]
    layouts += [layout.to(torch.complex64).conj() for layout in layouts]
    layouts += [torch.tensor([1j, 2j]).conj().imag]
    layouts += [base[::2].to(torch.float8_e5m2)[:, ::3]]
    for tensor in layouts:
        for got in both_ways(tensor):
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got.to(torch.complex64), tensor.to(torch.complex64))
    wanting = torch.ones(3, requires_grad=True)
    for tensor in (wanting, wanting[::2]):
        for got in both_ways(tensor):
            assert type(got) is torch.Tensor
            assert not got.requires_grad
            assert torch.equal(got, tensor)


def test_tensors_are_the_readers_own() -> None:
    """By copy and by view, writing to them does not change the stored bytes."""
    lying = laid(MSGPACK, [torch.zeros(5), torch.zeros(50_000)])
    before = bytes(lying)
    for tensor in MSGPACK.deserialize(lying) + MSGPACK.deserialize_view(lying):
        tensor += 1
    assert bytes(lying) == before


class Subclass(torch.Tensor):  # type: ignore[misc]
    """A subclass is another type."""


def test_tensors_that_cannot_travel() -> None:
    """A tensor beyond its memory, or of another type, is refused."""
    plain = torch.ones(3, 3)
    tagged = torch.ones(3)
    tagged.tag = 1
    with warnings.catch_warnings(action="ignore"):
        tensors = [
            plain.to_sparse(),
            torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([plain, plain]),
            plain.to("meta"),
            plain.as_subclass(Subclass),
            plain.to(torch.uint8).view(torch.quint8),
            plain.to(torch.int32).view(torch.qint32),
            plain.dtype,
            torch.nn.Parameter(plain),
            torch.nn.Buffer(plain),
            tagged,
        ]
    for tensor in tensors:
        with pytest.raises(InvalidType, match="Unsupported object type"):
            MSGPACK.serialize(tensor)


class Holder:
    """Not registered."""

    def __init__(self) -> None:
        self.tensor = torch.ones(100_000, dtype=torch.bfloat16)


def test_the_error_of_a_parameter_or_an_attribute_says_what_to_store() -> None:
    """And pickles keep both."""
    parameter, tagged = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    tagged.tag = "camera 1"
    with pytest.raises(InvalidType, match=r"store its \.detach\(\)"):
        MSGPACK.serialize(parameter)
    with pytest.raises(InvalidType, match=r"attributes \(tag\).*store its \.detach\(\)"):
        MSGPACK.serialize([tagged])
    for got, also in both_ways([parameter, tagged], PICKLE):
        assert type(got) is torch.nn.Parameter
        assert got.requires_grad
        assert also.tag == "camera 1"
    assert torch.equal(both_ways(tagged.detach())[0], torch.ones(3))


def test_tensors_in_pickles_are_not_copied() -> None:
    """Beside the stream, uncopied; by copy and by view in their own memory."""
    holder = Holder()
    data, _, _, _ = PICKLE.serialize(holder)
    assert any(memoryview(part).nbytes == 200_000 for part in data)
    for got in both_ways(holder, PICKLE):
        got.tensor += 1
        assert bool((got.tensor == 2).all())
        assert got.tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_a_view_keep_nothing(dtype: "torch.dtype") -> None:
    """The arrays beside them keep the memory; the tensors are copies."""
    memory, value = exported({"part": torch.ones(70, dtype=dtype), "other": np.ones(5)})
    kept = value["part"][10:20]
    assert is_in_use(memory)
    del value
    assert not is_in_use(memory)
    assert kept.all()


def test_survivors_of_a_view_are_found() -> None:
    """`storage.view` detects references to its arrays other than the value's."""
    sent: dict[str, Any] = {"a": np.ones(9), "b": [np.ones(9), torch.ones(9)], "c": b"b" * 2000}
    sent["t"] = torch.ones(9).bfloat16()
    keeps: list[Callable[[Any], object]] = [
        lambda value: value["a"][1:],
        lambda value: value["b"][0][1:],
        lambda value: value["c"][1:],
    ]
    with store_of(1, size=1 << 16, max_object_size=1 << 14, serde=MsgpackSerde) as (writer, ends):
        place = writer.put("key", sent)
        for keep in keeps:
            with refuses(ViewInUse), ends[0].view(*place) as value:
                kept = keep(value)
            del value, kept
        with ends[0].view(*place) as value:
            assert float(value["t"].sum()) == 9
