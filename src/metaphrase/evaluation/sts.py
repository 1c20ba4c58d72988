"""Semantic textual similarity: STS-B in and across languages, and STS22.

The measure is Spearman's correlation of cosines and gold scores, times 100, for each language or language pair. Averages are
unweighted means.

References: Cer et al. 2017, "SemEval-2017 Task 1"; Chen et al. 2022, "SemEval-2022 Task 8: Multilingual news article
similarity"; the averages of STS22 follow WACSE.
"""

from __future__ import annotations

import csv
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from metaphrase.corpus.parallel import TARGET_LANGUAGE, files_by_language, rows_of
from metaphrase.corpus.text import open_text
from metaphrase.evaluation.encoding import EncodingOptions, embed_sides, encoding_settings
from metaphrase.evaluation.measures import FEWER_RESAMPLES, spearman
from metaphrase.evaluation.result import Measurement, Result, conditions, with_intervals
from metaphrase.exceptions import DataError, DataMismatchError
from metaphrase.io.arguments import Resamples, Seed, checked
from metaphrase.io.digests import text_digest
from metaphrase.mining.search import unit_rows

#: The 18 subsets of STS22, as MTEB names them: ten languages and eight pairs of languages.
STS22_SUBSETS = (
    *("en", "de", "es", "pl", "tr", "ar", "ru", "zh", "fr", "it"),
    *("de-en", "es-en", "pl-en", "zh-en", "es-it", "de-fr", "de-pl", "fr-pl"),
)
#: The two averages of the literature. The second one of WACSE excludes the Polish–French subset, which is very small.
STS22_GROUPS: dict[str, tuple[str, ...]] = {
    "18": STS22_SUBSETS,
    "without fr-pl": tuple(subset for subset in STS22_SUBSETS if subset != "fr-pl"),
}

#: Files of STS pairs.
STS_FILE = re.compile(r"(?:.+-)?(?P<language>[a-z]{2,3}(-[A-Z][a-z]{3})?)-(?P<split>[a-z]+)\.csv(\.gz)?")
_HEADER = ["sentence1", "sentence2", "score"]


@dataclass(frozen=True)
class STSSet:
    """Pairs of sentences with human similarity scores.

    Attributes:
        name: Language, or both languages: the first sentences of ``"de-en"`` are German.
        first: First sentences.
        second: Second sentences.
        scores: Gold similarity of each pair.
    """

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    scores: tuple[float, ...]

    @property
    def sha256(self) -> str:
        """Digest of the pairs, as lines ``first<TAB>second<TAB>score``."""
        rows = zip(self.first, self.second, self.scores, strict=True)
        return text_digest("".join(f"{a}\t{b}\t{float(score)}\n" for a, b, score in rows))

    def rows(self, chosen: Iterable[int]) -> STSSet:
        """Some of the pairs, by number."""
        return rows_of(self, ("first", "second", "scores"), chosen)


def load_sts_folder(
    path: str | Path, languages: Sequence[str] | None = None, split: str = "test"
) -> dict[str, STSSet]:
    """Read STS-B in several languages: files ``[name-]xx-split.csv[.gz]`` of ``sentence1,sentence2,score``.

    A header of these three names is optional.

    Args:
        path: The folder.
        languages: Languages to read, in this order; None reads all, in alphabetical order.
        split: ``"test"``, ``"dev"``, …

    Raises:
        FileNotFoundError: The folder, the split or a language does not exist.
        ValueError: A row is malformed, or a language has two files.
    """
    named, example = f"xx-{split}.csv.gz", "stsb-de-test.csv.gz"
    files = files_by_language(path, STS_FILE, split, languages, named=named, example=example)
    return {language: _read(language, file) for language, file in files.items()}


