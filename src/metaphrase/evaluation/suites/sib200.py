"""The suite ``sib200``: retrieval and topics of SIB-200."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from metaphrase.evaluation import sib200
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.suites.benchmarks import Benchmark, Results, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, folders, text_size, warn_absent

logger = logging.getLogger(__name__)

#: Part of the protocol, and of the key of cached results.
UNQUOTED = "; texts without the quotes of the files"
#: The files of SIB-200 by language and split.
TopicFiles = Mapping[str, Mapping[str, Path]]


def topic_folders(data: Path | None, settings: Settings) -> Iterator[tuple[TopicFiles, tuple[Path, ...]]]:
    """SIB-200, in a folder of this name: the files of English and of the other languages, and all of them."""
    for folder in folders(data):
        files = sib200.topic_files(folder) if folder_name(folder) == "sib200" else {}
        asked = list(files) if settings.languages is None else settings.languages
        codes = {language: sib200.find_language(language, files) for language in asked}
        if files and settings.first is None:
            warn_absent(folder, [language for language, code in codes.items() if code is None])
        wanted = [code for code in dict.fromkeys(codes.values()) if code and code != sib200.ENGLISH]
        if wanted and sib200.ENGLISH in files:
            chosen = {language: files[language] for language in (sib200.ENGLISH, *wanted)}
            yield chosen, tuple(path for splits in chosen.values() for path in splits.values())


def find_sib200(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """Retrieval and topics of SIB-200."""
    protocol = (
        "top-1 by cosine, both directions; topics: logistic regression on English embeddings of train, measured on test, or "
        f"dev without test{UNQUOTED}"
    )
    for files, used in topic_folders(data, settings):
        absent = [one for one in settings.trained_languages or () if sib200.find_language(one, files) is None]
        if absent and settings.first is None:
            logger.warning("--trained_languages has languages without data in SIB-200: %s.", ", ".join(absent))
        measure = partial(_measure_sib200, files, settings.first)
        fixed = {"intervals": "shared targets", "texts": UNQUOTED}
        yield Benchmark("sib200", "sib200", protocol, used, text_size(used), measure, fixed)


def _measure_sib200(files: TopicFiles, first: int | None, subject: Subject) -> Results:
    """Retrieval and topics; a sample is measured, but the classifier is trained on all English sentences."""
    whole = sib200.load_topics(files)
    sets = {language: one.first_sentences(first) for language, one in whole.items()}
    trained = subject.settings.trained_languages or ()
    retrieval = evaluate_retrieval(
        subject.model,
        sib200.topic_pairs(sets),
        groups=sib200.language_groups([language for language in files if language != sib200.ENGLISH], trained),
        **subject.options(),
    )
    topics = sib200.evaluate_topics(
        subject.model, sets, train=whole[sib200.ENGLISH], trained=trained, **subject.options(FEWER_RESAMPLES)
    )
    return {"sib200": replace(retrieval, suite="sib200"), "sib200 topics": topics}
