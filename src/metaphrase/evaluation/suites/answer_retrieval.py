"""The suite ``answer-retrieval``: XQuAD-R."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from metaphrase.evaluation import answer_retrieval
from metaphrase.evaluation.guard_data import spread
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.suites.benchmarks import Benchmark, Results, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, in_each_folder, text_size, wanted_languages

#: Bytes encoded per byte of XQuAD-R's files, which have each sentence twice.
ANSWER_WORK: dict[answer_retrieval.AnswerText, float] = {"sentence": 0.5, "paragraph": 2.5}


@in_each_folder
def find_answer_retrieval(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    """XQuAD-R."""
    files = answer_files(folder, settings)

    def measure(name: str, text: answer_retrieval.AnswerText, subject: Subject) -> Results:
        sets = read_answers(folder, files, settings)
        options = subject.options(FEWER_RESAMPLES)
        results = answer_retrieval.evaluate_answer_retrieval(subject.model, sets, answer_text=text, **options)
        return {f"{name} {measure}": result for measure, result in results.items()}

    used = tuple(files.values())
    for text, work in ANSWER_WORK.items() if len(files) > 1 else ():
        if settings.answer_text in ("both", text):
            name = "xquad-r" if text == "sentence" else f"xquad-r {text}"
            yield Benchmark(
                name,
                "answer-retrieval",
                f"answers in one pool of {len(files)} languages, by cosine; text of a candidate: {text}",
                used,
                text_size(used) * work,
                partial(measure, name, text),
                {"answer_text": text},
                asks=True,
            )


def answer_files(folder: Path, settings: Settings) -> dict[str, Path]:
    """The files of XQuAD-R by language, in a folder of this name."""
    files = answer_retrieval.answer_files(folder) if folder_name(folder) == "xquad-r" else {}
    return {language: files[language] for language in wanted_languages(files, settings, folder)}


def read_answers(folder: Path, languages: Iterable[str], settings: Settings) -> dict[str, answer_retrieval.AnswerSet]:
    """The questions that are measured; of evenly spaced ones, whole paragraphs, because each adds candidates."""
    sets = answer_retrieval.load_answer_folder(folder, list(languages))
    if settings.first is None:
        return sets
    whole = next(iter(sets.values()))
    questions: Sequence[int] = range(len(whole.ids))
    if settings.spread:
        by_paragraph = whole.questions_by_paragraph()
        count = max(1, round(settings.first * len(by_paragraph) / len(questions)))
        questions = list(chain.from_iterable(spread(by_paragraph, count)))
    else:
        questions = questions[: settings.first]
    return {language: one.chosen(questions) for language, one in sets.items()}
