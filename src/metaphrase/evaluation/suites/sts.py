"""The suite ``sts``: STS-B in and across languages, and STS22 from the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from metaphrase.corpus.parallel import TARGET_LANGUAGE
from metaphrase.evaluation.measures import STS_RESAMPLES
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.sts import STS22_GROUPS, STSSet, cross_lingual, evaluate_sts, load_sts_folder
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    DataUnavailable,
    Settings,
    Subject,
    folders,
    text_size,
    wanted_languages,
)
from metaphrase.evaluation.suites.mteb import load_mteb_tasks

_FILE = re.compile(r"-([a-z]{2,3}(?:-[A-Z][a-z]{3})?)-test\.csv(\.gz)?$")


def find_sts(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """STS-B in a folder and its subfolders, then STS22."""
    for folder in folders(data):
        files = {match[1]: path for path in folder.glob("*-test.csv*") if (match := _FILE.search(path.name))}
        if wanted := wanted_languages(sorted(files), settings):
            used = tuple(files[language] for language in sorted({*wanted, *({TARGET_LANGUAGE} & files.keys())}))
            yield Benchmark(
                folder.name,
                "sts",
                "Spearman of the cosine ×100, test set; in each language, and across it and English",
                used,
                text_size(used),
                partial(_measure, folder, wanted),
            )
    yield Benchmark("sts22", "sts", "Spearman of the cosine ×100; 18 subsets, and without fr-pl", (), 0, _sts22)


def _measure(folder: Path, languages: Sequence[str], subject: Subject) -> dict[str, Result]:
    sets = load_sts_folder(folder)
    crossed = cross_lingual({code: one for code, one in sets.items() if code in (TARGET_LANGUAGE, *languages)})
    results = {folder.name: _evaluate(subject, {code: sets[code] for code in languages})}
    return results | ({f"{folder.name} cross-lingual": _evaluate(subject, crossed)} if crossed else {})


def _evaluate(
    subject: Subject, sets: Mapping[str, STSSet], groups: Mapping[str, Sequence[str]] | None = None
) -> Result:
    resamples = min(STS_RESAMPLES, subject.settings.resamples)
    return evaluate_sts(subject.model, sets, groups=groups, resamples=resamples, **subject.options())


def _sts22(subject: Subject) -> dict[str, Result]:
    tasks = load_mteb_tasks()
    try:
        (task,) = tasks.get_tasks(["STS22"], subject.settings.languages)
        sets = tasks.sts_sets(task)
    except (OSError, ValueError) as error:
        raise DataUnavailable(str(error).partition("\n")[0]) from error
    return {"sts22": _evaluate(subject, sets, STS22_GROUPS)}
