"""Draw what tools/bench/bench.py wrote: python tools/bench/plot.py FILE --out FOLDER.

Writes latency.png (microseconds against B, beside floors and peers, for one model),
share.png (share of the floor, every model) and, where the file has peers for it,
step-speedup.png (a step against each peer's).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from table import NUMBER, distinct, read, refuse, rows_of

OURS = {True: ("replayssm", "#1f5fbf"), False: ("replayssm, exact=False", "#0b9e84")}
FLOORS = {"floor_us": ("floor", "--"), "fused_floor_us": ("floor, fused", ":")}
OTHERS = ["#e07b39", "#c23b4b", "#8064a8", "#8a6d52", "#d279b5", "#b89b1d", "#4f9cc9"]
GREY = "#77787b"
STYLE = {
    "figure.dpi": 150, "savefig.bbox": "tight", "font.size": 9, "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e4e5e7", "axes.axisbelow": True,
    "lines.markersize": 4, "legend.frameon": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="JSON of tools/bench/bench.py")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", default="qwen3.5-35b", help="of latency.png")
    options = parser.parse_args()
    results = read(options.file, card=str, torch=str, copy_gbs=NUMBER)
    if not results["rows"]:
        refuse(options.file, "has no rows to draw")
    for path in draw(results, options.out, options.model):
        print(path)


def draw(results: dict, folder: Path, model: str) -> Iterator[Path]:
    """Write the plots; yields their paths. A model that is not there: the first."""
    chosen = typical(results["rows"])
    models = distinct(row["model"] for row in chosen)
    model = model if model in models else models[0]
    plots = {
        "latency": lambda: latency([row for row in chosen if row["model"] == model]),
        "share": lambda: share(chosen),
    }
    steps = [row for row in chosen if row["op"] == "step" and row["peers"]]
    if steps:
        plots["step-speedup"] = lambda: speedup(steps)
    taken = (
        f"{results['card']}, copy {results['copy_gbs']:,} GB/s, torch {results['torch']}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        with plt.rc_context(STYLE):
            figure = plot()
            figure.text(1, 0, taken, ha="right", va="top", color=GREY, fontsize=7)
            path = folder / f"{name}.png"
            figure.savefig(path)
            plt.close(figure)
        yield path


def typical(rows: list[dict]) -> list[dict]:
    """Of each model one D, 8 where there is one, and of each op one accept, half of D."""
    chosen = []
    for model in distinct(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        drafts = distinct(row["D"] for row in mine)
        D = 8 if 8 in drafts else drafts[0]
        for op in distinct(row["op"] for row in mine):
            same = [row for row in mine if row["op"] == op and row["D"] == D]
            accepts = distinct(row["accept"] for row in same)
            half = (D + 1) // 2
            accept = half if half in accepts else next(iter(accepts), None)
            chosen += [row for row in same if row["accept"] == accept]
    return chosen


def latency(rows: list[dict]) -> Figure:
    """A panel an op: ours, floors and peers against B."""
    figure, panels = grid(distinct(row["op"] for row in rows))
    peers = peer_colours(rows)
    for op, axes in panels.items():
        mine = [row for row in rows if row["op"] == op]
        for exact, (label, colour) in OURS.items():
            line(axes, [row for row in mine if row["exact"] == exact], "us", label, colour)
        for key, (label, style) in FLOORS.items():
            some = [row for row in mine if row.get(key)]
            line(axes, some, key, label, GREY, linestyle=style, marker="")
        for peer, colour in peers.items():
            theirs = [row | {"us": row["peers"].get(peer)} for row in mine]
            line(axes, [row for row in theirs if row["us"]], "us", peer, colour, lw=1)
        axes.set(yscale="log", title=op + rows_of(mine[0]))
    title = f"{rows[0]['model']}, D = {rows[0]['D']}"
    return finish(figure, panels, title, "us, all layers")


def share(rows: list[dict]) -> Figure:
    """A panel an op and kind of outputs: the floor over the time, a line per model."""
    figure, panels = grid(distinct((row["op"], row["exact"]) for row in rows))
    ours = [colour for _, colour in OURS.values()]
    models = colours(distinct(row["model"] for row in rows), [*ours, *OTHERS])
    for (op, exact), axes in panels.items():
        for model, colour in models.items():
            mine = [
                row | {"share": 100 * row["floor_us"] / row["us"]}
                for row in rows
                if (row["model"], row["op"], row["exact"]) == (model, op, exact)
            ]
            line(axes, mine, "share", model, colour)
        axes.set(ylim=(0, 100), title=op if exact else f"{op}, exact=False")
    return finish(figure, panels, "Share of the memory floor", "floor / time, %")


def speedup(rows: list[dict]) -> Figure:
    """A panel a model: each peer's step over ours, dashed over ours with exact=False."""
    figure, panels = grid(distinct(row["model"] for row in rows))
    for model, axes in panels.items():
        mine = [row for row in rows if row["model"] == model]
        axes.axhline(1, color=GREY, lw=1)
        for exact, style in ((True, "-"), (False, "--")):
            some = [row for row in mine if row["exact"] == exact]
            if some:
                axes.plot([], [], label=OURS[exact][0], color=GREY, linestyle=style)
            for peer, colour in peer_colours(rows).items():
                ratios = [
                    row | {"ratio": row["peers"][peer] / row["us"]}
                    for row in some
                    if peer in row["peers"]
                ]
                label = peer if exact else ""
                line(axes, ratios, "ratio", label, colour, linestyle=style)
        axes.set_title(f"{model}, D = {mine[0]['D']}")
    figure.axes[0].set_ylim(bottom=0)  # last, of all: it ends the scaling to the data
    title = "A step (verify + fold) against each peer's"
    return finish(figure, panels, title, "times as fast")


def grid(keys: list) -> tuple[Figure, dict]:
    """A figure with one panel per key, three in a row."""
    wide = min(3, len(keys))
    tall = -(-len(keys) // wide)
    figure, axes = plt.subplots(
        tall, wide, figsize=(3.3 * wide, 2.5 * tall + 0.6), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for spare in axes.flat[len(keys) :]:
        spare.set_axis_off()
    return figure, dict(zip(keys, axes.flat, strict=False))


def line(axes: Axes, rows: list[dict], key: str, label: str, colour: str, **style) -> None:
    if rows:
        rows = sorted(rows, key=lambda row: row["B"])
        x, y = [row["B"] for row in rows], [row[key] for row in rows]
        axes.plot(x, y, label=label, color=colour, **{"marker": "o", **style})


def finish(figure: Figure, panels: dict, title: str, unit: str) -> Figure:
    """Titles, ticks at each B, and one legend below for all panels."""
    handles: dict[str, Line2D] = {}
    for axes in panels.values():
        batches = sorted({x for curve in axes.lines for x in curve.get_xdata() if x >= 1})
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [f"{x:.0f}" for x in batches])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("B")
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel(unit)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center",
        ncols=min(4, len(handles)),
    )  # fmt: skip
    figure.suptitle(title, fontsize=12)
    return figure


def colours(names: list[str], palette: list[str]) -> dict[str, str]:
    return {name: palette[i % len(palette)] for i, name in enumerate(names)}


def peer_colours(rows: list[dict]) -> dict[str, str]:
    return colours(distinct(peer for row in rows for peer in row["peers"]), OTHERS)


if __name__ == "__main__":
    main()
