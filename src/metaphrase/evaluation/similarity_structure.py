"""Similarity structure: whether a changed encoder still orders the similarities within a language as the original does.

The measure is the rank correlation between the two encoders' pairwise cosines of monolingual sentences: 100 if each pair of
sentences keeps its rank, regardless of similarities between languages. It needs no labels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from metaphrase.corpus.declaration import Articles, articles_of
from metaphrase.corpus.parallel import TARGET_LANGUAGE, load_parallel_folder
from metaphrase.evaluation.encoding import Encode, EncodingOptions, embed_sides, encoding_settings
from metaphrase.evaluation.measures import draw_counts, resampled_spearman, spearman
from metaphrase.evaluation.result import Measurement, Result, conditions, mean_of
from metaphrase.evaluation.significance import CHUNK, percentile_interval
from metaphrase.exceptions import DataError
from metaphrase.io.arguments import Resamples, Seed, checked
from metaphrase.io.digests import text_digest
from metaphrase.io.files import DEMO, UDHR
from metaphrase.mining.search import first_occurrences, unit_rows

logger = logging.getLogger(__name__)

#: Languages of the packaged texts besides English, from many families and scripts.
LANGUAGES = ("ar", "de", "fi", "hi", "ru", "sw", "th", "zh")
#: Default number of resamples. Each resample ranks all pairs of sentences again.
RESAMPLES = 200
#: Fewest sentences whose similarities can be ordered.
_FEWEST = 3
#: Sentences of a language that `kept_structure` compares.
_SENTENCES = 300


def structure_texts(
    languages: Sequence[str] = LANGUAGES, *, english: int = 300, articles: Articles | None = None
) -> dict[str, dict[str, str]]:
    """Return packaged texts: the Universal Declaration of Human Rights, and English strings of the demo's development sets.

    For each language, the sentences and their English translations, which translations of one sentence share.

    Args:
        languages: Languages of the Universal Declaration of Human Rights.
        english: Maximum number of English sentences; 0 for none.
        articles: Articles with odd or even numbers, and every other English sentence; None for all.
    """
    declaration = load_parallel_folder(UDHR, languages)
    declaration = declaration if articles is None else articles_of(declaration, articles)
    texts = {language: one.english for language, one in declaration.items()}
    if english:
        sets = load_parallel_folder(DEMO, split="dev").values()
        strings = list(dict.fromkeys(text for one in sets for text in one.targets))
        strings = strings if articles is None else strings[articles == "even" :: 2]
        texts[TARGET_LANGUAGE] = {text: text for text in strings[:english]}
    return texts


@checked
def similarity_structure(
    original: Any,
    tuned: Any,
    texts_by_language: Mapping[str, Sequence[str] | Mapping[str, Hashable]],
    *,
    name: str | None = None,
    resamples: Resamples = RESAMPLES,
    seed: Seed = 0,
    encode_original: Encode | None = None,
    **encoding: Unpack[EncodingOptions],
) -> Result:
    """Measure how well an encoder keeps the order of the original's similarities within each language.

    Args:
        original: The encoder before the change: a SentenceTransformer, or an object with its ``encode``.
        tuned: The encoder after the change.
        texts_by_language: Monolingual sentences; repeated sentences count once. As a mapping, such as `structure_texts`, from
            each sentence to what it means, for example its English translation.
        name: Name of the changed encoder in the result.
        resamples: Number of bootstrap samples of the intervals, over sentences. Sentences that mean the same are drawn
            together. A sample weighs a pair by how often its two sentences were drawn.
        seed: Seed of the bootstrap.
        encode_original: Replaces ``original.encode``, with its signature.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.

    Returns:
        A result whose scores are Spearman's correlations ×100 of the cosines of all pairs of different sentences, for each
        language, with the mean over the languages. A language whose sentences the original finds equally similar, such
        as one in an unknown script, has no order to lose, and counts 100. It keeps no items: it is a comparison already.

    Raises:
        DataError: There are no texts, or a language has fewer than three different sentences.

    >>> class Letters:
    ...     def encode(self, texts, **_):
    ...         return np.array([[text.count(letter) + 1.0 for letter in "abc"] for text in texts])
    >>> similarity_structure(Letters(), Letters(), {"xx": ["a", "aab", "cc"]}).average.score
    100.0
    """
    start = time.perf_counter()
    meanings: dict[str, dict[str, Hashable]] = {
        language: dict(texts) if isinstance(texts, Mapping) else {text: (language, text) for text in texts}
        for language, texts in sorted(texts_by_language.items())
    }
    texts = {language: list(one) for language, one in meanings.items()}
    few = [language for language, one in texts.items() if len(one) < _FEWEST]
    if few or not texts:
        raise DataError(
            f"Similarity structure needs at least {_FEWEST} different sentences for each language, but got fewer for "
            f"{', '.join(few) or 'every language'}. Pass more text."
        )
    of_original: EncodingOptions = {**encoding, "encode": encode_original}
    sides = embed_sides(original, texts.values(), **of_original), embed_sides(tuned, texts.values(), **encoding)
    drawn = _draw(meanings, resamples, np.random.default_rng(seed))
    languages, samples = {}, []
    for (language, one), *pair in zip(texts.items(), *sides, strict=True):
        first_p, second_p = map(pairwise_cosines, pair)
        if first_p.min() < first_p.max():
            score, scores_r = spearman(first_p, second_p), _resampled(first_p, second_p, drawn[language])
        else:
            logger.warning(
                "The original encoder finds all sentences of %s equally similar: there is no order to keep.", language
            )
            score, scores_r = 100.0, np.full(resamples, 100.0)
        samples.append(scores_r)
        sha256 = text_digest("".join(f"{text}\n" for text in one))
        languages[language] = Measurement(len(one), score, _interval(scores_r, score), sha256)
    mean = mean_of(list(languages.values()))
    return Result(
        suite="similarity structure",
        model=name or type(tuned).__name__,
        measure="Spearman",
        protocol="Spearman ×100 of the cosines within a language, against those of the original encoder",
        languages=languages,
        average=replace(mean, interval=_interval(np.mean(samples, axis=0), mean.score)),
        **conditions(start, resamples, seed, **encoding_settings(tuned, **encoding)),
    )


def kept_structure(
    texts: Sequence[Sequence[str]], before: Sequence[NDArray[Any]], after: Sequence[NDArray[Any]]
) -> float:
    """Mean over the languages of the correlations of `similarity_structure`, without intervals.

    For each language, there are its sentences and their embeddings by both encoders, shape ``(n, hidden)``. The first 300
    different sentences are compared. A language whose sentences the original finds equally similar, or that has fewer
    than three, has no order to lose, and counts 100.
    """
    rows = [first_occurrences(sentences)[:_SENTENCES] for sentences in texts]
    sides = ([one_nh[row_n] for one_nh, row_n in zip(side, rows, strict=True)] for side in (before, after))
    return mean_correlation(*sides)


def mean_correlation(before: Iterable[NDArray[Any]], after: Iterable[NDArray[Any]]) -> float:
    """Mean over arrays of the rank correlation between the cosines of all rows before and after, in percent.

    An array of equal cosines has no order to lose, and counts 100.
    """
    correlations = []
    for sides in zip(before, after, strict=True):
        old_p, new_p = map(pairwise_cosines, sides)
        correlations.append(spearman(old_p, new_p) if len(np.unique(old_p)) > 1 else 100.0)
    return float(np.mean(correlations))


def pairwise_cosines(embeddings_nh: NDArray[Any]) -> NDArray[np.float64]:
    """Cosines of all pairs of different rows, with the precision of float32, shape ``(n · (n - 1) / 2,)``."""
    rows_nh = unit_rows(embeddings_nh).astype(np.float64)
    return (rows_nh @ rows_nh.T)[np.triu_indices(len(rows_nh), 1)].round(7)


def _interval(scores_r: NDArray[np.float64], score: float) -> tuple[float, float]:
    """The interval of resampled scores, extended to the score: nearly all samples of a very small loss have larger ones."""
    low, high = percentile_interval(scores_r)
    return min(low, score), max(high, score)


def _draw(
    meanings: Mapping[str, Mapping[str, Hashable]], resamples: int, rng: np.random.Generator
) -> dict[str, NDArray[np.int64]]:
    """How often each sentence of a language is drawn, shape ``(resamples, n)``: as often as those that mean the same."""
    different = dict.fromkeys(chain.from_iterable(one.values() for one in meanings.values()))
    numbers = {meaning: number for number, meaning in enumerate(different)}
    counts_rm = draw_counts(len(numbers), resamples, rng)
    return {
        language: counts_rm[:, [numbers[meaning] for meaning in one.values()]] for language, one in meanings.items()
    }


def _resampled(
    first_p: NDArray[np.float64], second_p: NDArray[np.float64], counts_rn: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Correlations in samples that contain each sentence ``counts_rn`` times, shape ``(resamples,)``."""
    one_p, other_p = np.triu_indices(counts_rn.shape[1], 1)
    rows = max(1, CHUNK // len(one_p))
    parts = (counts_rn[at : at + rows] for at in range(0, len(counts_rn), rows))
    return np.concatenate([resampled_spearman(first_p, second_p, c_rn[:, one_p] * c_rn[:, other_p]) for c_rn in parts])
