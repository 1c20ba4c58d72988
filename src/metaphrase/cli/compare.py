"""``metaphrase compare RUN …``: training runs against each other or against the encoder before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit
from metaphrase.cli.tables import runs_table
from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import option
from metaphrase.io.outputs import check_files
from metaphrase.publishing.run_comparison import BEFORE, compare_runs, save_plot

DESCRIPTION = "Compare training runs with each other, or with the encoder before training."
EXAMPLES = [
    "metaphrase compare runs/tr-1 runs/tr-2 runs/dap-1 runs/dap-2",
    "metaphrase compare runs/tr-1 runs/dap-1 --baseline runs/tr-1 --plot differences.svg",
]


@dataclass
class CompareOptions:
    """The runs and their baseline."""

    runs: list[str] = option(
        help="Folders that `metaphrase adapt`, `train --test` or `demo` wrote. Can be passed as the first arguments. Runs "
        "that differ only in their seed are pooled.",
        first=True,
    )
    baseline: str = option(
        BEFORE, "'before', the encoder that each run started from, or one of the folders (default: before)."
    )
    plot: str | None = option(None, "Also draw the differences, as PNG, SVG or PDF.")


def run(argv: Sequence[str]) -> int:
    """Compare the runs and print a table."""
    (options,) = parse("metaphrase compare", [CompareOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    if options.plot is not None and Path(options.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot requires a file name that ends in .png, .svg or .pdf, but got {options.plot}.")
    check_files([options.plot], [])
    rows = compare_runs(options.runs, baseline=options.baseline)
    drawn = [f"Plot: {save_plot(rows, options.plot)}"] if options.plot else []
    table = runs_table(rows) if options.baseline == BEFORE else runs_table(rows, options.baseline)
    emit({"baseline": options.baseline, "rows": rows}, table, *drawn)
    return 0
