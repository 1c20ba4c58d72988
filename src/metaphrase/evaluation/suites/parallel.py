"""The suites ``retrieval`` and ``xsim++``: parallel test sets, and for xsim++ also SIB-200."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from metaphrase.corpus import parallel
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation import distractors, sib200, xsimpp
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.retrieval import evaluate_retrieval, xsim_error
from metaphrase.evaluation.suites.benchmarks import Benchmark, Results, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, folders, text_size, wanted_languages
from metaphrase.evaluation.suites.sib200 import UNQUOTED, TopicFiles, topic_folders
from metaphrase.exceptions import UsageError
from metaphrase.io.digests import files_sha256

logger = logging.getLogger(__name__)

#: Number of neighbours in the margin of xsim.
XSIM_K = 4
#: Folders that hold a test set although their files name no split.
TEST_SETS = ("tatoeba", "udhr")
#: Part of the protocol with ``--strip_quotes``.
STRIPPED = ", quotation marks stripped"

#: Test sets by name and language.
Sets = dict[str, dict[str, ParallelSet]]


class ParallelFolder(NamedTuple):
    """The parallel test sets of a folder: its files of a split, or without a split, by language."""

    folder: Path
    split: str | None
    files: Mapping[str, Path]
    settings: Settings

    def read(self) -> dict[str, ParallelSet]:
        """The pairs that are measured, at most ``settings.first`` of each language.

        ``settings.strip_quotes`` removes each ``"``, as the released code of DAP (Li et al. 2023) reads Tatoeba.
        """
        sets = parallel.load_parallel_folder(self.folder, list(self.files), self.split)
        for language, one in sets.items() if self.settings.strip_quotes else ():
            sources, targets = (tuple(text.replace('"', "") for text in side) for side in (one.sources, one.targets))
            sets[language] = replace(one, sources=sources, targets=targets)
        return {code: one.rows(range(len(one.sources))[: self.settings.first]) for code, one in sets.items()}

    def benchmark(self, name: str, suite: str, protocol: str, measure: Callable[[Subject], Results]) -> Benchmark:
        """A benchmark of these test sets."""
        files = tuple(self.files.values())
        return Benchmark(name, suite, protocol, files, text_size(files), measure)


def read_test_folders(folders: Iterable[str | Path], languages: Sequence[str] = ()) -> Sets:
    """Read the test sets of folders, or of their subfolders, as `metaphrase evaluate` does, by name and language.

    Raises:
        UsageError: Two folders have the same name.
    """
    found: Sets = {}
    for folder in map(Path, folders):
        parts: Sets = {}
        if folder.is_dir() and not any(folder.glob("*-en.*tsv*")):
            parts = {
                name: one.read() for name, one in parallel_folders(folder, Settings(languages=list(languages))).items()
            }
            # A corpus or a dictionary has the same format.
            if skipped := sorted({path.parent.name for path in folder.glob("*/*-en.tsv*")} - parts.keys()):
                logger.warning(
                    "%s: %s without files of the split 'test' is not measured. To measure it, name the folder itself.",
                    folder,
                    ", ".join(skipped),
                )
        for name, sets in (
            parts or {folder.resolve().name: parallel.load_test_folder(folder, languages or None)}
        ).items():
            if name in found:
                raise UsageError(
                    f"Two folders of test sets are named {name!r}; their results would overwrite each other. Rename one."
                )
            found[name] = sets
    return found


def parallel_folders(data: Path | None, settings: Settings) -> dict[str, ParallelFolder]:
    """Test sets in a folder or its subfolders, by name.

    A folder that itself holds parallel files is the only test set. Without ``settings.split``, the files of the split
    ``test`` are read, or else those without a split. In a subfolder, these are a test set only if it is named as one, because
    a corpus or a dictionary has the same format.

    Raises:
        MissingFileError: The folder itself lacks the split or a language.
    """
    if data is not None and any(data.glob("*-en.*tsv*")):
        split = settings.split or parallel.test_split(data)
        # The languages of a sample are fixed, and a folder may lack some of them.
        files = parallel.parallel_files(data, settings.languages if settings.first is None else None, split)
        return _parallel_folder(data, split, files, settings)
    found: dict[str, ParallelFolder] = {}
    for folder in folders(data):
        split = settings.split or parallel.test_split(folder)
        paths = sorted(folder.glob(f"*-en.{split}.tsv*" if split else "*-en.tsv*"))
        # Checksums of the files have similar names.
        known = [path for path in paths if parallel.PARALLEL_FILE.fullmatch(path.name)]
        if split or folder.name in TEST_SETS:
            files = {path.name.partition("-en.")[0]: path for path in known or paths}
            found |= _parallel_folder(folder, split, files, settings)
    return found


def _parallel_folder(
    folder: Path, split: str | None, files: Mapping[str, Path], settings: Settings
) -> dict[str, ParallelFolder]:
    """The test sets of a folder by name, if it has a language of the settings."""
    chosen = {language: files[language] for language in wanted_languages(files, settings, folder)}
    return {folder_name(folder): ParallelFolder(folder, split, chosen, settings)} if chosen else {}


def find_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """Accuracy and xsim error, each with both directions and their mean."""
    retrieved_by = "cosine" if settings.margin_k is None else f"ratio margin, k={settings.margin_k}"
    equal = ", equal texts count" if settings.text_equality else ""
    protocol = f"top-1 by {retrieved_by}{equal}{STRIPPED * settings.strip_quotes}; xsim (ratio margin, k={XSIM_K})"
    for name, tests in parallel_folders(data, settings).items():
        found = tests.benchmark(name, "retrieval", protocol, partial(_measure_retrieval, name, tests))
        yield replace(found, fixed={"intervals": "shared targets"})


def _measure_retrieval(name: str, tests: ParallelFolder, subject: Subject) -> Results:
    settings, sets = subject.settings, tests.read()
    accuracy, margin = (
        evaluate_retrieval(
            subject.model, sets, text_equality=settings.text_equality, margin_k=margin_k, **subject.options()
        )
        for margin_k in (settings.margin_k, XSIM_K)
    )
    results = {name: accuracy, f"{name} xsim": xsim_error(margin)}
    return {
        key: replace(one, settings={**one.settings, "strip_quotes": settings.strip_quotes})
        for key, one in results.items()
    }


def find_xsimpp(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of `find_retrieval`, and SIB-200 with the split that its topics are measured on."""
    protocol = f"xx→en by ratio margin, k={xsimpp.NEIGHBOURS}, among the targets and English distractors"
    fixed = {"rules": files_sha256([Path(str(module.__file__)) for module in (distractors, xsimpp)])}
    for name, tests in parallel_folders(data, settings).items():
        found = tests.benchmark(f"{name} xsim++", "xsim++", protocol, partial(_measure_xsimpp, name, tests.read))
        yield replace(found, fixed=fixed)
    for files, used in topic_folders(data, settings):
        work = text_size(used) / 8  # one split of two or three
        measure = partial(_measure_xsimpp, "sib200", partial(_sib200_pairs, files, settings.first))
        yield Benchmark(
            "sib200 xsim++", "xsim++", f"{protocol}{UNQUOTED}", used, work, measure, fixed | {"texts": UNQUOTED}
        )


def _measure_xsimpp(name: str, read: Callable[[], Mapping[str, ParallelSet]], subject: Subject) -> Results:
    return {f"{name} xsim++": xsimpp.evaluate_xsimpp(subject.model, read(), **subject.options(FEWER_RESAMPLES))}


def _sib200_pairs(files: TopicFiles, first: int | None) -> dict[str, ParallelSet]:
    sets = sib200.load_topics(files)
    split = sib200.measured(sets[sib200.ENGLISH])
    return sib200.topic_pairs({code: one.split_only(split).first_sentences(first) for code, one in sets.items()})
