"""Diagnosing files: a corpus, and optionally a model on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from metaphrase.corpus.checks import Finding, by_severity, check_corpus, read_corpus
from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.files import find_files
from metaphrase.corpus.identification import LINES
from metaphrase.corpus.options import SOURCE_COLUMN, TARGET_COLUMN
from metaphrase.corpus.parallel import ParallelSet, load_test_folder
from metaphrase.corpus.report import CorpusReport
from metaphrase.encoders.loading import load_encoder, pooling_of
from metaphrase.encoders.names import encoder_files
from metaphrase.evaluation.diagnosis import FIT, SAMPLE, Diagnosis, diagnose, sentences_to_embed
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.arguments import Count, Range, Seed, checked
from metaphrase.io.configuration import ENCODER, option
from metaphrase.io.environment import versions
from metaphrase.io.outputs import check_files
from metaphrase.io.progress import Begin, no_progress


@checked
@dataclass
class DiagnoseOptions:
    """The corpus and the model to diagnose."""

    corpus: list[str] = option(
        help="Bitext: TSV, CSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name."
    )
    model: str | None = option(
        None,
        f"Encoder: {ENCODER}. Can be passed as the first argument. Default: check only the corpus.",
        first=True,
    )
    languages: list[str] = option([], "Languages to load from the corpus.")
    target_lang: str = option("en", "Language of the targets.")
    source_column: str | None = option(None, SOURCE_COLUMN)
    target_column: str | None = option(None, TARGET_COLUMN)
    split: str = option("train", "Which of xx-en.train.tsv.gz, xx-en.dev.tsv.gz, … to load.")
    test: str | None = option(
        None, "Folder of test sets xx-en[.test].tsv.gz; the corpus is searched for their sentences."
    )
    strict: bool = option(False, "Treat a single test pair in the corpus as an error.")
    baseline: str | None = option(None, "The encoder before training, to check whether training changed it.")
    output: str | None = option(None, "JSON file to write.", aliases=["-o"])
    sample: Annotated[int, Range(2, 2**31 - 1)] = option(
        SAMPLE, "Maximum number of pairs per language that the model embeds."
    )
    lines: Count = option(LINES, "Lines of each side whose language is identified.")
    batch_size: Count = option(64, "Pairs whose words are aligned at a time.")
    seed: Seed = option(0, "Seed of the samples.")

    def check(self) -> None:
        """Check that the options are consistent."""
        if self.baseline is not None and self.model is None:
            raise UsageError("--baseline requires a model: metaphrase diagnose MODEL --baseline …")


@dataclass(frozen=True)
class DiagnosisReport:
    """The result of `diagnose_files`."""

    sets: dict[str, ParallelSet]
    read: CorpusReport
    findings: list[Finding]
    diagnosis: Diagnosis | None
    facts: dict[str, Any]


def diagnose_files(options: DiagnoseOptions, *, begin: Begin = no_progress) -> DiagnosisReport:
    """Check a corpus, and measure a model on it if one is given."""
    options.check()
    sets, read = read_corpus(options.corpus, **_selected(options))
    tests = _load_tests(options.test, sets) if options.test is not None else None
    check_files([options.output], [*_files(options), *(one.path for one in (tests or {}).values())])
    findings = check_corpus(
        sets,
        tests,
        target_lang=options.target_lang,
        lines=options.lines,
        seed=options.seed,
        strict=options.strict,
        advance=begin("Checking the corpus by language", len(sets)),
    )
    diagnosis, measured = None, {}
    if options.model is not None:
        diagnosis = _diagnose_model(options, options.model, sets, begin)
        findings = _combined(findings, diagnosis)
        measured = {name: value for name, value in asdict(diagnosis).items() if name != "findings"}
    facts = {
        "model": options.model,
        "pairs": {language: len(pairs.sources) for language, pairs in sets.items()},
        "read": read.to_dict(),
        "findings": [finding.to_dict() for finding in findings],
        **measured,
        "settings": asdict(options),
        "versions": versions(),
    }
    return DiagnosisReport(sets, read, findings, diagnosis, facts)


def _selected(options: DiagnoseOptions) -> dict[str, Any]:
    names = ("target_lang", "source_column", "target_column", "split")
    return {name: getattr(options, name) for name in names} | {"languages": options.languages or None}


def _files(options: DiagnoseOptions) -> Iterator[Path]:
    """The files of the corpus and of the models."""
    yield from (path for file in find_files(options.corpus, **_selected(options)) for path in file.paths)
    for model in (options.model, options.baseline):
        yield from encoder_files(model)


def _combined(findings: Sequence[Finding], diagnosis: Diagnosis) -> list[Finding]:
    """The findings of the text and of the model, which may both report shifted sides."""
    shifted = {finding.language for finding in findings if finding.code == "shifted-sides"}
    more = [f for f in diagnosis.findings if not (f.code == "shifted-sides" and f.language in shifted)]
    checked_by_model = {finding.language for finding in more if finding.code == "shifted-sides"}
    checked_by_model |= {language for language, facts in diagnosis.languages.items() if facts["closer"] >= FIT}
    known = [f for f in findings if not (f.code == "shift-not-checked" and f.language in checked_by_model)]
    return by_severity([*known, *more])


def _load_tests(folder: str, sets: Mapping[str, ParallelSet]) -> dict[str, ParallelSet]:
    """The test sets of the corpus's languages, of the split ``test`` or without a split."""
    available = load_test_folder(folder)
    tests = {language: pairs for language, pairs in available.items() if bare_language(language) in sets}
    if not tests:
        raise MissingFileError(f"{folder} has no test set for {', '.join(sets)}. It has: {', '.join(available)}.")
    return tests


def _diagnose_model(options: DiagnoseOptions, model: str, sets: Mapping[str, ParallelSet], begin: Begin) -> Diagnosis:
    encoder, baseline = load_encoder(model), None
    if options.baseline is not None:  # if it has no pooling, a run trained it with the model's
        mode = pooling_of(encoder)
        baseline = load_encoder(options.baseline, default_pooling="mean" if "+" in mode else mode)
    total = sentences_to_embed(sets, sample=options.sample, models=1 if baseline is None else 2)
    return diagnose(
        encoder,
        sets,
        baseline=baseline,
        target_lang=options.target_lang,
        sample=options.sample,
        batch_size=options.batch_size,
        seed=options.seed,
        advance=begin("Embedding", total),
    )
