"""What tools/sglang.py and docs/sglang.md name of SGLang is in the pinned release.

Its files are read, not imported: tools/install_peers.py keeps them.
"""

import ast
from pathlib import Path

import pytest

from documents import ROOT, blocks
from install_peers import ENGINE, FOLDER, installed, pins
from replayssm.graph.engines import sglang
from sglang_state import RINGS, Case, Shape

# What the bridge calls an object, and SGLang's class of it with the bases it has there.
OBJECTS = {
    "backend": ("MambaAttnBackendBase",),
    "requests": ("HybridReqToTokenPool",),
    "pool": ("MambaPool",),
    "pool.mamba_cache": ("State", "SpeculativeState"),
    "spec_state": ("State", "SpeculativeState"),
}


@pytest.fixture(scope="module")
def classes() -> dict[str, ast.ClassDef]:
    """The classes of SGLang's files, nested ones too, by name."""
    if installed(FOLDER).get("sglang") != pins()["sglang"]:
        pytest.skip(f"no sglang {pins()['sglang']}: tools/install_peers.py installs it")
    nodes = (node for file in ENGINE for node in ast.walk(ast.parse(text_of(file))))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def text_of(file: str) -> str:
    if not (FOLDER / file).exists():
        pytest.skip(f"no {file}: run tools/install_peers.py again")
    return (FOLDER / file).read_text()


def targets(node: ast.AST) -> set[str]:
    """The names and the self.names that are assigned anywhere below node."""
    stored = (n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store))
    return {ast.unparse(n) for n in stored}


def members(cls: ast.ClassDef) -> set[str]:
    """Fields, methods, and what methods assign to self."""
    fields = {name for node in cls.body if isinstance(node, ast.AnnAssign | ast.Assign)
              for name in targets(node)}  # fmt: skip
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
    own = {name.removeprefix("self.") for m in methods for name in targets(m)
           if name.startswith("self.")}  # fmt: skip
    return fields | own | {method.name for method in methods}


def reads(tree: ast.AST, of: str) -> set[str]:
    """The attributes that are read of an expression."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == of
    }


@pytest.mark.parametrize("of", OBJECTS)
def test_what_the_bridge_reads_of_an_object_its_class_has(classes, of):
    wanted = reads(ast.parse(Path(sglang.__file__).read_text()), of)
    if of == "spec_state":
        wanted |= set(RINGS)  # by getattr
    assert wanted
    assert wanted <= set().union(*(members(classes[name]) for name in OBJECTS[of]))


def test_the_states_of_the_tests_have_the_fields_of_sglangs(classes):
    fields = set().union(*(members(classes[n]) for n in OBJECTS["spec_state"]))
    methods = {"at_layer_idx", "mem_usage_bytes"}
    assert vars(Case(Shape(False), "cpu").spec_state).keys() == fields - methods


def test_the_backends_that_the_bridge_knows_by_name_are_linear_attentions(classes):
    for name in sglang.KINDS:
        assert [ast.unparse(base) for base in classes[name].bases] == list(
            OBJECTS["backend"]
        )


def test_the_fragments_of_the_page_name_what_the_method_has_there(classes):
    hybrid, names = classes["HybridLinearAttnBackend"], set()
    methods = {m.name: m for m in hybrid.body if isinstance(m, ast.FunctionDef)}
    method = methods["update_mamba_state_after_mtp_verify"]
    _, commits = (ast.parse(block.text) for block in blocks(ROOT / "docs/sglang.md"))
    names = {node.id for node in ast.walk(commits) if isinstance(node, ast.Name)}
    known = {argument.arg for argument in method.args.args} | targets(method)
    assert names - targets(commits) - {"sglang"} <= known
    assert reads(commits, "self") - {"route"} <= methods.keys()
    given = [a.arg for a in methods["_update_ple_state_after_mtp_verify"].args.args]
    assert given == [
        "self", "state_indices_tensor", "last_correct_step_indices",
        "mamba_track_indices", "mamba_steps_to_track", "src_indices_raw",
    ]  # fmt: skip


def called(nodes: list[ast.stmt]) -> list[str]:
    """The functions and methods that are called in these statements, in order."""
    found = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [ast.unparse(node.func) for node in found]


def test_sglang_parts_the_situations_that_the_routes_tests_name(classes):
    """KDA's fold, KDA that seeds its next verify, and scatter, in this order."""
    hybrid = classes["HybridLinearAttnBackend"]
    (method,) = (
        m for m in hybrid.body
        if getattr(m, "name", "") == "update_mamba_state_after_mtp_verify"
    )  # fmt: skip
    branches = [
        node for node in method.body
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return)
    ]  # fmt: skip
    assert [ast.unparse(node.test) for node in branches] == [
        "getattr(mamba_pool, 'replayssm_is_kda', False)", "accept_lens_pool is not None",
    ]  # fmt: skip
    fold, seeded = (called(node.body) for node in branches)
    assert fold == ["commit_kda_replayssm_after_verify"]
    assert "fused_conv_window_scatter_with_mask" in seeded
    rest = method.body[method.body.index(branches[-1]) + 1 :]
    assert called(rest) == [
        "scatter_mamba_states_after_mtp_verify", "self._update_ple_state_after_mtp_verify"
    ]  # fmt: skip


def test_sglang_refuses_replay_of_gdn_under_dflash_and_dspark_alone(classes):
    (build,) = (
        node for cls in classes.values() for node in cls.body
        if getattr(node, "name", "") == "_build_hybrid_req_pool"
    )  # fmt: skip
    (refusal,) = (
        node for node in ast.walk(build)
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
    )  # fmt: skip
    assert [ast.unparse(part) for part in refusal.test.values] == [
        "get_exec().mamba.enable_linear_replayssm_spec",
        "_algo in ('DSPARK', 'DFLASH')", "self.hybrid_kda_config is None",
    ]  # fmt: skip
