"""Reading graphs that torch captured on a GPU."""

import pytest
import torch
from expecttest import assert_expected_inline

from replayssm.graph import Node, describe, nodes
from replayssm.ops import select
from samples import make

pytestmark = pytest.mark.gpu


def captured(work):
    """The graph of work, which is run once before: it compiles."""
    work()
    torch.cuda.synchronize()
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(kept):
        work()
    return kept


def stream():
    return torch.cuda.current_stream().cuda_stream


def test_copies_fills_and_torch_kernels_are_told_apart():
    driver = pytest.importorskip("cuda.bindings.driver")
    x, y = torch.zeros(2, 1024, device="cuda")

    def work():
        x.copy_(y)
        driver.cuMemsetD8Async(x.data_ptr(), 1, 256, stream())
        torch.add(x, y, out=x)

    copy, fill, add = nodes(captured(work))
    assert (copy.kind, copy.bytes) == ("memcpy", 4096)
    assert (fill.kind, fill.bytes) == ("memset", 256)
    assert (add.kind, add.bytes) == ("kernel", None)
    assert "elementwise_kernel" in add.name
    assert "<" not in add.name and not add.name.startswith("_Z")
    assert add.grid[0] * add.block[0] >= 1024 // 16


def test_an_allocation_in_a_graph_is_seen():
    driver = pytest.importorskip("cuda.bindings.driver")

    def work():
        status, pointer = driver.cuMemAllocAsync(4096, stream())
        assert int(status) == 0
        driver.cuMemFreeAsync(pointer, stream())

    alloc, free = nodes(captured(work))
    assert (alloc.kind, free.kind) == ("alloc", "free")
    assert alloc.bytes >= 4096


def test_a_branch_stands_between_its_fork_and_its_join():
    x, y, z = torch.zeros(3, 1024, device="cuda")
    side = torch.cuda.Stream()

    def work():
        x.copy_(y)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z.mul_(x)
        torch.cuda.current_stream().wait_stream(side)
        y.copy_(z)

    kinds = [node.kind for node in nodes(captured(work)) if node.kind != "empty"]
    assert kinds == ["memcpy", "kernel", "memcpy"]


def verify_and_fold():
    problem = make("cuda", B=3, D=4, HV=2, K=32, V=64)
    accept_lens = problem.indices([1, 4, 0])

    def work():
        problem.verify()
        problem.fold(accept_lens)

    return captured(work)


def test_verify_and_fold_are_one_kernel_each_and_allocate_nothing():
    kernels = select.kernels(torch.cuda.current_device())
    BV, warps = kernels.recur_tile(2, 32, 64, 3, False)
    fold_BV, fold_warps = kernels.fold_tile(2, 32, 64, 3, False)
    assert nodes(verify_and_fold()) == [
        Node("kernel", "recur", (64 // BV * 2 * 3, 1, 1), (32 * warps, 1, 1)),
        Node("kernel", "fold", (64 // fold_BV * 2 * 3, 1, 1), (32 * fold_warps, 1, 1)),
    ]


def test_the_table_of_verify_and_fold_is_the_same_for_every_capture():
    if select.lowering().name != "gluon":
        pytest.skip("the portable kernels have other tiles")
    texts = [describe(verify_and_fold()) for _ in range(2)]
    assert texts[0] == texts[1]
    assert_expected_inline(
        texts[0],
        """\
kind    name   grid    block   bytes
kernel  recur  24x1x1  64x1x1
kernel  fold   24x1x1  64x1x1
2 nodes: 2 kernel""",
    )


def test_torchs_refusals_are_told_apart_from_each_other():
    with pytest.raises(ValueError, match=r"^graph must be captured"):
        nodes(torch.cuda.CUDAGraph(keep_graph=True))
    x = torch.zeros(8, device="cuda")
    dropped = torch.cuda.CUDAGraph()
    with torch.cuda.graph(dropped):
        x.add_(1)
    with pytest.raises(ValueError, match="made without keep_graph"):
        nodes(dropped)


def test_torchs_graph_and_its_raw_handle_list_the_same_nodes():
    driver = pytest.importorskip("cuda.bindings.driver")
    x = torch.zeros(8, device="cuda")
    kept = captured(lambda: x.add_(1))
    raw = kept.raw_cuda_graph()
    assert nodes(kept) == nodes(raw) == nodes(driver.CUgraph(raw)) != []
