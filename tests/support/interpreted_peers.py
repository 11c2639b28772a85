"""The peers in .peers against the ops, in Triton's interpreter; run as a script.

Prints one line of JSON per model and peer: [model, peer, "" or what is wrong], and for a
peer that is missing [null, peer, reason]. Activations are fp16: the interpreter multiplies
the bits of bf16 matrices.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl

import peers
from install_peers import FOLDER
from peer_sglang import PEERS
from problem import Problem, Workload

HALF = {"activation_dtype": torch.float16}
MODELS = {
    "gdn": Workload(2, 1, 3, 32, 16, "gdn", D=4, **HALF),
    "kda": Workload(2, 2, 2, 32, 16, "kda", D=3, **HALF),
    "kda-safe": Workload(1, 1, 2, 32, 16, "kda", D=2, lower_bound=-5.0, **HALF),
}


class Int(int):
    def to(self, dtype):
        return self


@triton.jit
def exp(x):
    return tl.exp(x)


def help_the_interpreter() -> None:
    """It counts loops in Python's ints, sees no alias of tl.exp, and has CPU tensors."""
    for name, module in list(sys.modules.items()):
        if name.endswith(("gdn_replayssm_spec_fold", "kda_replayssm_spec_decode")):
            module.range = lambda start, stop: map(Int, range(start, int(stop)))
        if name.endswith("sglang.kernels.ops.attention.fla.fused_recurrent"):
            module.exp = exp
    torch.Tensor.is_cuda = True


if __name__ == "__main__":
    found, missing = peers.find(FOLDER, PEERS)
    for name, reason in missing.items():
        print(json.dumps([None, name, reason]))
    help_the_interpreter()
    for label, model in MODELS.items():
        problem = Problem(model, 4, "cpu")
        problem.accept_lens.copy_(torch.tensor([1, model.D, 2, 0]))
        for peer in found:
            try:
                wrong = peers.agrees(peer, problem) or ""
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            print(json.dumps([label, peer.name, wrong]), flush=True)
