"""Print what tools/bench/bench.py wrote as Markdown: python tools/bench/table.py FILE [--model NAME]."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

FLOORS = {
    "verify": "floor: state read",
    "decode": "floor: state read and written",
    "fold": "floor: state read and written",
    "commit": "floor: state read and written",
    "step": "floor: state read twice, written once",
}
NUMBER = int | float
ROW = {
    "model": str, "op": str, "B": int, "D": int, "accept": int | str, "exact": bool,
    "us": NUMBER, "floor_us": NUMBER, "peers": dict,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON of tools/bench/bench.py")
    parser.add_argument("--model", help="default: every one, under headings")
    options = parser.parse_args()
    rows = read(options.file)["rows"]
    models = distinct(row["model"] for row in rows)
    if options.model is None:
        print("\n\n".join(f"### {model}\n\n{table(rows, model)}" for model in models))
    elif options.model in models:
        print(table(rows, options.model))
    else:
        parser.error(f"argument --model: must be one of {models}, got {options.model}")


def read(file: Path, **kinds: type) -> dict:
    """What tools/bench/bench.py wrote, with fields of these kinds in its head.

    Exits with status 2 and one line where the file is not that.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        refuse(file, f"no JSON to read: {error}")
    _check(file, "the file", found, {**kinds, "rows": list})
    for i, row in enumerate(found["rows"]):
        _check(file, f"row {i}", row, ROW)
        _check(file, f"row {i}", {"fused_floor_us": 0, **row}, {"fused_floor_us": NUMBER})
        times = row["us"], *row["peers"].values()
        if not all(isinstance(us, NUMBER) and 0 < us < float("inf") for us in times):
            refuse(file, f"row {i} must have times above 0, has {times}")
        if row["op"] not in FLOORS:
            refuse(file, f"row {i} must have an op of {[*FLOORS]}, has {row['op']!r}")
    return found


def _check(file: Path, what: str, fields: object, kinds: dict[str, type]) -> None:
    if not isinstance(fields, dict):
        refuse(file, f"{what} must be an object, is a {type(fields).__name__}")
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            wanted = getattr(kind, "__name__", kind)
            refuse(
                file, f"{what} must have {name} of {wanted}, has {fields.get(name)!r:.40}"
            )


def refuse(file: Path, reason: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {file}: {reason}", file=sys.stderr)
    sys.exit(2)


def table(rows: list[dict], model: str) -> str:
    """A model's microseconds, a column per B: ours, below them the peers', the floors.

    In brackets stands a peer's time over ours with exact=True, or False if only that ran.
    """
    rows = [row for row in rows if row["model"] == model]
    several = len({row["D"] for row in rows}) > 1
    lines: dict[str, dict[int, str]] = {}
    for figure in distinct((row["op"], row["D"], row["accept"]) for row in rows):
        group = [row for row in rows if (row["op"], row["D"], row["accept"]) == figure]
        label = group[0]["op"] + rows_of(group[0])
        label += f", D = {group[0]['D']}" if several else ""
        for row in group:
            own = label if row["exact"] else f"{label}, exact=False"
            lines.setdefault(own, {})[row["B"]] = f"{row['us']:,.0f}"
        for row in sorted(group, key=lambda row: row["exact"]):  # the exact one stays
            for peer, us in row["peers"].items():
                cell = f"{us:,.0f} ({us / row['us']:.2f}x)"
                lines.setdefault(f"{label}: {peer}", {})[row["B"]] = cell
    for row in rows:
        if row["floor_us"]:
            floor = lines.setdefault(FLOORS[row["op"]], {})
            floor[row["B"]] = f"{row['floor_us']:,.0f}"
    batches = sorted({row["B"] for row in rows})
    return "\n".join(
        [
            f"| | B = {' | '.join(map(str, batches))} |",
            "|---" * (len(batches) + 1) + "|",
            *(
                f"| {label} | {' | '.join(cells.get(B, '') for B in batches)} |"
                for label, cells in lines.items()
            ),
        ]
    )


def rows_of(row: dict) -> str:
    """How much a figure commits, as the end of a label."""
    if row["op"] == "verify":
        return ""
    if row["op"] == "decode":
        return ", 1 token"
    accept = {"uniform": f"1 to {row['D']}", "all": "all"}.get(row["accept"], row["accept"])
    return f", {accept} row" + "s" * (accept != 1)


def distinct(values: Iterable) -> list:
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    main()
