"""What replay takes in memory, beside snapshots: python tools/bench/memory.py --requests 48.

Prints a line a model, in MiB on one rank, as Markdown. --config reads other models from
JSON: {"NAME": {"layers": 48, "H": 16, "HV": 48, "K": 128, "V": 128, "variant": "gdn"}},
a model's fields those of replayssm.graph.LinearAttention, dtypes by name ("bfloat16").

"dense conv snapshots" are W-1 inputs a draft token. SGLang 0.5.23 keeps those of GDN on CUDA,
without trees, as one overlapping window of D+W-2: about what "conv windows" take.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from problem import MODELS as BENCHED
from replayssm.graph import LinearAttention, Memory, memory

REPLAY = ("state", "windows", "conv_states", "conv_windows")
SNAPSHOT = ("state", "snapshots", "conv_states", "conv_snapshots")
COLUMNS = (*REPLAY, "total", "snapshots", "conv_snapshots", "snapshot_total")


def label(column: str) -> str:
    """A column as it is shown."""
    return {"conv_snapshots": "dense conv snapshots"}.get(column, column.replace("_", " "))


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's layers of a model, and what they take."""

    model: LinearAttention
    memory: Memory


def whole(models: dict) -> dict[str, LinearAttention]:
    """The benchmarks' models before tensor parallelism: "-tp4" has a quarter of the heads."""
    found = {}
    for name, model in models.items():
        name, _, ranks = name.partition("-tp")
        heads = {"H": model.H * int(ranks or 1), "HV": model.HV * int(ranks or 1)}
        found[name] = dataclasses.replace(model, **heads)
    return found


MODELS = whole(BENCHED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", metavar="NAME", help="default: every one")
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON, see above")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--requests", type=int, default=48, help="verified at once, R")
    parser.add_argument("--slots", type=int, help="states kept, S; default: the requests")
    parser.add_argument("--window", type=int, default=8, help="rows of a window, T and D")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG as well")
    options = parser.parse_args()
    try:
        models = MODELS if options.config is None else read(options.config)
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"argument --config: {error}")
    unknown = [name for name in options.model or () if name not in models]
    if unknown:
        parser.error(
            f"argument --model: have {', '.join(models)}, got {', '.join(unknown)}"
        )
    # At least 1, or --requests 0 would be refused for the slots that it also asks for.
    slots = max(1, options.requests) if options.slots is None else options.slots
    sizes = {"slots": slots, "requests": options.requests, "window": options.window}
    chosen = {name: models[name] for name in options.model or models}
    taken, refused = shares(chosen, options.tp, sizes)
    title = (
        f"MiB a rank: TP = {options.tp}, S = {slots} slots, R = {options.requests} "
        f"requests, T = D = {options.window} rows"
    )
    if taken:
        print(f"{title}\n\n{table(taken)}")
    if taken and options.plot is not None:
        draw(taken, title.replace("MiB", "GiB"), options.plot)
    if refused:
        lines = (f"memory.py: {', '.join(of)}: {why}" for why, of in refused.items())
        sys.exit("\n".join(lines))


def read(path: Path) -> dict[str, LinearAttention]:
    """The models of a JSON file."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not all(isinstance(x, dict) for x in found.values()):
        raise ValueError(f"{path} must hold an object of objects, one a model")
    models = {}
    for name, fields in found.items():
        for key in ("activation_dtype", "state_dtype"):
            if isinstance(fields.get(key), str):  # of an unknown name the name is left
                fields[key] = getattr(torch, fields[key], fields[key])
        try:
            models[name] = LinearAttention(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, {name}: {error}") from error
    return models


def shares(
    models: dict[str, LinearAttention], ranks: int, sizes: dict[str, int]
) -> tuple[dict[str, Share], dict[str, list[str]]]:
    """Each model's share of one rank; and the refusals, each with the models it is of."""
    taken: dict[str, Share] = {}
    refused: dict[str, list[str]] = {}
    for name, model in models.items():
        try:
            bytes_taken = memory(model, tensor_parallel=ranks, **sizes)
            taken[name] = Share(model.rank(ranks), bytes_taken)
        except (ValueError, TypeError) as error:
            refused.setdefault(str(error), []).append(name)
    return taken, refused


def table(taken: dict[str, Share]) -> str:
    """MiB, a line a model: replay's pools and their total, then what snapshots need."""
    lines = [["model", "H / HV", *map(label, COLUMNS)], ["---"] * (2 + len(COLUMNS))]
    for name, share in taken.items():
        sizes = (getattr(share.memory, column) / 2**20 for column in COLUMNS)
        heads = f"{share.model.H}/{share.model.HV}"
        lines.append([name, heads, *(f"{size:,.1f}" for size in sizes)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(taken: dict[str, Share], title: str, path: Path) -> None:
    """Two bars a model, what replay takes above what snapshots take."""
    from plot import OTHERS, OURS, STYLE, plt  # matplotlib is of an extra, bench

    (_, blue), (_, green) = OURS.values()
    colours = {
        "state": "#c9cacd", "conv_states": "#9b9ca1", "windows": blue,
        "conv_windows": green, "snapshots": OTHERS[0], "conv_snapshots": OTHERS[1],
    }  # fmt: skip
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            figsize=(7, 0.55 * len(taken) + 1.5), layout="constrained"
        )
        for i, share in enumerate(taken.values()):
            for y, parts in ((i - 0.2, REPLAY), (i + 0.2, SNAPSHOT)):
                end = 0.0
                for part in parts:
                    size = getattr(share.memory, part) / 2**30
                    axes.barh(y, size, 0.36, left=end, color=colours[part])
                    end += size
                axes.annotate(
                    f"{end:,.1f}", (end, y), (3, 0), textcoords="offset points",
                    va="center", fontsize=7,
                )  # fmt: skip
        for part, colour in colours.items():
            axes.barh(0, 0, color=colour, label=label(part))
        axes.set_yticks(range(len(taken)), list(taken))
        axes.invert_yaxis()
        axes.margins(x=0.08)
        axes.grid(False, axis="y")
        axes.set_xlabel("GiB: replay above, snapshots below")
        figure.legend(loc="outside lower center", ncols=3)
        figure.suptitle(title, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    main()
