"""The suite ``mteb``: parallel test sets, SIB-200 and XQuAD-R as tasks of MTEB, or MTEB's own tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from metaphrase.evaluation import sib200, sts
from metaphrase.evaluation.encoding import encode_texts
from metaphrase.evaluation.result import complete_groups, mean_of
from metaphrase.evaluation.suites.answer_retrieval import ANSWER_WORK, answer_files, read_answers
from metaphrase.evaluation.suites.benchmarks import Benchmark, DataUnavailable, Results, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, folders, in_each_folder, text_size
from metaphrase.evaluation.suites.parallel import STRIPPED, TEST_SETS, ParallelFolder, parallel_folders
from metaphrase.evaluation.suites.sib200 import UNQUOTED, TopicFiles, topic_folders
from metaphrase.exceptions import MissingFileError
from metaphrase.io.environment import install_command

#: Settings that the tasks of MTEB without parallel test sets depend on.
_READS = ("prompt", "bf16", "languages")


def find_mteb(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of a folder as tasks, or the tasks of the settings."""
    protocol = f"MTEB bitext mining, F1 of top-1 by cosine, both directions{STRIPPED * settings.strip_quotes}"
    pairs = {
        name: tests.benchmark(
            f"mteb {name}", "mteb", protocol, partial(_measure_mteb, name, partial(_bitext_task, name, tests))
        )
        for name, tests in parallel_folders(data, settings).items()
    }
    known = [name for name in pairs if name in TEST_SETS]
    others = chain(_mteb_topics(data, settings), _mteb_answers(data, settings))
    whole = {one.name.removeprefix("mteb "): one for one in others}
    folder_names = {folder_name(folder) for folder in folders(data)}
    for name in settings.tasks or (*(known or pairs), *whole):
        if name in folder_names and name not in pairs | whole:
            continue  # it lacks the languages
        measure = partial(_measure_mteb, name, None)
        hub = Benchmark(f"mteb {name}", "mteb", "MTEB's task, data from the Hub", (), 0, measure)
        yield (pairs | whole).get(name, hub)


def _mteb_topics(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    protocol = (
        "MTEB's SIB200Classification: accuracy of ten classifiers in each language, each of 8 sentences of each topic of "
        f"train, measured on test, or dev without test{UNQUOTED}"
    )
    for files, used in topic_folders(data, settings):
        languages = {sib200.find_language(language, files) for language in settings.languages or files}
        make = partial(_topic_task, files, [language for language in files if language in languages], settings.first)
        measure = partial(_measure_mteb, "sib200", make)
        fixed = {"texts": UNQUOTED}
        yield Benchmark("mteb sib200", "mteb", protocol, used, text_size(used), measure, fixed, _READS)


@in_each_folder
def _mteb_answers(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    protocol = (
        "MTEB's XQuADRetrieval: nDCG@10 of the sentence with the answer among the sentences of the question's language"
    )
    if files := answer_files(folder, settings):
        used = tuple(files.values())
        work = text_size(used) * ANSWER_WORK["sentence"]
        measure = partial(_measure_mteb, "xquad-r", partial(_answer_task, folder, files, settings))
        yield Benchmark("mteb xquad-r", "mteb", protocol, used, work, measure, reads=_READS, asks=True)


def _bitext_task(name: str, tests: ParallelFolder, tasks: Any, subject: Subject) -> Any:
    sets = tests.read()
    texts = list(chain.from_iterable((*one.sources, *one.targets) for one in sets.values()))
    encode_texts(subject.model, texts, **subject.encoding())  # once; MTEB asks for the same texts many times
    return tasks.bitext_task(f"{name}-bitext", sets)


def _topic_task(files: TopicFiles, languages: Sequence[str], first: int | None, tasks: Any, subject: Subject) -> Any:
    """A sample is measured, but the classifiers are trained on all sentences."""
    sets = sib200.load_topics(files, by_id=False)
    return tasks.topic_task("sib200-classification", {language: sets[language] for language in languages}, first)


def _answer_task(folder: Path, languages: Iterable[str], settings: Settings, tasks: Any, subject: Subject) -> Any:
    return tasks.answer_task("xquad-r-retrieval", read_answers(folder, languages, settings))


def _measure_mteb(name: str, make: Callable[[Any, Subject], Any] | None, subject: Subject) -> Results:
    """Measure the task that ``make`` creates with `mteb_tasks`, or MTEB's task of this name."""
    tasks = load_mteb_tasks()
    try:
        chosen = [make(tasks, subject)] if make else tasks.get_tasks([name], subject.settings.codes)
    except MissingFileError as error:  # MTEB has none of the languages
        raise DataUnavailable(str(error).removesuffix(".")) from error
    folder = subject.output / ("mteb-bf16" if subject.settings.bf16 else "mteb")  # MTEB's cache ignores the precision
    try:
        found = tasks.evaluate_mteb(subject.model, chosen, folder, name=subject.name, **subject.encoding())
    except OSError as error:
        if make:  # not an error of the Hub
            raise
        raise DataUnavailable(str(error).partition("\n")[0]) from error
    (result,) = found.values()
    groups = complete_groups(sts.STS22_GROUPS if name.startswith("STS22") else {}, result.languages)
    means = {group: mean_of([result.languages[one] for one in members]) for group, members in groups.items()}
    return {f"mteb {name}": replace(result, groups=means)}


def load_mteb_tasks() -> Any:
    """Import `metaphrase.evaluation.mteb_tasks`, which needs the extra ``mteb``."""
    try:
        from metaphrase.evaluation import mteb_tasks
    except ModuleNotFoundError as error:
        raise DataUnavailable(f"{error.name} is not installed: {install_command('mteb')}") from error
    return mteb_tasks
