"""torch CPU tensors: every dtype and shape comes back unchanged."""

import copyreg
import weakref

import pytest

from memlane import MsgpackSerde, copy_blocks
from tests.support.missing import package
from tests.support.queues import queue_of, refuses
from tests.support.stores import store_of

pytestmark = pytest.mark.unit

torch = package("torch")

torch.set_num_threads(1)  # or the first test would leave torch's threads behind

DTYPES = [
    *[torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64],
    *[torch.uint16, torch.uint32, torch.uint64],
    *[torch.float16, torch.bfloat16, torch.float32, torch.float64],
    *[torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
    *[torch.float8_e8m0fnu, torch.complex32, torch.complex64, torch.complex128],
]
SHAPES = [(), (0,), (3, 0), (7,), (50, 60), (100, 30, 10)]


class Image(torch.Tensor):
    pass


class Own(torch.Tensor):
    def __reduce_ex__(self, _protocol: object) -> tuple[object, ...]:
        return str, ("reduced",)


class Registered(torch.Tensor):
    pass


copyreg.pickle(Registered, lambda _: (str, ("registered",)))


class Stated(torch.Tensor):
    def __setstate__(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [4096, 1 << 20])
def test_every_dtype_and_shape_arrives(dtype: "torch.dtype", chunk: int) -> None:
    """bfloat16 and float8 included; 0-dim, empty and large ones."""
    with queue_of(max_chunk_bytes=chunk) as (writer, (reader,)):
        for shape in SHAPES:
            tensor = (torch.rand(shape) * 10).to(dtype)
            writer.enqueue({"tensor": tensor})
            got = reader.dequeue()["tensor"]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            same = got.reshape(-1).view(torch.uint8) == tensor.reshape(-1).view(torch.uint8)
            assert bool(same.all())


def test_layouts_and_gradients_are_kept() -> None:
    """Gaps, transposition and requires_grad; parameters stay parameters."""
    base = torch.arange(60_000.0).reshape(200, 300)
    parameter = torch.nn.Parameter(torch.ones(50, 50))
    wanting = torch.ones(70, 70, requires_grad=True)
    with queue_of() as (writer, (reader,)):
        writer.enqueue([base.T, base[::2], parameter, wanting, base.conj()])
        transposed, sliced, parameter_got, wanting_got, conjugate = reader.dequeue()
        assert torch.equal(transposed, base.T)
        assert torch.equal(sliced, base[::2])
        assert isinstance(parameter_got, torch.nn.Parameter)
        assert wanting_got.requires_grad
        assert torch.equal(conjugate, base)


def sparse_tensors() -> "list[torch.Tensor]":
    dense = torch.arange(40_000.0).reshape(200, 200) % 3
    layouts = [dense.to_sparse_csr(), dense.to_sparse_csc()]
    blocks = [dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 2))]
    uncoalesced = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,))
    return [dense.to_sparse(), uncoalesced, dense.to_sparse().requires_grad_(), *layouts, *blocks]


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_tensors_come_back_unchanged() -> None:
    """They come back unchanged, and are freed when dropped (torch's own reducer keeps them)."""
    with queue_of() as (writer, (reader,)):
        for tensor in sparse_tensors():
            writer.enqueue(tensor)
            got = reader.dequeue()
            assert (got.layout, got.dtype, got.shape) == (tensor.layout, tensor.dtype, tensor.shape)
            assert got.requires_grad == tensor.requires_grad
            assert torch.equal(got.to_dense(), tensor.to_dense())
            if tensor.layout == torch.sparse_coo:
                assert got.is_coalesced() == tensor.is_coalesced()
            gone = weakref.ref(got)
            del got
            assert gone() is None


