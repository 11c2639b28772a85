"""Reading a graph through a fake driver; test_inspect_captured reads real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline

from fake_driver import KINDS, Driver, graph, kernel, memcpy, memset
from replayssm.graph import Node, describe, nodes

COPY = "_ZN2at6native12_GLOBAL__N_18copy_impIfEEvPT_"
MIXED = {
    7: graph(
        [
            kernel(func=1, grid=(24, 1, 1), block=(64, 1, 1)),
            memcpy(256, 4, 2),
            memset(4, 10, 3),
            ("child", 8),
            kernel(func=2, grid=(3, 2, 5), block=(32, 4, 2)),
            ("empty", None),
        ],
        [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
    ),
    8: graph([("alloc", SimpleNamespace(bytesize=512)), ("free", None)], [(0, 1)]),
}
NAMES = {1: b"recur", 2: COPY.encode()}


@pytest.fixture
def install(monkeypatch):
    """Puts a fake driver in cuda-python's place."""

    def put(*args, **kwargs):
        driver = Driver(*args, **kwargs)
        package = ModuleType("cuda.bindings")
        package.driver = driver
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        return driver

    return put


def test_every_kind_of_node_is_listed_with_its_sizes(install):
    install(MIXED, NAMES)
    assert nodes(7) == [
        Node("kernel", "recur", (24, 1, 1), (64, 1, 1)),
        Node("memcpy", bytes=2048),
        Node("memset", bytes=120),
        Node("child"),
        Node("alloc", bytes=512, depth=1),
        Node("free", depth=1),
        Node(
            "kernel", "at::native::(anonymous namespace)::copy_imp", (3, 2, 5), (32, 4, 2)
        ),
        Node("empty"),
    ]


def test_the_table_shows_every_node_and_counts_the_kinds(install):
    install(MIXED, NAMES)
    assert_expected_inline(
        describe(7),
        """\
kind     name                                         grid    block   bytes
kernel   recur                                        24x1x1  64x1x1
memcpy                                                                2048
memset                                                                120
child
  alloc                                                               512
  free
kernel   at::native::(anonymous namespace)::copy_imp  3x2x5   32x4x2
empty
8 nodes: 2 kernel, 1 memcpy, 1 memset, 1 child, 1 alloc, 1 free, 1 empty""",
    )


def test_extents_that_a_plain_copy_or_fill_leaves_at_zero_count_as_one(install):
    install({7: graph([memcpy(256, 0, 0), memset(4, 10, 0)])})
    assert [node.bytes for node in nodes(7)] == [256, 40]


def test_one_node_is_counted_in_the_singular(install):
    install({7: graph([memcpy(4)])})
    assert describe(7).endswith("\n1 node: 1 memcpy")


def test_a_graph_without_nodes_has_an_empty_table(install):
    install({7: graph([])})
    assert nodes(7) == []
    assert describe(7) == "kind  name  grid  block  bytes\n0 nodes"


@pytest.mark.parametrize(
    ("edges", "order"),
    [
        ([], [1, 2, 3, 4]),
        ([(3, 2), (2, 1), (1, 0)], [4, 3, 2, 1]),
        ([(0, 3), (3, 1)], [1, 3, 4, 2]),
        ([(0, 1)], [1, 2, 3, 4]),  # the smallest that is ready, not the first that was
        ([(2, 0), (3, 0)], [2, 3, 4, 1]),
        ([(3, 0), (3, 0)], [2, 3, 4, 1]),  # two edges of one pair, on different ports
    ],
)
@pytest.mark.parametrize("lossy", [False, True])
def test_a_node_stands_after_what_it_waits_for_and_else_where_it_was(
    install, edges, order, lossy
):
    install({7: graph([memcpy(i) for i in (1, 2, 3, 4)], edges)}, lossy=lossy)
    assert [node.bytes for node in nodes(7)] == order


@pytest.mark.parametrize("edges", [[(0, 1), (1, 0)], [(0, 9)]])
def test_edges_that_do_not_fit_the_nodes_are_an_error(install, edges):
    install({7: graph([memcpy(1), memcpy(2)], edges)})
    with pytest.raises(RuntimeError, match="edges do not fit its nodes"):
        nodes(7)


@pytest.mark.parametrize(
    ("func", "kern", "name"),
    [(1, 0, "f"), (0, 2, "k"), (1, 2, "f"), (2, 0, "k"), (3, 2, "k"), (2, 4, "k")],
)
def test_a_name_comes_from_the_function_or_the_library_kernel(install, func, kern, name):
    install({7: graph([kernel(func, kern)])}, {1: b"f"}, {2: b"k"})
    assert nodes(7)[0].name == name


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("fold", "fold"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEE",
            "at::native::vectorized_elementwise_kernel",
        ),
        ("_Z4spin3Foo", "spin"),
        ("_ZL4spinPf", "spin"),
        ("_ZNSt6vectorIfE4dataEv", "std::vector"),
        ("_ZN51_GLOBAL__N__00000000_10_Indexing_cu_89abcdef_123456L3runEv",
         "(anonymous namespace)::run"),
        ("_Z", "_Z"),
    ],
)  # fmt: skip
def test_a_mangled_name_keeps_its_scopes_and_loses_its_templates(install, symbol, name):
    install({7: graph([kernel(1)])}, {1: symbol.encode()})
    assert nodes(7)[0].name == name


