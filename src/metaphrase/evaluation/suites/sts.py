"""The suite ``sts``: STS-B of a folder, and STS22 from the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from metaphrase.corpus.parallel import TARGET_LANGUAGE
from metaphrase.evaluation import sts
from metaphrase.evaluation.guard_data import spread
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.suites.benchmarks import Benchmark, DataUnavailable, Results, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, in_each_folder, text_size, wanted_languages
from metaphrase.evaluation.suites.mteb import load_mteb_tasks


def find_sts(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """STS-B in a folder and its subfolders, then STS22."""
    yield from _find_stsb(data, settings)
    if settings.first is None:
        yield Benchmark("sts22", "sts", "Spearman of the cosine ×100; 18 subsets, and without fr-pl", (), 0, _sts22)


@in_each_folder
def _find_stsb(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    name = folder_name(folder)
    matches = {path: sts.STS_FILE.fullmatch(path.name) for path in folder.glob("*-test.csv*")}
    files = {match["language"]: path for path, match in matches.items() if match}
    languages = wanted_languages(sorted(files), settings, folder)
    read = sorted({*languages, *({TARGET_LANGUAGE} & files.keys())})

    def measure(subject: Subject) -> Results:
        whole = sts.load_sts_folder(folder, read)
        sets = {code: one.rows(_items(range(len(one.scores)), settings)) for code, one in whole.items()}
        sides = {name: {code: sets[code] for code in languages}, f"{name} cross-lingual": sts.cross_lingual(sets)}
        options = subject.options(FEWER_RESAMPLES)
        return {key: sts.evaluate_sts(subject.model, some, **options) for key, some in sides.items() if some}

    if languages:
        used = tuple(files[language] for language in read)
        protocol = "Spearman of the cosine ×100, test set; in each language, and across it and English"
        yield Benchmark(name, "sts", protocol, used, text_size(used), measure)


def _items(whole: Sequence[int], settings: Settings) -> Sequence[int]:
    """The items of a language that are measured."""
    if settings.first is None or not settings.spread:
        return whole[: settings.first]
    return spread(whole, settings.first)


def _sts22(subject: Subject) -> Results:
    tasks = load_mteb_tasks()
    try:
        (task,) = tasks.get_tasks(["STS22"], subject.settings.codes)
        sets = tasks.sts_sets(task)
    except (OSError, ValueError) as error:
        raise DataUnavailable(str(error).partition("\n")[0]) from error
    return {
        "sts22": sts.evaluate_sts(subject.model, sets, groups=sts.STS22_GROUPS, **subject.options(FEWER_RESAMPLES))
    }
