"""The suite ``retrieval``: parallel test sets, by cosine and by margin (xsim)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.evaluation.measures import DIRECTIONS
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.retrieval import evaluate_retrieval, in_direction
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    Settings,
    Subject,
    folders,
    text_size,
    wanted_languages,
)
from metaphrase.exceptions import MissingFileError

logger = logging.getLogger(__name__)

#: Number of neighbours in the margin of xsim.
XSIM_K = 4
#: Folders that hold a test set although their files name no split.
_TEST_SETS = ("tatoeba", "udhr")


def strip_quotes(sets: Mapping[str, ParallelSet]) -> dict[str, ParallelSet]:
    """Remove each ``"`` from test sets.

    Reference: Li et al. 2023 (DAP), whose released code reads Tatoeba in this way.
    """
    stripped = {}
    for language, one in sets.items():
        sources, targets = (tuple(text.replace('"', "") for text in side) for side in (one.sources, one.targets))
        stripped[language] = replace(one, sources=sources, targets=targets)
    return stripped


def parallel_folders(
    data: Path | None, settings: Settings
) -> dict[str, tuple[dict[str, ParallelSet], tuple[Path, ...]]]:
    """Test sets in a folder and its subfolders, with their files.

    A folder may hold ``xx-en.test.tsv.gz`` next to other splits. Files without a split are a test set only in a folder
    that is named as one, because a corpus or a dictionary has the same format.
    """
    found = {}
    for folder in folders(data):
        split = "test" if any(folder.glob("*-en.test.tsv*")) else None
        if split or (any(folder.glob("*-en.tsv*")) and (folder == data or folder.name in _TEST_SETS)):
            try:
                sets = load_parallel_folder(folder, None, split)
            except ValueError as error:
                logger.warning("%s", error)
                continue
            chosen = {language: sets[language] for language in wanted_languages(sets, settings)}
            if chosen:
                chosen = strip_quotes(chosen) if settings.strip_quotes else chosen
                found[folder.name] = chosen, tuple(one.path for one in chosen.values() if one.path)
    return found


def stripped_note(settings: Settings) -> str:
    """Addition to a protocol if quotation marks are removed."""
    return ", quotation marks stripped" if settings.strip_quotes else ""


def find_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of a folder and its subfolders."""
    equal = ", equal texts count" if settings.text_equality else ""
    equal += stripped_note(settings)
    for name, (sets, files) in parallel_folders(data, settings).items():
        protocol = f"top-1 by cosine{equal}; xsim (ratio margin, k={XSIM_K})"
        yield Benchmark(name, "retrieval", protocol, files, text_size(files), partial(_measure, name, sets))


def _measure(name: str, sets: Mapping[str, ParallelSet], subject: Subject) -> dict[str, Result]:
    return retrieval_results(name, *(_evaluate(sets, subject, margin_k) for margin_k in (None, XSIM_K)))


def _evaluate(sets: Mapping[str, ParallelSet], subject: Subject, margin_k: int | None) -> Result:
    result = evaluate_retrieval(
        subject.model,
        sets,
        text_equality=subject.settings.text_equality,
        margin_k=margin_k,
        resamples=subject.settings.resamples,
        **subject.options(),
    )
    return replace(result, settings={**result.settings, "strip_quotes": subject.settings.strip_quotes})


def retrieval_results(name: str, cosine: Result, margin: Result) -> dict[str, Result]:
    """Results per direction of two results of `evaluate_retrieval`, by cosine and by margin.

    xsim is directed (source to target); its mean over both directions is named as such.
    """
    labels = dict(zip((*DIRECTIONS, "mean"), ("xx→en", "en→xx", "both directions"), strict=True))
    results = {f"{name} {label}": in_direction(cosine, direction) for direction, label in labels.items()}
    for direction, label in labels.items():
        title = f"{name} xsim{',' if direction == 'mean' else ''} {label}"
        results[title] = in_direction(margin, direction, errors=True)
    return results


def holds_folders(data: Path) -> bool:
    """Whether test sets are in subfolders of a folder, and not in the folder itself."""
    return data.is_dir() and not any(data.glob("*-en.*")) and any(data.glob("*/*-en.*"))


def find_test_set(data: str | Path, settings: Settings) -> Benchmark:
    """A folder of test sets as one benchmark, which is measured by cosine, or by margin with ``settings.margin_k``.

    Raises:
        FileNotFoundError: The folder, the split or a language is missing.
        ValueError: A file is malformed.
    """
    folder = Path(data)
    sets = load_parallel_folder(folder, settings.languages, settings.split)
    if not sets:
        raise MissingFileError(f"{folder} has no test sets.")
    sets = strip_quotes(sets) if settings.strip_quotes else sets
    files = tuple(one.path for one in sets.values() if one.path)
    retrieved_by = "cosine" if settings.margin_k is None else f"ratio margin, k={settings.margin_k}"
    pairs = sum(len(one.sources) for one in sets.values())
    name = folder.resolve().name

    def measure(subject: Subject) -> dict[str, Result]:
        return {name: _evaluate(sets, subject, subject.settings.margin_k)}

    protocol = f"top-1 by {retrieved_by}, {len(sets)} languages, {pairs} pairs{stripped_note(settings)}"
    return Benchmark(name, "retrieval", protocol, files, 0, measure)