ASKED = [
    "cuGraphGetNodes", "cuGraphGetEdges", "cuGraphNodeGetType",
    "cuGraphKernelNodeGetParams", "cuGraphMemcpyNodeGetParams",
    "cuGraphMemsetNodeGetParams", "cuGraphMemAllocNodeGetParams",
    "cuGraphChildGraphNodeGetGraph",
]  # fmt: skip


@pytest.mark.parametrize("call", ASKED)
def test_a_failed_call_is_an_error_naming_it_and_the_cuda_error(install, call):
    install(MIXED, NAMES, failing=call)
    with pytest.raises(RuntimeError) as error:
        describe(7)
    assert str(error.value) == f"{call} failed with CUDA_ERROR_INVALID_HANDLE"


@pytest.mark.parametrize(
    ("func", "kern", "call"), [(3, 4, "cuFuncGetName"), (0, 4, "cuKernelGetName")]
)
def test_a_kernel_without_a_readable_name_is_an_error_not_a_blank(
    install, func, kern, call
):
    install({7: graph([kernel(func, kern)])})
    with pytest.raises(RuntimeError, match=f"{call} failed with CUDA_ERROR_INVALID_HANDLE"):
        nodes(7)


def test_a_kernel_node_without_any_handle_is_an_error(install):
    install({7: graph([kernel()])})
    with pytest.raises(RuntimeError, match="neither a function nor a kernel"):
        nodes(7)


def test_the_calls_and_fields_exist_in_the_installed_cuda_python(install):
    real = pytest.importorskip("cuda.bindings.driver")
    fake = install(MIXED, NAMES | {2: b"x"}, {9: b"y"})
    describe(7)
    asked = {*fake.calls, "cuKernelGetName", "CUfunction", "CUkernel"}
    assert {call for call in asked if not hasattr(real, call)} == set()
    for struct, (_, sample) in {
        "CUDA_KERNEL_NODE_PARAMS": kernel(),
        "CUDA_MEMCPY3D": memcpy(1),
        "CUDA_MEMSET_NODE_PARAMS": memset(1, 1),
        "CUDA_MEM_ALLOC_NODE_PARAMS": MIXED[8]["nodes"][0],
    }.items():
        assert set(vars(sample)) <= set(dir(getattr(real, struct)))
    for kind in ("kernel", "memcpy", "memset", *KINDS):
        assert hasattr(
            real.CUgraphNodeType, "CU_GRAPH_NODE_TYPE_" + KINDS.get(kind, kind.upper())
        )


def test_a_graph_may_be_a_handle_or_torchs_object(install):
    bindings = pytest.importorskip("cuda.bindings.driver")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    install(MIXED, NAMES)
    torchs = SimpleNamespace(raw_cuda_graph=lambda: 7)
    for handle in (bindings.CUgraph(7), runtime.cudaGraph_t(7), torchs):
        assert nodes(handle) == nodes(7)


@pytest.mark.parametrize("call", [nodes, describe])
def test_a_graph_that_keeps_no_nodes_is_refused_saying_how_to_capture_it(call):
    def dropped():
        raise RuntimeError("You cannot ... was initialized with keep_graph=true")

    with pytest.raises(ValueError) as error:
        call(SimpleNamespace(raw_cuda_graph=dropped))
    assert_expected_inline(
        str(error.value),
        """graph must be a torch.cuda.CUDAGraph(keep_graph=True), got one made without keep_graph, which drops its nodes after the capture""",
    )


def test_a_graph_before_its_capture_is_refused():
    def early():
        raise RuntimeError("You cannot ... until capture_end() has been called")

    with pytest.raises(ValueError, match=r"^graph must be captured, got one whose capture"):
        nodes(SimpleNamespace(raw_cuda_graph=early))
    with pytest.raises(ValueError, match=r"^graph must be captured, got the handle 0$"):
        nodes(0)


@pytest.mark.parametrize("wrong", [None, True, 7.0, "7", torch.tensor(7)])
def test_what_is_no_graph_is_refused(install, wrong):
    install(MIXED, NAMES)
    with pytest.raises(TypeError, match=rf"^graph must be .*, got {type(wrong).__name__}$"):
        nodes(wrong)


def test_without_cuda_python_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"needs cuda-python .* pip install cuda-python"):
        nodes(7)
