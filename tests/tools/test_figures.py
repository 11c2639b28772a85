"""Plots and tables of a benchmark's JSON, and that the documents say what it says."""

import json
import re
import struct
import sys
from pathlib import Path

import pytest

import plot
import table

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "docs/benchmarks/h200.json").read_text())
MODELS = table.distinct(row["model"] for row in RESULTS["rows"])


def figure(op: str, B: int, us: float, **other) -> dict:
    floors = {"floor_us": us / 2, "io_us": 1.0}
    if op == "step":
        floors["fused_floor_us"] = us / 3
    shape = {"model": "tiny", "variant": "gdn", "op": op, "B": B, "D": 8, "accept": 4}
    return {**shape, "exact": True, "us": us, **floors, "peers": {}, **other}


def results(rows: list[dict]) -> dict:
    return {"card": "a card", "torch": "2.13", "copy_gbs": 4000, "rows": rows}


ROWS = [
    figure("verify", 1, 1500.4, accept=0, peers={"rival": 3000.8}),
    figure("verify", 1, 1000, accept=0, exact=False, peers={"rival": 3000.8}),
    figure("step", 1, 40, peers={"rival": 50.0}),
    figure("step", 1, 40, accept="uniform", D=8),
    figure("verify", 8, 3000, accept=0),
    figure("step", 8, 60, peers={"rival": 90.0, "other": 80.0}),
]


def test_a_table_has_ours_then_peers_with_their_ratio_then_floors():
    assert table.table(ROWS, "tiny").splitlines() == [
        "| | B = 1 | 8 |",
        "|---|---|---|",
        "| verify | 1,500 | 3,000 |",
        "| verify, exact=False | 1,000 |  |",
        "| verify: rival | 3,001 (2.00x) |  |",
        "| step, 4 rows | 40 | 60 |",
        "| step, 4 rows: rival | 50 (1.25x) | 90 (1.50x) |",
        "| step, 4 rows: other |  | 80 (1.33x) |",
        "| step, 1 to 8 rows | 40 |  |",
        "| floor: state read | 500 | 1,500 |",
        "| floor: state read twice, written once | 20 | 30 |",
    ]


def one_row(**changes) -> bytes:
    return json.dumps(results([figure("fold", 1, 10.0) | changes])).encode()


GOOD = json.dumps(results(ROWS)).encode()
MALFORMED = {
    "empty": (b"", "no JSON to read"),
    "cut": (GOOD[:-9], "no JSON to read"),
    "text": (b"| verify | 1 |", "no JSON to read"),
    "not of a text": (b"\xff\xfe", "no JSON to read"),
    "too deep": (b"[" * 10**5, "no JSON to read"),
    "a list": (b"[]", "the file must be an object, is a list"),
    "no rows": (b'{"card": "", "torch": "", "copy_gbs": 1}', "must have rows of list"),
    "a row that is a number": (
        b'{"card": "", "torch": "", "copy_gbs": 1, "rows": [1]}', "row 0 must be an object",
    ),
    "a text for a batch": (one_row(B="8"), "row 0 must have B of int, has '8'"),
    "peers in a list": (one_row(peers=[1]), "row 0 must have peers of dict, has [1]"),
    "a peer's time in words": (one_row(peers={"rival": "10"}), "must have times above 0"),
    "no time at all": (one_row(us=0), "row 0 must have times above 0, has (0,)"),
    "a floor in words": (one_row(fused_floor_us="1"), "row 0 must have fused_floor_us of "),
    "an unknown op": (one_row(op="sort"), "row 0 must have an op of "),
}  # fmt: skip


@pytest.mark.parametrize("tool", [table, plot])
@pytest.mark.parametrize("how", MALFORMED)
def test_a_malformed_file_is_refused_in_one_line(monkeypatch, capsys, tmp_path, tool, how):
    """With status 2, and nothing is written."""
    content, reason = MALFORMED[how]
    file = tmp_path / "figures.json"
    file.write_bytes(content)
    options = ["--out", str(tmp_path)] if tool is plot else []
    monkeypatch.setattr(sys, "argv", ["tool", str(file), *options])
    with pytest.raises(SystemExit) as stop:
        tool.main()
    out, error = capsys.readouterr()
    assert stop.value.code == 2
    assert error.startswith(f"tool: {file}: ") and reason in error
    assert error.count("\n") == 1 and not out
    assert [*tmp_path.iterdir()] == [file]


def test_a_file_without_figures_is_not_drawn(monkeypatch, capsys, tmp_path):
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(results([])))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(file), "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        plot.main()
    assert capsys.readouterr().err == f"plot.py: {file}: has no rows to draw\n"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (ROWS, ["latency", "share", "step-speedup"]),
        (RESULTS["rows"], ["latency", "share", "step-speedup"]),
        (ROWS[:1], ["latency", "share"]),
    ],
    ids=["peers", "published", "one"],
)
def test_each_plot_that_the_file_has_figures_for_is_written(tmp_path, rows, names):
    paths = list(plot.draw(results(rows), tmp_path / "new", "qwen3.5-35b"))
    assert paths == [tmp_path / "new" / f"{name}.png" for name in names]
    for path in paths:
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert min(width, height) > 300


def test_a_speed_up_is_the_peers_time_over_ours():
    steps = [row for row in ROWS if row["op"] == "step" and row["peers"]]
    (axes,) = plot.speedup(steps).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["rival"] == [1.25, 1.5]
    assert lines["other"] == [80 / 60]
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 1.5


def test_the_readme_speaks_of_the_figures_that_are_published():
    text = (ROOT / "README.md").read_text()
    speed = text[text.index("## Speed") :]
    assert f"{RESULTS['copy_gbs']:,} GB/s" in speed
    lines = re.findall(r"^\|.*\|$", speed, re.MULTILINE)
    assert len(lines) > 2
    assert set(lines) <= set(table.table(RESULTS["rows"], "qwen3.5-35b").splitlines())


def test_the_performance_page_ends_with_the_tables_of_the_published_figures():
    """Its last part is what tools/table.py prints."""
    page = (ROOT / "docs/performance.md").read_text()
    tables = (f"### {model}\n\n{table.table(RESULTS['rows'], model)}" for model in MODELS)
    assert page.endswith("\n\n" + "\n\n".join(tables) + "\n")
