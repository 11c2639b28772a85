"""What becomes of the calls of wrong_values; run as a script.

REPLAYSSM_DEBUG=1 python debugged.py            every call on the CPU, a JSON line each
REPLAYSSM_DEBUG=1 python debugged.py CASE ...   one call on the GPU, or its graph
REPLAYSSM_DEBUG=1 python debugged.py graphs     what right calls' graphs do after all stops
"""

import hashlib
import json
import sys

import torch

from calls import CALLS, gathered, mutated
from contract import call
from replayssm.graph import inspect
from samples import bits, pages
from wrong_values import CASES, CONV, FOLD, HARMLESS, RAGGED

# Calls that are captured, and the kernel of each.
GRAPHS = {
    FOLD: "fold", RAGGED: "recur", "decode-gdn": "recur", "store-gdn": "store",
    "scatter-conv-track": "scatter", CONV: "conv_commit",
    "commit_indices-track": "commit_indices",
}  # fmt: skip


def outcome(label, change):
    """(the error or "", the arguments that were written): of one call on the CPU."""
    op, values, arguments = call(label, change)
    names = mutated(op._schema.name.split("::")[1], values)
    before = {name: pages(values[name]).clone() for name in names}
    error = ""
    try:
        op(**arguments)
    except ValueError as raised:
        error = str(raised)
    differ = [
        name
        for name, value in before.items()
        if not torch.equal(bits(pages(values[name])), bits(value))
    ]
    return error, differ


def digest(label):
    """What one right call returns and writes, as a few letters."""
    op, values, arguments = call(label, {})
    outputs = op(**arguments)
    outputs = (
        [] if outputs is None else outputs if isinstance(outputs, tuple) else [outputs]
    )
    sums = hashlib.sha256()
    for x in (*outputs, *(pages(x) for x in values.values() if torch.is_tensor(x))):
        sums.update(bits(x).numpy().tobytes())
    return sums.hexdigest()


def compiled():
    """A call that is checked behind torch.compile; a right one before it."""
    op, _, right = call(FOLD, {})
    _, _, wrong = call(FOLD, CASES["a slot twice"].change)
    fold = torch.compile(lambda **x: op(**x), backend="aot_eager", fullgraph=True)
    fold(**right)
    try:
        fold(**wrong)
    except ValueError as error:
        return str(error)
    return ""


def aliased(compile):
    """Slots exchanged through a copy of the state, which compilers read without it."""

    def exchange(state, slots, sources, steps):
        snapshots = state.clone().unsqueeze(2)
        torch.ops.replayssm.scatter(state, snapshots, slots, steps, source_indices=sources)

    state, slots = torch.randn(2, 4, 3, 5), torch.tensor([0, 1])
    before = state.clone()
    try:
        exchange = torch.compile(exchange, fullgraph=True) if compile else exchange
        exchange(state, slots, slots.flip(0), slots * 0)
    except ValueError as error:
        return str(error)
    return "" if torch.equal(state[:, :2], before[:, :2].flip(1)) else "wrong"


class Mapped:
    """Bytes of the host, pinned, that the device writes where they are."""

    def __init__(self, x):
        self.bytes = pages(x).cpu().flatten().view(torch.uint8).pin_memory()
        self.before = self.bytes.clone()
        self.__cuda_array_interface__ = {
            "data": (self.bytes.data_ptr(), False), "shape": tuple(self.bytes.shape),
            "typestr": "|u1", "version": 3,
        }  # fmt: skip

    def like(self, x):
        memory = torch.as_tensor(self, device="cuda").view(x.dtype)
        return memory.as_strided(x.size(), x.stride(), x.storage_offset())


def on_gpu(name, captured, mapped):
    """A right call, then the wrong one, which must not pass; what of the host's memory,
    that outlives the device's context, they wrote."""
    case = CASES[name]
    for change, which in (({}, "right"), (case.change, "wrong")):
        op, values, _ = call(case.label, change, "cuda")
        names = mutated(op._schema.name.split("::")[1], values) if mapped else []
        hosts = {x: Mapped(values[x]) for x in names}
        arguments = gathered(
            values | {x: host.like(values[x]) for x, host in hosts.items()}
        )
        try:
            if which == "wrong" and captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    op(**arguments)
                graph.replay()
            else:
                op(**arguments)
            torch.cuda.synchronize()
            print(f"the {which} call passed", flush=True)
        finally:
            wrote = [x for x, y in hosts.items() if not torch.equal(y.bytes, y.before)]
            print(f"the {which} call wrote {wrote}", flush=True)


def after_all_stops(label):
    """How many stops a captured call has, and the kernels that wait for every one."""
    op, _, arguments = call(label, {}, "cuda")
    op(**arguments)  # compiles
    graph, edges = torch.cuda.CUDAGraph(keep_graph=True), []
    with torch.cuda.graph(graph):
        op(**arguments)
    # Edges name nodes in the order of capture: so must the list.
    inspect._order = lambda count, pairs: edges.extend(pairs) or range(count)
    found = inspect.nodes(graph)
    stops = {i for i, node in enumerate(found) if node.name == "stop_unless"}
    return len(stops), [x.name for i, x in enumerate(found) if stops <= awaited(i, edges)]


def awaited(node, edges):
    """All nodes that have a path of edges to a node."""
    found, ends = set(), {node}
    while ends:
        ends = {source for source, target in edges if target in ends} - found
        found |= ends
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["graphs"]:
        for label in GRAPHS:
            print(json.dumps([label, after_all_stops(label)]))
        sys.exit()
    if sys.argv[1:]:
        on_gpu(sys.argv[1], *(word in sys.argv[2:] for word in ("captured", "mapped")))
        sys.exit()
    for name, (label, change, *_) in (CASES | HARMLESS).items():
        print(json.dumps([name, outcome(label, change)]))
    for label in CALLS:
        print(json.dumps([label, digest(label)]))
    for label in (FOLD, RAGGED, "commit_indices-track", CONV):
        op, _, arguments = call(label, {})
        torch.library.opcheck(op, (), arguments)
    print(json.dumps(["compiled", compiled()]))
    print(json.dumps(["aliased", [aliased(compile=False), aliased(compile=True)]]))
