"""``metaphrase diagnose [MODEL] --corpus …``: what is wrong with a corpus, or with a model on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from metaphrase.cli import emit, notes, parse
from metaphrase.cli.output import progress
from metaphrase.cli.tables import STYLES, findings_table, lines_without_pair, titled_table
from metaphrase.corpus.checks import Finding, by_severity, check_corpus, errors, read_corpus
from metaphrase.corpus.identification import LINES
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.corpus.report import CorpusReport
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.diagnosis import SAMPLE, Diagnosis, diagnose, sentences_to_embed
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.environment import versions
from metaphrase.io.files import write_json

SUMMARY = "Find out what is wrong with a corpus, or with a model on it"
EXAMPLES = [
    "metaphrase diagnose --corpus pairs.tsv --languages sw",
    "metaphrase diagnose runs/sw --baseline starter --corpus pairs.tsv --languages sw --output diagnosis.json",
]


@dataclass
class DiagnoseOptions:
    """What is looked at."""

    corpus: list[str] = field(
        metadata={"help": "Bitext: TSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name."}
    )
    model: str | None = field(
        default=None,
        metadata={"help": "Encoder: a folder, a Hub id, or 'starter'. May stand first. Default: the corpus alone."},
    )
    languages: list[str] = field(default_factory=list, metadata={"help": "Languages to take from the corpus."})
    target_lang: str = field(default="en", metadata={"help": "Language of the targets."})
    split: str = field(default="train", metadata={"help": "Which of xx-en.train.tsv.gz, xx-en.dev.tsv.gz, … to take."})
    test: str | None = field(
        default=None, metadata={"help": "Folder of test sets xx-en[.test].tsv.gz, to be looked for in the corpus."}
    )
    strict: bool = field(default=False, metadata={"help": "A single test pair in the corpus is an error."})
    baseline: str | None = field(
        default=None, metadata={"help": "The encoder before training, to see whether training changed anything."}
    )
    output: str | None = field(default=None, metadata={"aliases": ["-o"], "help": "JSON file to write."})
    sample: int = field(default=SAMPLE, metadata={"help": "Most pairs of a language that the model embeds."})
    lines: int = field(default=LINES, metadata={"help": "Lines of each side whose language is identified."})
    batch_size: int = field(default=64, metadata={"help": "Pairs whose words are aligned at a time."})
    seed: int = field(default=0, metadata={"help": "Seed of the samples."})


def run(argv: Sequence[str]) -> int:
    """Diagnose, print tables, write JSON; the exit status is 1 where there is an error."""
    arguments = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    (options,) = parse("metaphrase diagnose", [DiagnoseOptions], arguments, description=SUMMARY, examples=EXAMPLES)
    if options.baseline is not None and options.model is None:
        raise UsageError("A baseline is compared with a model: metaphrase diagnose MODEL --baseline …")
    if options.sample < 2 or options.lines < 1:
        raise UsageError(
            f"--sample must be at least 2, and --lines at least 1; they are {options.sample} and {options.lines}."
        )
    torch.set_flush_denormal(True)
    languages = [code for item in options.languages for code in item.replace(",", " ").split()]
    sets, report = read_corpus(
        options.corpus, languages=languages or None, target_lang=options.target_lang, split=options.split
    )
    tests = _tests(options.test, sets) if options.test is not None else None
    with progress(notes()) as begin:
        findings = check_corpus(
            sets,
            tests,
            target_lang=options.target_lang,
            lines=options.lines,
            seed=options.seed,
            strict=options.strict,
            advance=begin("checking the corpus", len(sets)),
        )
    diagnosis = _diagnose(options, sets) if options.model is not None else None
    if diagnosis is not None:
        shifted = {finding.language for finding in findings if finding.code == "shifted-sides"}
        findings += [f for f in diagnosis.findings if not (f.code == "shifted-sides" and f.language in shifted)]
    findings = by_severity(findings)
    result = _result(options, sets, report, findings, diagnosis)
    people = list(_people(sets, report, findings, diagnosis))
    if options.output is not None:
        people.append(f"Wrote {write_json(options.output, result)}")
    emit(result, *people)
    return 1 if errors(findings) else 0


def _tests(folder: str, sets: Mapping[str, ParallelSet]) -> dict[str, ParallelSet]:
    """The test sets of the corpus's languages, of the split ``test`` or without one."""
    try:
        there = load_parallel_folder(folder, split="test")
    except FileNotFoundError:
        there = load_parallel_folder(folder)
    tests = {language: pairs for language, pairs in there.items() if language in sets}
    if not tests:
        raise MissingFileError(f"{folder} has no test set for {', '.join(sets)}. It has: {', '.join(there)}.")
    return tests


