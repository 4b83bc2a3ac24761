"""torch tensors over the network."""

from tests.support import PATIENCE
from tests.support.missing import package
from tests.support.remote_queues import remote_queue

torch = package("torch")


def test_torch_tensors_of_all_types_arrive() -> None:
    """Also of types that numpy does not have."""
    with remote_queue() as (writer, (reader,)):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64):
            tensor = torch.ones(2_000).to(dtype)
            writer.enqueue(tensor)
            got = reader.dequeue(PATIENCE)
            assert got.dtype == dtype
            assert got.view(torch.uint8).equal(tensor.view(torch.uint8))
            with_view = torch.zeros(5000)
            writer.enqueue(with_view)
            with reader.dequeue_view(PATIENCE) as view:
                assert view.equal(with_view)