def test_unusual_tensors_come_back() -> None:
    """Lazy bits, attributes, types, and tensors without memory come back too."""
    base = torch.arange(12_000.0).reshape(30, 400)
    lazy = [base.to(torch.complex64).mul(1j).conj(), base.to(torch.complex64).conj().imag]
    quantized = torch.quantize_per_tensor(base, 0.1, 0, torch.quint8)
    named = base.clone()
    named.origin = "camera 1"
    with queue_of() as (writer, (reader,)):
        writer.enqueue([*lazy, quantized, named, base.to("meta"), base.as_subclass(Image)])
        conjugate, negative, got_quantized, got_named, meta, image = reader.dequeue()
        assert torch.equal(conjugate, lazy[0])
        assert torch.equal(negative, lazy[1])
        assert torch.equal(got_quantized.dequantize(), quantized.dequantize())
        assert torch.equal(got_named, base)
        assert got_named.origin == "camera 1"
        assert (meta.device.type, meta.shape) == ("meta", base.shape)
        assert type(image) is Image
        assert torch.equal(image.as_subclass(torch.Tensor), base)


def pieces() -> "dict[str, torch.Tensor]":
    """Ten elements each of storages of 4 MB."""
    real, complexes = torch.zeros(1_000_000), torch.arange(500_000.0) * (1 + 2j)
    tagged, both = real[:10], complexes[:10].conj()
    tagged.tag, both.tag = {"origin": "camera 1"}, "both"
    image = real[10:20].as_subclass(Image)
    image.tag = 7
    labelled = torch.nn.Parameter(real[20:30])
    labelled.tag = "weight"
    return {
        "plain": real[:10],
        "attribute": tagged,
        "conjugate": complexes[:10].conj(),
        "negative": complexes[:10].conj().imag,
        "wanting": complexes[:10].conj().requires_grad_(),
        "conjugate with an attribute": both,
        "subclass": image,
        "parameter": torch.nn.Parameter(real[:10]),
        "parameter of a subclass": torch.nn.Parameter(real[:10].as_subclass(Image)),
        "parameter with an attribute": labelled,
        "buffer": torch.nn.Buffer(real[:10]),
        "rows": torch.zeros(1000, 1000).as_subclass(Image)[:, :10][:1],
    }


@pytest.mark.parametrize("name", pieces())
def test_a_piece_is_sent_without_the_rest_of_its_storage(name: str) -> None:
    """Also with an attribute, a lazy operation or a type of its own, all of which it keeps."""
    piece = pieces()[name]
    with queue_of(max_chunk_bytes=1 << 16, max_extent_bytes=0) as (writer, (reader,)):
        writer.enqueue(piece)
        got = reader.dequeue()
        assert reader.statistics().bytes < 10_000
        assert got.untyped_storage().nbytes() < 10_000
        assert (type(got), got.__dict__) == (type(piece), piece.__dict__)
        assert (got.is_conj(), got.is_neg()) == (piece.is_conj(), piece.is_neg())
        assert (got.dtype, got.requires_grad) == (piece.dtype, piece.requires_grad)
        assert torch.equal(got, piece)


def test_tensors_that_pickle_themselves_keep_their_types() -> None:
    """A subclass's own reduction and state, and one that is registered with copyreg, count."""
    base = torch.zeros(1_000_000)
    with queue_of(max_chunk_bytes=1 << 16) as (writer, (reader,)):
        writer.enqueue([base[:4].as_subclass(Own), base[:4].as_subclass(Registered)])
        assert reader.dequeue() == ["reduced", "registered"]
        stated = base[:4].as_subclass(Stated)
        stated.tag = 1
        writer.enqueue(stated)
        assert reader.dequeue().state == {"tag": 1}


