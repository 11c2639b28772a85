"""Print what tools/bench.py wrote as Markdown: python tools/table.py FILE [--model NAME]."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

FLOORS = {
    "verify": "floor: state read",
    "decode": "floor: state read and written",
    "fold": "floor: state read and written",
    "commit": "floor: state read and written",
    "step": "floor: state read twice, written once",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON of tools/bench.py")
    parser.add_argument("--model", help="default: every one, under headings")
    options = parser.parse_args()
    rows = json.loads(options.file.read_text())["rows"]
    models = distinct(row["model"] for row in rows)
    if options.model is None:
        print("\n\n".join(f"### {model}\n\n{table(rows, model)}" for model in models))
    elif options.model in models:
        print(table(rows, options.model))
    else:
        parser.error(f"argument --model: must be one of {models}, got {options.model}")


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
