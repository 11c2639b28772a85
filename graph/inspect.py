"""What a captured CUDA graph does, node by node, as a list and as text."""

import heapq
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# The driver's words for a node's type, where ours differ.
_KINDS = {"graph": "child", "mem_alloc": "alloc", "mem_free": "free"}
_COLUMNS = ("kind", "name", "grid", "block", "bytes")


@dataclass(frozen=True)
class Node:
    """One node of a CUDA graph.

    kind: "kernel", "memcpy", "memset", "alloc", "free", "empty", "host", "child",
        "conditional", or the driver's own word for a rarer one, such as "event_record".
    name: a kernel's function; of a C++ kernel its scopes and name without template
        arguments. Empty for every other kind.
    grid, block: a kernel's programs and the threads of one, (x, y, z).
    bytes: what a memcpy, memset or alloc node moves, fills or allocates.
    depth: 0 in the graph itself, 1 in a child graph of it, and so on.
    """

    kind: str
    name: str = ""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    bytes: int | None = None
    depth: int = 0


def nodes(graph: torch.cuda.CUDAGraph | int | Any) -> list[Node]:
    """List a captured graph's nodes so that each stands after all it waits for.

    Args:
        graph: a ``torch.cuda.CUDAGraph(keep_graph=True)`` that has been captured, or
            the handle of a graph: an int or a handle object of cuda-python. It is
            read, not changed, and need not be instantiated.

    Returns:
        The nodes in topological order; those that do not wait for each other stand in
        the order they were captured in. The nodes of a child graph follow its node.
        The body of a conditional node is not listed.

    Raises:
        TypeError: graph is none of these.
        ValueError: graph was made without keep_graph, or nothing is captured.
        ImportError: cuda-python is not installed.
        RuntimeError: a call of the CUDA driver failed; the text names it and the error.
    """
    handle = _handle(graph)
    return list(_walk(_driver(), handle, 0))


