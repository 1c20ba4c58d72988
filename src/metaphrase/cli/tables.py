"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from metaphrase.corpus.checks import Finding
from metaphrase.corpus.report import CorpusReport
from metaphrase.evaluation.compare import ONE_RUN_NOTE, verdict_shown
from metaphrase.evaluation.suites.running import Evaluations
from metaphrase.io.counts import counted
from metaphrase.io.tables import titled_table

#: Styles of findings, by severity.
STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row for each finding, with a few examples."""
    table = titled_table("Findings")
    for heading in ("", "check", "language"):
        table.add_column(heading, no_wrap=heading != "check")
    table.add_column("finding", overflow="fold", ratio=1)
    for finding in findings:
        message = Text(finding.message)
        for example in finding.examples[: 2 if finding.severity != "info" else 0]:
            message.append("\n" + " ||| ".join(text[:70] for text in example), style="dim")
        label = Text(finding.severity, style=STYLES[finding.severity])
        table.add_row(label, finding.code, finding.language or "", message)
    return table


def lines_without_pair(report: CorpusReport) -> str:
    """How many lines were skipped and why, in a sentence; empty if none were."""
    if not (dropped := report.dropped):
        return ""
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in dropped.most_common())
    return f"{dropped.total():,} of {report.read:,} lines were skipped: {reasons}."


def text_histogram(bins: Mapping[str, Sequence[float]], threshold: float | None = None, width: int = 50) -> list[str]:
    r"""A histogram as lines of text; the bins above a threshold are marked.

    >>> print(*text_histogram({"edges": [0.8, 1.0, 1.2], "counts": [4, 2]}, 1.0, width=4), sep="\n")
      0.800 ████ 4
    + 1.000 ██ 2
    """
    edges, counts = bins["edges"], bins["counts"]
    most = max(*counts, 1)
    return [
        f"{'+' if threshold is not None and edge >= threshold else ' '}{edge:6.3f} "
        f"{'█' * round(width * count / most) or ('▏' if count else '')} {count:,}"
        for edge, count in zip(edges, counts, strict=False)
    ]


def models_table(found: Evaluations) -> Table:
    """A row for each data set and encoder."""
    title = "Encoders" if found.baseline is None else f"Against {found.baseline['model']}"
    table = titled_table(title, "", "model", right=["measure", "score"])
    table.caption = "In percent or ×100, best first; ↓ lower is better."
    if found.baseline is not None:
        table.caption += " 95 % intervals of the differences; verdicts are not corrected for the number of encoders."
        table.caption += f" {ONE_RUN_NOTE}" * any(row.runs == 1 for row in found.rows)
        table.add_column("difference", justify="right")
        table.add_column("verdict")
    for row in found.rows:
        cells = [row.data, row.model, row.measure + " ↓" * row.lower_is_better, f"{row.score:.1f}"]
        if row.interval is not None:
            low, high = row.interval
            cells += [
                f"{row.difference:+.1f} [{low:+.1f}, {high:+.1f}]",
                verdict_shown({key: value for key, value in asdict(row).items() if value is not None}),
            ]
        table.add_row(*map(Text, cells))
    return table


def runs_table(rows: Sequence[Mapping[str, Any]], baseline: str) -> Table:
    """A row for each configuration and test set of :func:`metaphrase.publishing.run_comparison.compare_runs`."""
    table = titled_table(f"Against {baseline}", "", "test", right=["seeds", "before", "after", "difference"])
    table.caption = "95 % intervals over test items and, for several seeds, over seeds."
    table.add_column("verdict")
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            Text(row["configuration"]),
            Text(row["test"]),
            str(len(row["seeds"])),
            f"{row['before']:.1f}",
            f"{row['after']:.1f}",
            Text(f"{row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"),
            verdict_shown(row),
        )
    return table


def effect_lines(retention: Mapping[str, Any], abilities: Mapping[str, Any]) -> Iterator[str]:
    """What training changed in other languages and abilities, one line for each test set or guard."""
    for name, one in retention.items():
        title = f"{name}, {counted(len(one['languages']), 'language')} not trained on"
        yield _effect_line(title, one["pooled"], one["limit"], one["verdict"])
    for name, one in abilities.items():
        title = f"Other abilities, {name}, {counted(len(one['languages']), 'language')}"
        yield _effect_line(title, one, one.get("limit"), verdict_shown(one))


def _effect_line(title: str, row: Mapping[str, Any], limit: float | None, verdict: str) -> str:
    """What training changed on data outside the training objective, as one line."""
    low, high = row["interval"]
    line = "" if limit is None else f" against a red line of {0 - limit:g}"
    return (
        f"{title}: {row['before']:.1f} → {row['after']:.1f}, {row['difference']:+.2f} points "
        f"[{low:+.2f}, {high:+.2f}]{line}: {verdict}"
    )
