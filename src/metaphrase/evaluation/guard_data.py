"""The data of guards with labels: a folder of STS pairs, parallel sentences, topics, or questions with answers.

A folder is divided into a part on which settings are chosen and a part on which they are measured: its development and test
files or, if it has only one of them, random halves of the items.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from metaphrase.corpus.parallel import PARALLEL_FILE, ParallelSet, load_parallel_folder
from metaphrase.evaluation.answer_retrieval import (
    AnswerSet,
    evaluate_monolingual_answers,
    load_questions,
    question_files,
)
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.sib200 import ENGLISH, TopicSet, evaluate_topics, load_topic_folder, topic_files
from metaphrase.evaluation.sts import STS_FILE, STSSet, evaluate_sts, load_sts_folder
from metaphrase.exceptions import DataError, MissingFileError

logger = logging.getLogger(__name__)

#: Parts of a folder's data: for choosing settings, and for measuring them.
Part = Literal["dev", "test"]
#: The folders of data that a guard takes, in words.
GUARD_FOLDERS = (
    "STS pairs (xx-dev.csv.gz), parallel sentences (xx-en.dev.tsv.gz or xx-en.tsv.gz), topics (xxx_Scpt.dev.tsv.gz) or "
    "questions with answers (dev-xx.json.gz or xx.json.gz)"
)
_PART_NAMES = {"dev": "development", "test": "test", "": "unsplit"}
#: Maximum number of languages of a folder, evenly spaced over its languages.
MAX_LANGUAGES = 24


@dataclass(frozen=True)
class LabelledData:
    """Data with labels, and how an encoder is measured on them.

    Attributes:
        name: Name of the data.
        sets: The data by language.
        evaluate: Takes an encoder, the sets and `EncodingOptions`, and returns a result.
    """

    name: str
    sets: Mapping[str, Any]
    evaluate: Callable[..., Result]

    @property
    def texts(self) -> list[str]:
        """The distinct texts that an encoder embeds in a measurement, for the kinds of data that `load_guard_data` reads."""
        kind = next(kind for kind in _KINDS if kind.evaluate is self.evaluate)
        return list(dict.fromkeys(chain.from_iterable(map(kind.texts, self.sets.values()))))


def load_guard_data(
    folder: str | Path, part: Part = "dev", *, halved: bool = False, max_items: int = 300
) -> LabelledData:
    """Read the development or the test data of a folder. A warning names the languages that have no such data.

    Args:
        folder: STS pairs ``xx-dev.csv[.gz]``; parallel sentences ``xx-en[.dev].tsv[.gz]``; topics in SIB-200's layout
            ``xxx_Scpt.dev.tsv[.gz]``, with ``train`` in English; or questions in SQuAD's format, ``[dev-]xx.json[.gz]``.
        part: Part of the data.
        halved: If the folder does not have both parts, take a random half of the items that it has, always the same.
            Otherwise, data without a part in their names count as either.
        max_items: Maximum number of items of a language, evenly spaced.

    Raises:
        MissingFileError: The folder does not exist, or has no such files.
        DataError: A file is malformed, or has too few items, or one score for all STS pairs.
    """
    folder = Path(folder)
    candidates = ((kind, kind.parts(folder)) for kind in _KINDS if folder.is_dir())
    kind, parts = next(filter(itemgetter(1), candidates), (_KINDS[0], {}))
    halved = halved and not ("dev" in parts and "test" in parts)
    read = next((name for name in (("dev", "test", "") if halved else (part, "")) if name in parts), None)
    if read is None:
        raise MissingFileError(
            f"{folder} has no {'' if halved else 'development '}data. Name a folder of one of these: {GUARD_FOLDERS}."
        )
    if skipped := set(chain.from_iterable(parts.values())).difference(parts[read]):
        _log_skipped(folder, _PART_NAMES[read], ", ".join(sorted(skipped)))
    sets = kind.load(folder, read)
    kept = [ENGLISH, *spread([language for language in sets if language != ENGLISH], MAX_LANGUAGES)]
    sizes = {language: kind.size(data) for language, data in sets.items() if language in kept}
    rows = {language: _half(size, part) if halved else range(size) for language, size in sizes.items()}
    sets = {language: kind.pick(sets[language], spread(items, max_items)) for language, items in rows.items()}
    if empty := [language for language, data in sets.items() if not kind.size(data)]:
        raise DataError(
            f"{folder} has a single item for {', '.join(empty)}, but settings are chosen on one half of the items and "
            "measured on the other. Add items, or remove these files."
        )
    if flat := [name for name, data in sets.items() if isinstance(data, STSSet) and len(set(data.scores)) < 2]:
        raise DataError(
            f"The measured pairs of {folder} have the same score in {', '.join(flat)}, so no correlation can be computed. "
            "Add pairs with other scores, or remove these files."
        )
    return LabelledData(folder.resolve().name, sets, kind.evaluate)


@cache
def _log_skipped(folder: Path, part: str, languages: str) -> None:
    """Log once that languages of a folder have no data of a part."""
    logger.warning("%s has no %s data for these languages, which are skipped: %s. Add files.", folder, part, languages)


def _half(count: int, part: Part) -> list[int]:
    """Half of the numbers of items, in order: of every two neighbours a random one, as files may alternate.

    The same row is in the same half of every file, such as translations of one file.
    """
    draw = random.Random(0)
    dev = [2 * pair + draw.randrange(2) for pair in range(count // 2)] + [count - 1] * (count % 2)
    return dev if part == "dev" else sorted(set(range(count)).difference(dev))


class _Kind(NamedTuple):
    """A kind of data.

    Attributes:
        parts: Languages of each part of a folder.
        load: Reads a part.
        evaluate: Measures an encoder.
        size: Number of items.
        pick: Selects items.
        texts: All texts of a set.
    """

    parts: Callable[[Path], Mapping[str, Collection[str]]]
    load: Callable[[Path, str], Mapping[str, Any]]
    evaluate: Callable[..., Result]
    size: Callable[[Any], int]
    pick: Callable[[Any, Sequence[int]], Any]
    texts: Callable[[Any], Iterable[str]]


def _parts(pattern: re.Pattern[str], folder: Path) -> dict[str, set[str]]:
    """The languages of each part in the names of files; ``""`` is the part without a split."""
    languages: dict[str, set[str]] = {}
    for path in folder.iterdir():
        if (match := pattern.fullmatch(path.name)) and (part := match["split"] or "") in _PART_NAMES:
            languages.setdefault(part, set()).add(match["language"])
    return languages


def _topic_parts(folder: Path) -> dict[str, Collection[str]]:
    """All languages for each part; those that lack one are refused when they are read."""
    files = topic_files(folder)
    return {part: files.keys() for part in ("dev", "test") if part in files.get(ENGLISH, {})}


def _load_topics(folder: Path, part: str) -> dict[str, TopicSet]:
    """Topics whose measured split is the part."""
    sets = load_topic_folder(folder)
    rows = [at for at, split in enumerate(sets[ENGLISH].split) if split in ("train", part)]
    return {language: topics.rows(rows) for language, topics in sets.items()}


def _topics_at(topics: TopicSet, items: Sequence[int]) -> TopicSet:
    """Some of the measured sentences, and all others."""
    measured = [at for at, split in enumerate(topics.split) if split != "train"]
    kept = {measured[item] for item in items}
    return topics.rows(at for at, split in enumerate(topics.split) if split == "train" or at in kept)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Evenly spaced items.

    >>> spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[at] for at in np.linspace(0, len(items) - 1, most).round().astype(int)]


_KINDS = (
    _Kind(
        parts=partial(_parts, STS_FILE),
        load=lambda folder, part: load_sts_folder(folder, split=part),
        evaluate=evaluate_sts,
        size=lambda sts: len(sts.scores),
        pick=STSSet.rows,
        texts=lambda sts: (*sts.first, *sts.second),
    ),
    _Kind(
        parts=partial(_parts, PARALLEL_FILE),
        load=lambda folder, part: load_parallel_folder(folder, split=part or None),
        evaluate=evaluate_retrieval,
        size=lambda pairs: len(pairs.sources),
        pick=ParallelSet.rows,
        texts=lambda pairs: (*pairs.sources, *pairs.targets),
    ),
    _Kind(
        parts=_topic_parts,
        load=_load_topics,
        evaluate=evaluate_topics,
        size=lambda topics: len(topics.split) - topics.split.count("train"),
        pick=_topics_at,
        texts=lambda topics: topics.texts,
    ),
    _Kind(
        parts=question_files,
        load=lambda folder, part: load_questions(question_files(folder)[part]),
        evaluate=evaluate_monolingual_answers,
        size=lambda answers: len(answers.ids),
        pick=AnswerSet.chosen,
        texts=lambda answers: (*answers.questions, *answers.sentences),
    ),
)
