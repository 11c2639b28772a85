"""The weights of the demo: what is committed and saved, and bad files refused."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import decode
import train
from demo import WEIGHTS, run
from drafters import STYLES
from model import TARGETS, Config, HybridLM
from samples import bits_equal

kinds = pytest.mark.parametrize("kind", TARGETS)


def damage(folder: Path, name: str, how: str) -> None:
    """Replaces a file of the folder by a bad one."""
    path = folder / f"{name}.safetensors"
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    elif how == "foreign":
        save_file(load_file(path), path)  # no configuration, as another program writes it
    else:
        shutil.copy(folder / f"{how}.safetensors", path)


CASES = [("gdn", how) for how in ("missing", "truncated", "text", "foreign", "gdn-dspark")]


@pytest.mark.parametrize(("name", "how"), [*CASES, ("gdn-dflash", "gdn-dspark")])
def test_bad_weights_give_one_line_and_exit_code_2(tmp_path, name, how):
    folder = shutil.copytree(WEIGHTS, tmp_path / "weights")
    damage(folder, name, how)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = run("--model", "gdn", "--drafter", "dflash", "--weights", folder)
    assert (done.returncode, done.stdout) == (2, b"")
    line = f"error: weights: {folder / name}.safetensors: .+\n"
    assert re.fullmatch(line, done.stderr.decode()), done.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@kinds
def test_saved_weights_are_rounded_to_fp16_and_everyone_may_read_them(tmp_path, kind):
    path, model = tmp_path / "new" / "model.safetensors", HybridLM(TARGETS[kind])
    train.save_weights(path, model)
    assert path.stat().st_mode & 0o777 == 0o644
    loaded = decode.load_weights(path, lambda fields: HybridLM(Config(**fields)))
    for name, value in loaded.state_dict().items():
        bits_equal(value, value.half().float(), name)
        bits_equal(model.state_dict()[name], value, name)  # rounded as well


def test_training_is_told_where_to_write(tmp_path, monkeypatch, capsys):
    """Or it would replace the committed weights."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--text", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert "the following arguments are required: --out\n" in capsys.readouterr().err


def test_the_committed_weights_are_small():
    files = {path.stem: path.stat().st_size for path in WEIGHTS.glob("*.safetensors")}
    drafters = {f"{kind}-{style}" for kind in TARGETS for style in STYLES}
    assert files.keys() == {*TARGETS} | drafters
    assert sum(files.values()) <= 4_000_000