def _read(language: str, path: Path) -> STSSet:
    rows: list[tuple[str, str, float]] = []
    with open_text(path, newline="") as file:
        reader = csv.reader(file)
        try:
            for number, row in enumerate(reader, 1):
                if row == _HEADER:
                    continue
                try:
                    first, second, score = row
                    rows.append((first, second, float(score)))
                    if not math.isfinite(rows[-1][2]):
                        raise ValueError(score)
                except ValueError as error:
                    raise DataError(
                        f"{path}: row {number} must be two sentences and a finite score, but is {','.join(row)[:80]!r}."
                    ) from error
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: this is not CSV ({error}).") from error
    if not rows:
        raise DataError(f"{path} has no pairs.")
    first_sentences, second_sentences, scores = zip(*rows, strict=True)
    return STSSet(language, first_sentences, second_sentences, scores)


def cross_lingual(sets: Mapping[str, STSSet]) -> dict[str, STSSet]:
    """Combine each language with English, both ways: the first sentence in one, the second of the same row in the other."""
    others = [language for language in sets if language != TARGET_LANGUAGE and TARGET_LANGUAGE in sets]
    crossed = {}
    for one, other in chain.from_iterable(((x, TARGET_LANGUAGE), (TARGET_LANGUAGE, x)) for x in others):
        if sets[one].scores != sets[other].scores:
            raise DataMismatchError(
                f"STS across {one} and {other} needs the same rows in both, but their scores differ "
                f"({len(sets[one].scores)} and {len(sets[other].scores)} rows)."
            )
        name = f"{one}-{other}"
        crossed[name] = STSSet(name, sets[one].first, sets[other].second, sets[one].scores)
    return crossed


@checked
def evaluate_sts(
    model: Any,
    sets: Mapping[str, STSSet],
    *,
    name: str | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    resamples: Resamples = FEWER_RESAMPLES,
    seed: Seed = 0,
    **encoding: Unpack[EncodingOptions],
) -> Result:
    """Measure Spearman's correlation of cosines and gold scores for every set.

    Args:
        model: A SentenceTransformer, or an object with its ``encode``.
        sets: From `load_sts_folder`, `cross_lingual` or a task of MTEB.
        name: Name of the model in the result.
        groups: Groups of sets to average if all their sets are available, such as `STS22_GROUPS`.
        resamples: Number of bootstrap samples of the intervals, over pairs of sentences. Sets of the same size share
            their samples, because translations of one set have the same items.
        seed: Seed of the bootstrap.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.

    Returns:
        A result whose scores are correlations ×100. In JSON, a language has the ``cosines`` and gold ``scores`` of its
        pairs, the items that :func:`metaphrase.evaluation.compare.compare` tests.
    """
    start = time.perf_counter()
    cosines = _cosines(model, sets, **encoding)
    languages = {
        language: Measurement(
            len(one.scores),
            spearman(one.scores, cosines[language]),
            sha256=one.sha256,
            details={"cosines": cosines[language], "scores": list(one.scores)},
        )
        for language, one in sets.items()
    }
    return Result(
        suite="sts",
        model=name or type(model).__name__,
        measure="Spearman",
        protocol="Spearman of the cosine ×100",
        **with_intervals("spearman", languages, groups=groups, resamples=resamples, seed=seed),
        **conditions(start, resamples, seed, **encoding_settings(model, **encoding)),
    )


def _cosines(model: Any, sets: Mapping[str, STSSet], **encoding: Unpack[EncodingOptions]) -> dict[str, list[float]]:
    """Cosine of each pair with seven decimals, the precision of float32.

    Identical texts have a cosine of exactly 1, so that rounding errors do not rank them.
    """
    sides = map(
        unit_rows, embed_sides(model, (side for s in sets.values() for side in (s.first, s.second)), **encoding)
    )

    def cosine(first_nh: NDArray[Any], second_nh: NDArray[Any]) -> NDArray[np.float64]:
        a_nh, b_nh = first_nh.astype(np.float64), second_nh.astype(np.float64)
        aa_n, bb_n, ab_n = (np.einsum("nh,nh->n", x, y) for x, y in ((a_nh, a_nh), (b_nh, b_nh), (a_nh, b_nh)))
        return ab_n / np.maximum(np.sqrt(aa_n * bb_n), np.finfo(np.float32).tiny)

    return {name: cosine(next(sides), next(sides)).round(7).tolist() for name in sets}