def describe(graph: torch.cuda.CUDAGraph | int | Any) -> str:
    """Put a captured graph's nodes into a table: one line a node, then the sum.

    Args:
        graph: as for :func:`nodes`.

    Returns:
        The lines, without a newline at the end. A child graph's nodes are indented.
        Nothing in it depends on the process: the same work gives the same text.

    Raises:
        TypeError, ValueError, ImportError, RuntimeError: as for :func:`nodes`.
    """
    found = nodes(graph)
    rows = [_COLUMNS, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    counts = Counter(node.kind for node in found)
    total = f"{len(found)} node{'' if len(found) == 1 else 's'}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    lines.append(f"{total}: {kinds}" if found else total)
    return "\n".join(line.rstrip() for line in lines)


def _row(node: Node) -> tuple[str, ...]:
    grid, block = (
        "" if size is None else "x".join(map(str, size)) for size in (node.grid, node.block)
    )
    kind = "  " * node.depth + node.kind
    return kind, node.name, grid, block, "" if node.bytes is None else str(node.bytes)


def _handle(graph: Any) -> int:
    if hasattr(graph, "raw_cuda_graph"):
        try:
            handle = int(graph.raw_cuda_graph())
        except RuntimeError as error:
            if "keep_graph" in str(error):
                raise ValueError(
                    "graph must be a torch.cuda.CUDAGraph(keep_graph=True), got one "
                    "made without keep_graph, which drops its nodes after the capture"
                ) from error
            raise ValueError(
                "graph must be captured, got one whose capture has not ended"
            ) from error
    elif isinstance(graph, int) and not isinstance(graph, bool):
        handle = graph
    elif hasattr(graph, "getPtr") and hasattr(graph, "__int__"):  # CUgraph, cudaGraph_t
        handle = int(graph)
    else:
        raise TypeError(
            "graph must be a torch.cuda.CUDAGraph, an int or a cuda-python handle, got "
            f"{type(graph).__name__}"
        )
    if handle <= 0:
        raise ValueError(f"graph must be captured, got the handle {handle}")
    return handle


def _driver() -> Any:
    # The driver's interface, not the runtime's: the latter refuses to tell the
    # parameters of a kernel that it did not load itself, so of all Triton kernels.
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(
            "reading a CUDA graph needs cuda-python 12.8 or newer, which is not "
            "installed: pip install cuda-python"
        ) from error
    return driver


def _ask(driver: Any, call: str, *args: Any) -> Any:
    """What a call of the driver returns beside its status."""
    status, *values = getattr(driver, call)(*args)
    if int(status):
        raise RuntimeError(f"{call} failed with {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else values


def _arrays(driver: Any, call: str, graph: Any) -> list[list[Any]]:
    """The arrays of a call that tells their length when asked for none of them."""
    *arrays, count = _ask(driver, call, graph, 0)
    if count:
        *arrays, count = _ask(driver, call, graph, count)
    return [list(array or ())[:count] for array in arrays]


def _walk(driver: Any, graph: Any, depth: int) -> Iterator[Node]:
    handles = _arrays(driver, "cuGraphGetNodes", graph)[0]
    # In 12.x the plain call fails on programmatic-launch edges, which carry data that
    # it has no room for (CUDA_ERROR_LOSSY_QUERY); in 13 it is what _v2 was.
    v2 = hasattr(driver, "cuGraphGetEdges_v2")
    call = "cuGraphGetEdges_v2" if v2 else "cuGraphGetEdges"
    sources, targets, *_ = _arrays(driver, call, graph)
    index = {int(handle): i for i, handle in enumerate(handles)}
    edges = [
        (index.get(int(source), -1), index.get(int(target), -1))
        for source, target in zip(sources, targets, strict=True)
    ]
    for i in _order(len(handles), edges):
        node = _node(driver, handles[i], depth)
        yield node
        if node.kind == "child":
            child = _ask(driver, "cuGraphChildGraphNodeGetGraph", handles[i])
            yield from _walk(driver, child, depth + 1)


def _order(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """0 to count - 1, each after all that have an edge to it, else the smallest first."""
    followers: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for source, target in edges:
        if source >= 0 and target >= 0:
            followers[source].append(target)
            waits[target] += 1
    ready = [i for i in range(count) if not waits[i]]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for follower in followers[order[-1]]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, follower)
    if len(order) < count or any(-1 in edge for edge in edges):
        raise RuntimeError("the graph's edges do not fit its nodes: it changed meanwhile")
    return order


def _node(driver: Any, handle: Any, depth: int) -> Node:
    word = _ask(driver, "cuGraphNodeGetType", handle).name
    word = word.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    kind = _KINDS.get(word, word)
    if kind == "kernel":
        p = _ask(driver, "cuGraphKernelNodeGetParams", handle)
        grid = p.gridDimX, p.gridDimY, p.gridDimZ
        block = p.blockDimX, p.blockDimY, p.blockDimZ
        return Node(kind, _short(_kernel_name(driver, p)), grid, block, depth=depth)
    size = None
    if kind == "memcpy":
        p = _ask(driver, "cuGraphMemcpyNodeGetParams", handle)
        size = p.WidthInBytes * max(p.Height, 1) * max(p.Depth, 1)
    elif kind == "memset":
        p = _ask(driver, "cuGraphMemsetNodeGetParams", handle)
        size = p.elementSize * p.width * max(p.height, 1)
    elif kind == "alloc":
        size = _ask(driver, "cuGraphMemAllocNodeGetParams", handle).bytesize
    return Node(kind, bytes=size, depth=depth)


def _kernel_name(driver: Any, params: Any) -> str:
    """The symbol of a kernel node's function.

    A node made from a CUfunction has ``func``. One made from a CUkernel, as libraries
    loaded lazily are, has ``kern``, or the CUkernel in ``func``.
    """
    func, kern = int(params.func), int(params.kern)
    error: RuntimeError | None = None
    for call, kind, handle in (
        ("cuFuncGetName", "CUfunction", func),
        ("cuKernelGetName", "CUkernel", kern),
        ("cuKernelGetName", "CUkernel", func),
    ):
        if handle:
            try:
                name = _ask(driver, call, getattr(driver, kind)(handle))
            except RuntimeError as failure:
                error = error or failure
            else:
                return name.decode() if isinstance(name, bytes) else str(name)
    raise error or RuntimeError("a kernel node has neither a function nor a kernel")


def _short(symbol: str) -> str:
    """_ZN2at6native4fillIfEEvPf -> at::native::fill; a C symbol stays as it is."""
    start = re.match(r"_Z(N?)", symbol)
    if start is None:
        return symbol
    names, at = [], start.end()
    while part := re.compile(r"(St)?L?(\d+)").match(symbol, at):
        at = part.end() + int(part[2])
        name = symbol[part.end() : at]
        # The compiler puts a hash of the file into the name, which changes with it.
        hidden = name.startswith("_GLOBAL__N_")
        names += ["std"] if part[1] else []
        names.append("(anonymous namespace)" if hidden else name)
        if not start[1]:  # what follows an unscoped name are its parameters
            break
    return "::".join(names) or symbol
