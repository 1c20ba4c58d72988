"""The suites over many languages at once: ``answer-retrieval``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from metaphrase.evaluation.answer_retrieval import ANSWER_FILE, evaluate_answer_retrieval, load_answer_folder
from metaphrase.evaluation.measures import STS_RESAMPLES
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    Settings,
    Subject,
    folders,
    text_size,
    wanted_languages,
)

#: Bytes encoded per byte of XQuAD-R's files, which have each sentence twice.
_WORK = {"sentence": 0.5, "paragraph": 2.5}


def find_answer_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """XQuAD-R, in a folder of this name."""
    for folder in folders(data):
        names = sorted(folder.iterdir()) if folder.resolve().name == "xquad-r" else []
        files = {match["language"]: path for path in names if (match := ANSWER_FILE.fullmatch(path.name))}
        wanted = wanted_languages(files, settings)
        if len(wanted) > 1:
            used = tuple(files[language] for language in wanted)
            yield Benchmark(
                "xquad-r",
                "answer-retrieval",
                f"answers in one pool of {len(wanted)} languages, by cosine; text of a candidate: {settings.answer_text}",
                used,
                text_size(used) * _WORK[settings.answer_text],
                partial(_measure_answers, folder, wanted),
            )


def _measure_answers(folder: Path, languages: Sequence[str], subject: Subject) -> dict[str, Result]:
    results = evaluate_answer_retrieval(
        subject.model,
        load_answer_folder(folder, languages),
        answer_text=subject.settings.answer_text,
        resamples=min(STS_RESAMPLES, subject.settings.resamples),
        **subject.options(),
    )
    return {f"xquad-r {measure}": result for measure, result in results.items()}
