"""The suite ``mteb``: test sets as bitext mining tasks of MTEB, and MTEB's own tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.encoding import encode_texts
from metaphrase.evaluation.result import Measurement, Result, complete_groups, mean_of
from metaphrase.evaluation.sts import STS22_GROUPS
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    DataUnavailable,
    Settings,
    Subject,
    load_mteb_tasks,
    text_size,
)
from metaphrase.evaluation.suites.encoders import parallel_folders, stripped_note


def find_mteb(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of a folder as tasks, or the tasks of the settings."""
    local = parallel_folders(data, settings)
    known = [name for name in local if name in ("tatoeba", "udhr")]
    for name in settings.tasks or known or local:
        if name in local:
            sets, files = local[name]
            protocol = f"MTEB bitext mining, F1 of top-1 by cosine, both directions{stripped_note(settings)}"
            yield Benchmark(f"mteb {name}", "mteb", protocol, files, text_size(files), partial(_measure, name, sets))
        else:
            yield Benchmark(
                f"mteb {name}", "mteb", "MTEB's task, data from the Hub", (), 0, partial(_measure, name, None)
            )


def _measure(name: str, sets: Mapping[str, ParallelSet] | None, subject: Subject) -> dict[str, Result]:
    tasks = load_mteb_tasks()
    if sets is None:
        chosen = tasks.get_tasks([name], subject.settings.languages)
    else:
        chosen = [tasks.bitext_task(f"{name}-bitext", sets)]
        texts = list(chain.from_iterable((*one.sources, *one.targets) for one in sets.values()))
        encode_texts(subject.model, texts, **subject.encoding())  # once; MTEB asks for the same texts many times
    found = tasks.evaluate_mteb(
        subject.model,
        chosen,
        Path(subject.folder or "runs/evaluation").parent / "mteb",
        name=subject.name,
        **subject.encoding(),
    )
    if found["unavailable"]:
        raise DataUnavailable("; ".join(found["unavailable"].values()))
    (task,) = found["tasks"].values()
    languages = {language: Measurement(None, row["score"]) for language, row in task["languages"].items()}
    groups = STS22_GROUPS if name.startswith("STS22") else {}
    result = Result(
        suite="mteb",
        model=subject.name,
        measure=task["measure"],
        languages=languages,
        average=Measurement(len(languages), task["average"]),
        groups={
            group: mean_of([languages[member] for member in members])
            for group, members in complete_groups(groups, languages).items()
        },
        settings=found["settings"],
        versions=found["versions"],
        seconds=found["seconds"],
        facts={key: task[key] for key in ("data_revision", "file")} | {"revision": found["revision"]},
    )
    return {f"mteb {name}": result}
