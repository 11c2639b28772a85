"""The benchmark's peers: found or named, installed whole, and doing the same work."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import install_peers
import peers
from peer_sglang import PEERS, pending_rows
from peers import Prepared
from problem import Problem, Workload
from process import SUPPORT, environment, python, skip_where_triton_cannot_interpret
from replayssm import ops


def put_distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


@pytest.fixture
def modules():
    """Forgets what a test imports from peers."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("sglang", "fla"):
            del sys.modules[name]


def test_every_requirement_pins_a_version_and_a_hash():
    lines = install_peers.REQUIREMENTS.read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line), line
    packages = {package for package, _ in PEERS.values()}
    assert packages == install_peers.pins().keys()


def test_every_peer_of_an_empty_folder_is_missing_with_the_command_to_run(tmp_path):
    found, missing = peers.find(tmp_path, PEERS)
    assert not found
    assert missing.keys() == PEERS.keys()
    for reason in missing.values():
        assert str(tmp_path) in reason and "tools/bench/install_peers.py" in reason


def test_a_peer_of_another_version_is_missing_with_both_versions(tmp_path):
    put_distribution(tmp_path, "fla-core", "0.5.0")
    found, missing = peers.find(tmp_path, PEERS)
    assert not found
    pin = install_peers.pins()["fla-core"]
    assert missing["fla"] == f"fla-core 0.5.0 in {tmp_path}, but {pin} is pinned"


def test_a_peer_that_cannot_be_imported_is_missing_with_the_error(tmp_path, modules):
    for name, version in install_peers.pins().items():
        put_distribution(tmp_path, name, version)
    found, missing = peers.find(tmp_path, PEERS)
    assert not found
    assert missing.keys() == PEERS.keys()
    assert all(reason.startswith("ModuleNotFoundError") for reason in missing.values())


def test_only_the_kernels_sources_and_what_the_bridge_reads_of_the_engine_are_kept(
    tmp_path,
):
    wanted = {"sglang/kernels/ops/a.py", "fla/ops/b.py", "fla_core-1.dist-info/METADATA"}
    wanted |= set(install_peers.ENGINE)
    others = {
        "sglang/srt/c.py",
        "sglang/srt/mem_cache/d.py",
        "sglang/kernels/d.so",
        "sglang/kernels/e.json",
        "bin/fla",
    }
    for name in wanted | others:
        (tmp_path / "wheel" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "wheel" / name).touch()
    install_peers.keep(tmp_path / "wheel", tmp_path / "kept")
    kept = (path for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert {str(path.relative_to(tmp_path / "kept")) for path in kept} == wanted


def test_a_folder_that_holds_no_peers_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds no peers: name another folder"):
        install_peers.install(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failing_install_says_so_and_leaves_the_folder_as_it_was(tmp_path):
    put_distribution(tmp_path, "sglang", "0.1")
    script = [sys.executable, install_peers.__file__, tmp_path]
    nowhere = {**environment(), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    run = subprocess.run(script, capture_output=True, text=True, env=nowhere)
    assert run.returncode == 1
    assert "pip failed, nothing was installed" in run.stderr
    assert install_peers.installed(tmp_path) == {"sglang": "0.1"}


@pytest.fixture
def problem():
    p = Problem(Workload(2, 1, 2, 32, 16, "gdn", D=3), 2, "cpu")
    p.accept_lens.copy_(torch.tensor([2, 3]))
    return p


def ours(wanted, output=1.0, state=1.0, conv_state=1.0) -> peers.Peer:
    """The ops themselves as a peer, with results multiplied."""

    def prepare(op, problem):
        if op not in wanted:
            return None
        own = copy.deepcopy(problem)

        def layers():
            run = own.decode if op == "decode" else own.verify
            for layer in range(own.model.layers):
                out = run(layer)
                if op != "commit":
                    yield out * output
            if op in ("step", "commit"):
                ops.fold(own.state, *own.windows, own.slots, own.accept_lens)

        convs = own.pools.conv_states if op == "commit" else []
        if convs:
            rows = torch.arange(own.B)
            ops.conv_commit(
                convs,
                own.pools.conv_windows,
                own.slots,
                own.accept_lens,
                window_indices=rows,
            )
        convs = [pool * conv_state for pool in convs]
        return Prepared(layers, lambda: own.state * state, convs)

    return peers.Peer("peer", prepare)


def test_a_peer_that_does_the_same_agrees_and_the_state_is_restored(problem):
    start = problem.state.clone()
    assert peers.agrees(ours(("verify", "decode", "step", "commit")), problem) is None
    assert torch.equal(problem.state, start)


@pytest.mark.parametrize("op", ["verify", "decode", "step"])
@pytest.mark.parametrize("factor", [0.97, float("nan")])
def test_other_outputs_are_reported_and_the_state_is_restored(problem, op, factor):
    start = problem.state.clone()
    wrong = peers.agrees(ours((op,), output=factor), problem)
    assert wrong and wrong.startswith(f"peer {op}: outputs of layer 0 differ by")
    assert torch.equal(problem.state, start)


@pytest.mark.parametrize("op", ["decode", "step", "commit"])
def test_another_committed_state_is_reported(problem, op):
    wrong = peers.agrees(ours((op,), state=1.0001), problem)
    assert wrong and wrong.startswith(f"peer {op}: states differ by 1.0e-04")


def test_conv_states_that_a_commit_moved_otherwise_are_reported(problem):
    wrong = peers.agrees(ours(("commit",), conv_state=1.01), problem)
    assert wrong == "peer commit: conv states differ"


@pytest.mark.parametrize("length, D", [(16, 4), (16, 8), (32, 4), (32, 8)])
def test_every_step_finds_as_many_full_rings_as_the_mean_step(length, D):
    L, accept_lens = 30, torch.arange(1, D + 1)
    pending = pending_rows(length, D, L, accept_lens)
    fullest, full = pending.clone(), []
    for _ in range(2 * length):
        pending = pending + accept_lens
        full.append((pending + 2 * D > length).sum(0))
        pending[pending + 2 * D > length] = 0
        fullest = torch.maximum(fullest, pending)
    full = torch.stack(full)
    assert (full.amax(0) - full.amin(0) <= 1).all()  # L is no multiple of every period
    assert (full.amin(0) > 0).all()
    assert fullest.max() <= length - 2 * D


def test_the_installed_peers_agree_with_the_ops_in_the_interpreter():
    if not install_peers.installed(install_peers.FOLDER):
        pytest.skip("no peers: tools/bench/install_peers.py installs them")
    pytest.importorskip("triton", reason="needs triton")
    skip_where_triton_cannot_interpret()
    run = python(SUPPORT / "interpreted_peers.py")
    assert run.returncode == 0, run.stderr
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    agreed = {peer for model, peer, wrong in outcomes if model and not wrong}
    assert [outcome for outcome in outcomes if outcome[0] and outcome[2]] == []
    assert agreed == PEERS.keys()
