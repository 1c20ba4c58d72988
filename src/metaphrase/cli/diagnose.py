"""``metaphrase diagnose [MODEL] --corpus …``: check a corpus, or a model on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, notes, progress
from metaphrase.cli.tables import STYLES, findings_table, lines_without_pair
from metaphrase.corpus.checks import errors
from metaphrase.corpus.codes import split_languages
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.diagnosis import Diagnosis
from metaphrase.evaluation.diagnosis_workflow import DiagnoseOptions, DiagnosisReport, diagnose_files
from metaphrase.io.counts import counted
from metaphrase.io.files import write_json
from metaphrase.io.tables import titled_table

DESCRIPTION = "Find problems in a corpus, or in a model on a corpus. The exit status is 1 if there are errors."
EXAMPLES = [
    "metaphrase diagnose --corpus pairs.tsv --languages sw",
    "metaphrase diagnose runs/sw --baseline starter --corpus pairs.tsv --languages sw --output diagnosis.json",
]


def run(argv: Sequence[str]) -> int:
    """Diagnose, print tables, write JSON; the exit status is 1 if there are errors."""
    (options,) = parse("metaphrase diagnose", [DiagnoseOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    options.languages = split_languages(options.languages, keep_scripts=True)
    with progress(notes()) as begin:
        report = diagnose_files(options, begin=begin)
    printed = list(_render(report))
    if options.output is not None:
        printed.append(f"Wrote {write_json(options.output, report.facts)}")
    emit(report.facts, *printed)
    return 1 if errors(report.findings) else 0


def _render(report: DiagnosisReport) -> Iterator[RenderableType]:
    """The human-readable report."""
    if skipped := lines_without_pair(report.read):
        yield skipped
    yield _languages_table(report.sets, report.diagnosis)
    if report.diagnosis is not None:
        yield from _describe_model(report.diagnosis)
    findings = report.findings
    if not findings:
        yield Text("No problems found.", style="bold green")
        return
    yield findings_table(findings)
    counts = {severity: sum(f.severity == severity for f in findings) for severity in STYLES}
    found = ", ".join(counted(n, "note" if severity == "info" else severity) for severity, n in counts.items() if n)
    yield Text(f"Found: {found}.", style=STYLES[findings[0].severity])


def _languages_table(sets: Mapping[str, ParallelSet], diagnosis: Diagnosis | None) -> Table:
    table = titled_table("Languages", "", right=["pairs"])
    measured = diagnosis.languages if diagnosis is not None else {}
    if measured:
        for heading in ("sample", "retrieval", "cosine of pairs", "of random pairs", "pair closer"):
            table.add_column(heading, justify="right")
        table.caption = "Retrieval in percent, mean of both directions, within the sample; 95 % bootstrap interval."
    for language, pairs in sets.items():
        cells = [language, f"{len(pairs.sources):,}"]
        if facts := measured.get(language):
            low, high = facts["interval"]
            cells += [f"{facts['pairs']:,}", f"{facts['accuracy']:.1f} ({low:.1f}–{high:.1f})"]
            cells += [f"{facts['pairs_cosine']:.3f}", f"{facts['random_cosine']:.3f}", f"{facts['closer']:.1%}"]
        table.add_row(*map(Text, cells))
    return table


def _describe_languages(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    if probe := diagnosis.language_identification:
        yield (
            f"A linear probe identifies the language of {probe['accuracy']:.1f} % of the sentences (chance "
            f"{probe['chance']:.1f} %). The lower, the better the languages are aligned."
        )
    for language, measured in diagnosis.languages.items():
        named = "; ".join(f"{hub['text'][:60]!r} {counted(hub['count'], 'time')}" for hub in measured["hubs"])
        yield Text(
            f"Hubness of the targets of {language}: skewness {measured['hubness']:.2f}. Most frequent neighbours: {named}."
        )


def _describe_model(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    if facts := diagnosis.geometry:
        text = (
            f"Cosine of random sentences {facts['mean_cosine']:.3f}; first component {facts['first_component']:.1%} of the "
            f"variance, first ten {facts['first_ten']:.1%}; effective rank {facts['effective_rank']:.1f} of "
            f"{facts['dimensions']:.0f}; isotropy {facts['isotropy']:.3f}"
        )
        if "distance" in facts:
            text += f"; mean 1 − cosine to the baseline {facts['distance']:.2g}"
        yield f"{text}."
        if "structure" in facts:
            yield (
                f"Similarity structure: {facts['structure']:.1f}, the rank correlation ×100 of the similarities within each "
                "language with those of the baseline; 100 if their order is the same."
            )
    yield from _describe_languages(diagnosis)
    if len(diagnosis.pooling) > 1:
        modes = ", ".join(f"{mode} {accuracy:.1f}" for mode, accuracy in diagnosis.pooling.items())
        yield f"Retrieval by pooling, the stored mode first: {modes}."
    for language, rows in diagnosis.words.items():
        if rows:
            title = f"Frequent words of {language} that are aligned least"
            table = titled_table(title, "word", right=["count", "linked", "score"])
            table.add_column("mostly with")
            for row in rows[:8]:
                score = "" if row["score"] is None else f"{row['score']:.3f}"
                cells = (row["word"], str(row["count"]), f"{row['linked']:.0%}", score, row["translation"] or "")
                table.add_row(*map(Text, cells))
            yield table
