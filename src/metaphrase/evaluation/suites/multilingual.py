"""The suites over many languages at once, ``answer-retrieval`` and ``sib200``, and ``xsim++``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.answer_retrieval import answer_files, evaluate_answer_retrieval, load_answer_folder
from metaphrase.evaluation.measures import STS_RESAMPLES
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.sib200 import (
    ENGLISH,
    evaluate_topics,
    language_groups,
    load_topic_folder,
    measured,
    sib200_code,
    topic_files,
    topic_pairs,
)
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    Settings,
    Subject,
    folders,
    text_size,
    wanted_languages,
)
from metaphrase.evaluation.suites.encoders import parallel_folders
from metaphrase.evaluation.xsimpp import NEIGHBOURS, evaluate_xsimpp

#: Bytes encoded per byte of XQuAD-R's files, which have each sentence twice.
_WORK = {"sentence": 0.5, "paragraph": 2.5}


def find_answer_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """XQuAD-R, in a folder of this name."""
    for folder in folders(data):
        files = answer_files(folder) if folder.resolve().name == "xquad-r" else {}
        wanted = wanted_languages(files, settings)
        if len(wanted) > 1:
            used = tuple(files[language] for language in wanted)
            yield Benchmark(
                "xquad-r",
                "answer-retrieval",
                f"answers in one pool of {len(wanted)} languages, by cosine; text of a candidate: {settings.answer_text}",
                used,
                text_size(used) * _WORK[settings.answer_text],
                partial(_measure_answers, folder, wanted, settings.first),
            )


def _measure_answers(folder: Path, languages: Sequence[str], first: int | None, subject: Subject) -> dict[str, Result]:
    sets = load_answer_folder(folder, languages)
    results = evaluate_answer_retrieval(
        subject.model,
        {language: one.first_questions(first) for language, one in sets.items()},
        answer_text=subject.settings.answer_text,
        **subject.options(STS_RESAMPLES),
    )
    return {f"xquad-r {measure}": result for measure, result in results.items()}


def find_sib200(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """SIB-200, in a folder of this name."""
    for folder in folders(data):
        files = topic_files(folder) if folder.resolve().name == "sib200" else {}
        coded = replace(settings, languages=[sib200_code(language) for language in settings.languages or ()])
        wanted = [language for language in wanted_languages(files, coded) if language != ENGLISH]
        if wanted and ENGLISH in files:
            used = tuple(path for language in (ENGLISH, *wanted) for path in files[language].values())
            yield Benchmark(
                "sib200",
                "sib200",
                "top-1 by cosine, both directions; topics: logistic regression on English embeddings of train, measured "
                "on test, or dev without test",
                used,
                text_size(used),
                partial(_measure_sib200, folder, wanted, settings.first),
                {"intervals": "shared items"},
            )


def _measure_sib200(folder: Path, languages: Sequence[str], first: int | None, subject: Subject) -> dict[str, Result]:
    """Retrieval and topics; a sample is measured, but the classifier is trained on all English sentences."""
    whole = load_topic_folder(folder, languages)
    sets = {language: one.first_sentences(first) for language, one in whole.items()}
    trained = subject.settings.trained_languages or ()
    retrieval = evaluate_retrieval(
        subject.model,
        topic_pairs(sets),
        groups=language_groups(languages, trained),
        shared_items=True,
        **subject.options(),
    )
    topics = evaluate_topics(
        subject.model,
        sets,
        train=whole[ENGLISH],
        trained=trained,
        **subject.options(STS_RESAMPLES),
    )
    return {"sib200": replace(retrieval, suite="sib200"), "sib200 topics": topics}


def find_xsimpp(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of `find_retrieval`, and SIB-200 with the split that its topics are measured on."""
    for name, (sets, files) in parallel_folders(data, settings).items():
        yield _xsimpp(name, files, partial(_measure_xsimpp, name, sets))
    for one in find_sib200(data, settings):
        folder = one.files[0].parent
        languages = [language for language in topic_files(folder) if language != ENGLISH]
        languages = [language for language in languages if any(path.name.startswith(language) for path in one.files)]
        found = _xsimpp(one.name, one.files, partial(_measure_sib200_xsimpp, folder, languages, settings.first))
        yield replace(found, work=found.work / 8)  # one split of two or three


def _xsimpp(name: str, files: tuple[Path, ...], measure: Callable[[Subject], dict[str, Result]]) -> Benchmark:
    protocol = f"xx→en by ratio margin, k={NEIGHBOURS}, among the targets and English distractors"
    return Benchmark(f"{name} xsim++", "xsim++", protocol, files, text_size(files), measure)


def _measure_xsimpp(name: str, sets: Mapping[str, ParallelSet], subject: Subject) -> dict[str, Result]:
    return {f"{name} xsim++": evaluate_xsimpp(subject.model, sets, **subject.options(STS_RESAMPLES))}


def _measure_sib200_xsimpp(
    folder: Path, languages: Sequence[str], first: int | None, subject: Subject
) -> dict[str, Result]:
    sets = load_topic_folder(folder, languages)
    split = measured(sets[ENGLISH])
    tested = {code: one.split_only(split).first_sentences(first) for code, one in sets.items()}
    return _measure_xsimpp("sib200", topic_pairs(tested), subject)
