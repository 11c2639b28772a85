"""cuda.bindings.driver for tests: graphs that are dicts instead of a GPU's."""

from types import ModuleType, SimpleNamespace

# The driver's words where the library's differ.
KINDS = {"child": "GRAPH", "alloc": "MEM_ALLOC", "free": "MEM_FREE"}


class Status(int):
    """A CUresult: an int with a name."""

    name = property(
        lambda self: {0: "CUDA_SUCCESS", 400: "CUDA_ERROR_INVALID_HANDLE"}[self]
    )


OK, FAILED = Status(0), Status(400)


class Driver(ModuleType):
    """cuda.bindings.driver over graphs that are dicts: handle -> its nodes and edges.

    A node is (kind, parameters). Functions are named by ``functions``, library kernels
    by ``kernels``; any other handle is refused, as is a call named in ``failing``.
    """

    CUfunction = CUkernel = int

    def __init__(self, graphs, functions=(), kernels=(), failing=None, lossy=False):
        super().__init__("driver")
        self.graphs, self.functions, self.kernels = graphs, dict(functions), dict(kernels)
        self.failing, self.calls = failing, []
        if lossy:  # 12.x: edges with data only come out of the second version
            self.cuGraphGetEdges_v2 = self.cuGraphGetEdges
            self.cuGraphGetEdges = lambda graph, n=0: (FAILED, None, None, n)

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name.startswith("cu"):
            self.calls.append(name)
            if name == super().__getattribute__("failing"):
                return lambda *args: (FAILED, None)
        return value

    def node(self, handle):
        return self.graphs[int(handle) // 100]["nodes"][int(handle) % 100]

    def cuGraphGetNodes(self, graph, n=0):
        held = [100 * int(graph) + i for i in range(len(self.graphs[int(graph)]["nodes"]))]
        return OK, held[:n], n or len(held)

    def cuGraphGetEdges(self, graph, n=0):
        edges = [
            tuple(100 * int(graph) + i for i in edge)
            for edge in self.graphs[int(graph)]["edges"]
        ]
        columns = [[edge[i] for edge in edges[:n]] for i in (0, 1)]
        return OK, *columns, [None] * n, n or len(edges)

    def cuGraphNodeGetType(self, node):
        kind = self.node(node)[0]
        return OK, SimpleNamespace(
            name="CU_GRAPH_NODE_TYPE_" + KINDS.get(kind, kind.upper())
        )

    def params(self, node):
        return OK, self.node(node)[1]

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = params
    cuGraphMemsetNodeGetParams = cuGraphMemAllocNodeGetParams = params
    cuGraphChildGraphNodeGetGraph = params

    def cuFuncGetName(self, handle):
        return (OK, self.functions[handle]) if handle in self.functions else (FAILED, None)

    def cuKernelGetName(self, handle):
        return (OK, self.kernels[handle]) if handle in self.kernels else (FAILED, None)


def kernel(func=0, kern=0, grid=(1, 1, 1), block=(32, 1, 1)):
    sizes = zip("XYZ", grid, block, strict=True)
    dims = {f"{n}Dim{a}": s for a, g, b in sizes for n, s in (("grid", g), ("block", b))}
    return "kernel", SimpleNamespace(func=func, kern=kern, **dims)


def memcpy(width, height=1, depth=1):
    return "memcpy", SimpleNamespace(WidthInBytes=width, Height=height, Depth=depth)


def memset(element, width, height=1):
    return "memset", SimpleNamespace(elementSize=element, width=width, height=height)


def graph(nodes, edges=()):
    return {"nodes": nodes, "edges": edges}
