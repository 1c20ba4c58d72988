"""Write the table of docs/reference/faults.md: which faults were triggered, how often, and how often a run survived.

    pytest --fault-table faults.jsonl
    python scripts/reliability.py faults.jsonl

If faults in the table are missing from the test run, the page is not written: only some of the tests ran. Pass
``--removed`` if their tests were removed or renamed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "faults.md"
BEGIN, END = "<!-- begin: the table is written by scripts/reliability.py -->", "<!-- end -->"


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """Read the rows of one or several test runs; of a test that ran twice, the last row counts."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["test"], row["fault"]] = row
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Format a Markdown table, with the same fault of several tests combined into one row."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        total = sums.setdefault((row["number"], row["fault"]), [0, 0])
        total[0] += row["tried"]
        total[1] += row["survived"]

    def order(item: tuple[tuple[str, str], list[int]]) -> tuple[Any, ...]:
        (number, fault), _ = item
        return number[0], int(re.sub(r"\D", "", number) or 0), fault

    lines = ["| | fault | tried | survived |", "|---|---|---:|---:|"]
    for (number, fault), (tried, survived) in sorted(sums.items(), key=order):
        lines.append(f"| {number} | {fault.replace('|', chr(92) + '|')} | {tried:,} | {survived:,} |")
    tried, survived = (sum(total[at] for total in sums.values()) for at in (0, 1))
    return "\n".join([*lines, f"| | **all** | **{tried:,}** | **{survived:,}** |"])


def faults_of(table: str) -> set[str]:
    """Return number and name of each fault in a table."""
    return {line.rsplit("|", 3)[0].strip("| ") for line in table.splitlines() if re.match(r"\| [A-Z]\d", line)}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table to the page; return 1 if a fault was not survived, or not tested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path, help="output of `pytest --fault-table`")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--removed", action="store_true", help="remove faults from the table that were not tested")
    options = parser.parse_args(argv)
    rows = read(options.rows)
    page = options.page.read_text(encoding="utf-8")
    before, marked = page.split(BEGIN)
    old_table, after = marked.split(END)
    new_table = table(rows)
    lost = sum(row["tried"] - row["survived"] for row in rows)
    print(f"{len(rows)} rows, {lost} not survived.")
    untested = sorted(faults_of(old_table) - faults_of(new_table))
    for fault in untested:
        print(f"Not tested: {fault}")
    if untested and not options.removed:
        print(f"{options.page} is unchanged. Run all tests, or pass --removed if these tests no longer exist.")
        return 1
    options.page.write_text(f"{before}{BEGIN}\n{new_table}\n{END}{after}", encoding="utf-8")
    return int(lost > 0)


if __name__ == "__main__":
    raise SystemExit(main())
