"""``metaphrase report RUN``: write a page that shows what training changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, notes, progress
from metaphrase.cli.tables import effect_lines
from metaphrase.io.configuration import split_list
from metaphrase.publishing.report import render_table
from metaphrase.publishing.run_report import ReportOptions, report_run

DESCRIPTION = "Write a report of a run: scores before and after, retention, word maps, margins, errors."
EXAMPLES = [
    "metaphrase report runs/sw",
    "metaphrase report runs/sw --data tests/sw --pairs sw:12 sw:40 --red_line 0.5",
]


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    (options,) = parse("metaphrase report", [ReportOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    options.languages = split_list(options.languages or [])
    console = notes()
    written = report_run(
        options,
        command=shlex.join(["metaphrase", "report", *argv]),
        note=console.print,
        progress=partial(progress, console),
    )
    files = f"Report: {written.page}, {written.page.with_suffix('.json').name} and {len(written.pictures)} pictures."
    emit(written.content, *_tables(written.content), files)
    return 0


def _tables(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    for name, after in report["after"].items():
        yield Text(name, style="bold")
        yield render_table(after, (report["before"] or {}).get(name), report["comparisons"].get(name))
    yield from effect_lines(report["analysis"]["retention"], report["analysis"]["abilities"])
    if verdict := report["analysis"]["verdict"]:
        yield Text(verdict)