def test_an_attribute_may_refer_to_its_tensor() -> None:
    """As attributes of other objects may."""
    tensor = torch.ones(3)
    tensor.me = tensor
    with queue_of() as (writer, (reader,)):
        writer.enqueue(tensor)
        got = reader.dequeue()
        assert got.me is got
    del tensor.me, got.me


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"])
def test_quantized_dtypes_without_a_quantizer_arrive_pickled(name: str) -> None:
    """torch reads such memory only by its own pickling; msgpack has no tensors."""
    dtype = getattr(torch, name)
    whole = torch.ones(5000, dtype=torch.int32 if name == "qint32" else torch.uint8)
    tensor = whole.view(dtype)
    with queue_of(max_chunk_bytes=1 << 20) as (writer, (reader,)):
        writer.enqueue([tensor, "behind it"])
        got, text = reader.dequeue()
        assert (got.dtype, got.shape, text) == (dtype, tensor.shape, "behind it")
        assert bytes(got.untyped_storage()) == bytes(tensor.untyped_storage())
    with queue_of(serializer="msgpack") as (writer, _), refuses(TypeError):
        writer.enqueue(tensor)


def without_memory() -> "list[torch.Tensor]":
    freed, shrunk, lazy = (torch.ones(70, 70, dtype=torch.complex64) for _ in range(3))
    tensors = [freed, freed[1:, 1:], shrunk, shrunk.T[1:], lazy.conj()]
    freed.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(100)
    lazy.untyped_storage().resize_(0)
    functional = torch._to_functional_tensor(torch.ones(70, 70))
    return [*tensors, torch._efficientzerotensor(70, 70), functional]


def test_tensors_whose_storage_was_freed_or_shrunk() -> None:
    """Refused, and the queue goes on; as `copy_blocks` and a storage do."""
    with (
        queue_of() as (writer, (reader,)),
        store_of(1, size=1 << 20, max_object_size=1 << 18, serde=MsgpackSerde) as (store, (end,)),
    ):
        for tensor in without_memory():
            with refuses(ValueError, match="storage was freed"):
                writer.enqueue([tensor])
            with refuses(ValueError, match="storage was freed"):
                store.put("key", tensor)
        target = torch.zeros(70, 70)
        for tensor in without_memory():
            if tensor.is_conj():
                continue  # refused for that
            with refuses(ValueError, match="storage was freed"):
                copy_blocks(tensor, target, [(0, 1)])
        writer.enqueue(target)
        assert torch.equal(reader.dequeue(), target)
        assert torch.equal(end.get(*store.put("key", target)), target)


def dense_tensors() -> "list[torch.Tensor]":
    base = torch.arange(24_000.0).reshape(2, 20, 30, 20)
    one = torch.arange(6000.0).reshape(2, 1, 50, 60)
    return [
        *[base.permute(3, 1, 0, 2), base.to(memory_format=torch.channels_last), base[0].T],
        *[base[1].mT, base.bfloat16().mT, base.transpose(0, 1), torch.ones(300, 300).T],
        *[one.to(memory_format=torch.channels_last), one, torch.ones(1, 5000).T],
    ]


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_dense_tensors_keep_their_strides() -> None:
    """As with pickle; those with gaps arrive in C order."""
    base = torch.arange(24_000.0).reshape(2, 20, 30, 20)
    gaps = [base[:, 3].mT, base[..., :7], torch.ones(300).expand(100, 300)]
    with (
        queue_of(max_chunk_bytes=1 << 20) as (writer, (reader,)),
        store_of(1, size=1 << 21, max_object_size=1 << 20, serde=MsgpackSerde) as (store, (end,)),
    ):
        wanted = {tensor: tensor.stride() for tensor in dense_tensors()}
        wanted |= {tensor: tensor.contiguous().stride() for tensor in gaps}
        for tensor, strides in wanted.items():
            writer.enqueue(tensor)
            with end.view(*store.put("key", tensor)) as viewed:
                copies = [reader.dequeue(), end.get(*store.get_cached("key")), viewed]
            for got in copies:
                assert torch.equal(got, tensor)
                assert got.stride() == strides
                assert not got._is_view()
            store.clear()


def test_tensors_are_the_readers_own() -> None:
    """Writable, and not changed by later messages."""
    with queue_of(2) as (writer, (one, other)):
        writer.enqueue(torch.zeros(10_000))
        mine = one.dequeue()
        mine += 1
        assert bool((other.dequeue() == 0).all())
