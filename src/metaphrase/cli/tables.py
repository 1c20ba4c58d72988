"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from metaphrase.corpus.checks import Finding
from metaphrase.corpus.report import CorpusReport
from metaphrase.evaluation.compare import ONE_RUN_NOTE, difference_shown, verdict_shown
from metaphrase.evaluation.suites.running import Evaluations
from metaphrase.io.counts import counted
from metaphrase.io.tables import titled_table

#: Styles of findings, by severity.
STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row for each finding, with a few examples."""
    table = titled_table("Findings")
    table.add_column("", no_wrap=True)
    table.add_column("check")
    table.add_column("language", no_wrap=True)
    table.add_column("finding", overflow="fold", ratio=1)
    for finding in findings:
        message = Text(finding.message)
        if finding.severity != "info":
            for example in finding.examples[:2]:
                message.append("\n" + " ||| ".join(text[:70] for text in example), style="dim")
        label = Text(finding.severity, style=STYLES[finding.severity])
        table.add_row(label, finding.code, finding.language or "", message)
    return table


def lines_without_pair(report: CorpusReport) -> str:
    """How many lines were skipped and why, in a sentence; empty if none were."""
    if not report.dropped:
        return ""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.most_common())
    return f"{report.dropped.total():,} of {report.read:,} lines were skipped: {reasons}."


def text_histogram(bins: Mapping[str, Sequence[float]], threshold: float | None = None, width: int = 50) -> list[str]:
    r"""A histogram as lines of text; the bins above a threshold are marked.

    >>> print(*text_histogram({"edges": [0.8, 1.0, 1.2], "counts": [4, 2]}, 1.0, width=4), sep="\n")
      0.800 ████ 4
    + 1.000 ██ 2
    """
    largest = max(*bins["counts"], 1)
    lines = []
    for edge, count in zip(bins["edges"], bins["counts"], strict=False):
        mark = "+" if threshold is not None and edge >= threshold else " "
        bar = "█" * round(width * count / largest)
        if count and not bar:
            bar = "▏"
        lines.append(f"{mark}{edge:6.3f} {bar} {count:,}")
    return lines


def models_table(evaluations: Evaluations) -> Table:
    """A row for each data set and encoder."""
    baseline = evaluations.baseline
    title = "Encoders" if baseline is None else f"Compared with {baseline['model']}"
    table = titled_table(title, "", "model", right=["measure", "score"])
    table.caption = "In percent or ×100, best first; ↓ lower is better."
    if baseline is not None:
        table.caption += " 95 % intervals of the differences; verdicts are not corrected for the number of encoders."
        if any(row.runs == 1 for row in evaluations.rows):
            table.caption += f" {ONE_RUN_NOTE}"
        table.add_column("difference", justify="right")
        table.add_column("verdict")
    for row in evaluations.rows:
        measure = f"{row.measure} ↓" if row.lower_is_better else row.measure
        cells = [row.data, row.model, measure, f"{row.score:.1f}"]
        if row.interval is not None:
            facts = {key: value for key, value in asdict(row).items() if value is not None}
            cells += [difference_shown(facts), verdict_shown(facts)]
        table.add_row(*map(Text, cells))
    return table


def runs_table(rows: Sequence[Mapping[str, Any]], baseline: str = "the encoder before training") -> Table:
    """A row for each configuration and test set of :func:`metaphrase.publishing.run_comparison.compare_runs`."""
    table = titled_table(f"Compared with {baseline}", "", "test", right=["seeds", "before", "after", "difference"])
    table.caption = "95 % intervals over test items and, for several seeds, over seeds."
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            Text(row["configuration"]),
            Text(row["test"]),
            str(len(row["seeds"])),
            f"{row['before']:.1f}",
            f"{row['after']:.1f}",
            Text(difference_shown(row)),
            verdict_shown(row),
        )
    return table


def effect_lines(retention: Mapping[str, Any], abilities: Mapping[str, Any]) -> Iterator[str]:
    """What training changed in other languages and abilities, one line for each test set or guard."""
    for name, effect in retention.items():
        title = f"{name}, {counted(len(effect['languages']), 'language')} not trained on"
        yield _effect_line(title, effect["pooled"], effect["limit"], effect["verdict"])
    for name, effect in abilities.items():
        title = f"Other abilities, {name}, {counted(len(effect['languages']), 'language')}"
        yield _effect_line(title, effect, effect.get("limit"), verdict_shown(effect))


def _effect_line(title: str, row: Mapping[str, Any], limit: float | None, verdict: str) -> str:
    """What training changed on data outside the training objective, as one line."""
    low, high = row["interval"]
    red_line = "" if limit is None else f" against a red line of {0 - limit:g}"
    return (
        f"{title}: {row['before']:.1f} → {row['after']:.1f}, {row['difference']:+.2f} points "
        f"[{low:+.2f}, {high:+.2f}]{red_line}: {verdict}"
    )
