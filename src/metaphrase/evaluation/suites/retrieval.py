"""The suite ``retrieval``: parallel test sets, by cosine and by margin (xsim)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.retrieval import evaluate_retrieval, xsim_error
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    Settings,
    Subject,
    folders,
    text_size,
    wanted_languages,
)

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

    A folder that itself holds parallel files is the only test set; without ``settings.split``, its files without a split
    are read, or else those of the split ``test``. In subfolders, the split ``test`` is read first. Files without a split
    are a test set only in a subfolder that is named as one, because a corpus or a dictionary has the same format.

    Raises:
        FileNotFoundError: A folder that itself holds parallel files lacks the split or a language.
        ValueError: One of its files is malformed. Malformed subfolders are skipped with a warning.
    """
    if data is not None and any(data.glob("*-en.*tsv*")):
        tested = any(data.glob("*-en.test.tsv*")) and not any(data.glob("*-en.tsv*"))
        split = settings.split or ("test" if tested else None)
        found = {data.resolve().name: load_parallel_folder(data, settings.languages, split)}
    else:
        found = dict(_subfolders(folders(data), settings))
    if settings.strip_quotes:
        found = {name: strip_quotes(sets) for name, sets in found.items()}
    return {name: (sets, tuple(one.path for one in sets.values() if one.path)) for name, sets in found.items()}


def _subfolders(candidates: Iterable[Path], settings: Settings) -> Iterator[tuple[str, dict[str, ParallelSet]]]:
    for folder in candidates:
        split = settings.split or ("test" if any(folder.glob("*-en.test.tsv*")) else None)
        pattern = f"*-en.{split}.tsv*" if split else "*-en.tsv*"
        if not any(folder.glob(pattern)) or (split is None and folder.name not in _TEST_SETS):
            continue
        try:
            sets = load_parallel_folder(folder, None, split)
        except ValueError as error:
            logger.warning("%s", error)
            continue
        if chosen := {language: sets[language] for language in wanted_languages(sets, settings)}:
            yield folder.name, chosen


def stripped_note(settings: Settings) -> str:
    """Addition to a protocol if quotation marks are removed."""
    return ", quotation marks stripped" if settings.strip_quotes else ""


def find_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of a folder or of its subfolders."""
    retrieved_by = "cosine" if settings.margin_k is None else f"ratio margin, k={settings.margin_k}"
    equal = ", equal texts count" if settings.text_equality else ""
    protocol = f"top-1 by {retrieved_by}{equal}{stripped_note(settings)}; xsim (ratio margin, k={XSIM_K})"
    for name, (sets, files) in parallel_folders(data, settings).items():
        yield Benchmark(name, "retrieval", protocol, files, text_size(files), partial(_measure, name, sets))


def _measure(name: str, sets: Mapping[str, ParallelSet], subject: Subject) -> dict[str, Result]:
    """Accuracy and xsim error, each with both directions and their mean."""
    settings = subject.settings
    accuracy, margin = (
        evaluate_retrieval(
            subject.model,
            sets,
            text_equality=settings.text_equality,
            margin_k=margin_k,
            resamples=settings.resamples,
            **subject.options(),
        )
        for margin_k in (settings.margin_k, XSIM_K)
    )
    results = {name: accuracy, f"{name} xsim": xsim_error(margin)}
    return {
        key: replace(one, settings={**one.settings, "strip_quotes": settings.strip_quotes})
        for key, one in results.items()
    }