def _diagnose(options: DiagnoseOptions, sets: Mapping[str, ParallelSet]) -> Diagnosis:
    model = load_encoder(str(options.model))
    baseline = None if options.baseline is None else load_encoder(options.baseline)
    with progress(notes()) as begin:
        total = sentences_to_embed(sets, sample=options.sample, models=1 if baseline is None else 2)
        return diagnose(
            model,
            sets,
            baseline=baseline,
            target_lang=options.target_lang,
            sample=options.sample,
            batch_size=options.batch_size,
            seed=options.seed,
            advance=begin("embedding", total),
        )


def _result(
    options: DiagnoseOptions,
    sets: Mapping[str, ParallelSet],
    report: CorpusReport,
    findings: Sequence[Finding],
    diagnosis: Diagnosis | None,
) -> dict[str, Any]:
    """All of it as plain data."""
    measured = (
        {} if diagnosis is None else {key: value for key, value in asdict(diagnosis).items() if key != "findings"}
    )
    return {
        "model": options.model,
        "pairs": {language: len(pairs.sources) for language, pairs in sets.items()},
        "read": report.to_dict(),
        "findings": [finding.to_dict() for finding in findings],
        **measured,
        "settings": asdict(options),
        "versions": versions(),
    }


def _people(
    sets: Mapping[str, ParallelSet],
    report: CorpusReport,
    findings: Sequence[Finding],
    diagnosis: Diagnosis | None,
) -> Iterator[RenderableType]:
    """What people read."""
    if unread := lines_without_pair(report):
        yield unread
    yield _languages_table(sets, diagnosis)
    if diagnosis is not None:
        yield from _about_model(diagnosis)
    if not findings:
        yield Text("Nothing was found that is wrong.", style="bold green")
        return
    yield findings_table(findings)
    counts = {severity: sum(f.severity == severity for f in findings) for severity in STYLES}
    said = ", ".join(f"{n} {severity}{'s' * (n != 1 and severity != 'info')}" for severity, n in counts.items() if n)
    yield Text(f"Found: {said}.", style=STYLES[findings[0].severity])


def _languages_table(sets: Mapping[str, ParallelSet], diagnosis: Diagnosis | None) -> Table:
    table = titled_table("Languages")
    table.add_column("")
    table.add_column("pairs", justify="right")
    measured = diagnosis.languages if diagnosis is not None else {}
    if measured:
        for heading in ("sample", "retrieval", "cosine of pairs", "of random ones", "pair closer"):
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


def _about_model(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    if facts := diagnosis.geometry:
        said = (
            f"Cosine of random sentences {facts['mean_cosine']:.3f}; first component {facts['first_component']:.1%} of the "
            f"variance, first ten {facts['first_ten']:.1%}; effective rank {facts['effective_rank']:.1f} of "
            f"{facts['dimensions']:.0f}"
        )
        if "distance" in facts:
            said += f"; mean 1 − cosine to the baseline {facts['distance']:.2g}"
        yield f"{said}."
    if len(diagnosis.pooling) > 1:
        said = ", ".join(f"{mode} {accuracy:.1f}" for mode, accuracy in diagnosis.pooling.items())
        yield f"Retrieval by pooling, the stored one first: {said}."
    for language, rows in diagnosis.words.items():
        if rows:
            table = titled_table(f"Frequent words of {language} that find their translation least")
            table.add_column("word")
            for heading in ("count", "linked", "score"):
                table.add_column(heading, justify="right")
            table.add_column("mostly with")
            for row in rows[:8]:
                score = "" if row["score"] is None else f"{row['score']:.3f}"
                cells = (row["word"], str(row["count"]), f"{row['linked']:.0%}", score, row["translation"] or "")
                table.add_row(*map(Text, cells))
            yield table
