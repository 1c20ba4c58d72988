"""Translation retrieval: find the translation of a sentence among all sentences of the test set.

The score of a language is the accuracy of cosine top-1 retrieval in both directions, with bootstrap intervals. Results
also have means over the language sets of the literature. Accuracies are in percent, except those of
`RetrievalEvaluator`, which follows sentence-transformers' evaluators.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet, sets_digest
from metaphrase.evaluation.encoding import Encoders, EncodingOptions, embed_sides, encoding_settings
from metaphrase.evaluation.evaluator import EmbeddingEvaluator
from metaphrase.evaluation.measures import DIRECTIONS
from metaphrase.evaluation.result import Measurement, Result, complete_groups, conditions, item_id
from metaphrase.evaluation.significance import RESAMPLES, cluster_interval, percentile_interval, resampled_means
from metaphrase.io.arguments import Count, Resamples, Seed, checked
from metaphrase.mining.margins import neighbour_scores
from metaphrase.mining.search import distinct_rows, nearest_neighbours, unit_rows
from metaphrase.modeling.languages import LanguageEmbedding, fold_languages

logger = logging.getLogger(__name__)


#: The language sets whose means are reported on Tatoeba. 36, 28 and 14 are those of XTREME and DAP: 28 excludes the
#: languages with fewer than 1,000 pairs. 14 are the languages of XNLI, which is not a subset of 28 (sw, th). 8, 5 and 4
#: are the low-resource sets of WACSE.
TATOEBA_GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(languages.split())
    for group, languages in {
        "36": "af ar bg bn de el es et eu fa fi fr he hi hu id it ja jv ka kk ko ml mr nl pt ru sw ta te th tl tr ur vi zh",
        "28": "af ar bg bn de el es et eu fa fi fr he hi hu id it ja ko mr nl pt ru tl tr ur vi zh",
        "14": "ar bg de el es fr hi ru sw th tr ur vi zh",
        "8": "tl jv sw ml te mr kk ka",
        "5": "kk te ka jv tl",
        "4": "kk te ka jv",
    }.items()
}

#: Number of similarities held in memory (128 MB).
_CHUNK = 1 << 25
#: Embeddings have collapsed if the mean cosine of unrelated sentences exceeds this.
COLLAPSED_COSINE = 0.99

HitsByDirection = tuple[NDArray[np.bool_], NDArray[np.bool_]]


@checked
def retrieval_hits(
    source_nh: NDArray[Any],
    target_nh: NDArray[Any],
    *,
    match_text: tuple[Sequence[str], Sequence[str]] | None = None,
    margin_k: Count | None = None,
) -> HitsByDirection:
    """Return whether the nearest neighbour of each sentence on the other side, by cosine, is its translation.

    The first of equally similar candidates counts.

    Args:
        source_nh: Embeddings of the sources, shape ``(n, hidden)``.
        target_nh: Embeddings of their translations, shape ``(n, hidden)``.
        match_text: The texts of both sides. If given, another copy of the translation's text also counts as a hit.
        margin_k: Number of nearest neighbours to rank by ratio margin instead of cosine. With 4, the percentage of
            misses is the xsim error (Heffernan et al. 2022).

    Returns:
        Hits of source → target and of target → source, boolean, shape ``(n,)`` each.

    Raises:
        ValueError: The sides differ in length, or an embedding is not finite.
    """
    if len(source_nh) != len(target_nh):
        raise ValueError(
            f"Retrieval needs one target per source, but got {len(source_nh)} sources and {len(target_nh)} targets."
        )
    sides = unit_rows(np.asarray(source_nh)), unit_rows(np.asarray(target_nh))
    nearest = _nearest if margin_k is None else partial(largest_margin, k=margin_k)
    hits = []
    for query, pool in ((0, 1), (1, 0)):
        nearest_n = nearest(sides[query], sides[pool])
        gold_n = np.arange(len(nearest_n))
        if match_text is not None:
            gold_n = np.unique(np.asarray(match_text[pool], dtype=object), return_inverse=True)[1]
            nearest_n = gold_n[nearest_n]
        hits.append(nearest_n == gold_n)
    return hits[0], hits[1]


def unrelated_cosine(source_nh: NDArray[Any], target_nh: NDArray[Any]) -> float | None:
    """Mean cosine of two sentences of different rows, of either side; a copy of a sentence counts as another one.

    None for a single row, which has no unrelated sentences.

    >>> unrelated_cosine(np.eye(2), np.eye(2))
    0.0
    """
    n = len(source_nh)
    if n < 2:
        return None
    sides = [unit_rows(np.asarray(side_nh)).astype(np.float64) for side_nh in (source_nh, target_nh)]
    total_h = sides[0].sum(axis=0) + sides[1].sum(axis=0)
    related = sum(float(np.vdot(one, other)) for one in sides for other in sides)
    return (float(total_h @ total_h) - related) / (4 * n * (n - 1))


def _nearest(query_nh: NDArray[np.float32], pool_nh: NDArray[np.float32]) -> NDArray[np.intp]:
    """Row of the pool with the largest dot product, the first of ties, shape ``(n,)``.

    Copies of a row are searched once, because a matrix product may round equal columns differently and break the tie.
    """
    first_m, _ = distinct_rows(pool_nh)
    pool_hm = pool_nh[first_m].T
    size = max(1, _CHUNK // len(first_m))
    nearest = [(query_nh[i : i + size] @ pool_hm).argmax(axis=1) for i in range(0, len(query_nh), size)]
    return first_m[np.concatenate(nearest)]


def largest_margin(query_nh: NDArray[np.float32], pool_nh: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Row of the pool with the largest ratio margin among the ``k`` nearest, the first of its copies, shape ``(n,)``."""
    forward, backward = nearest_neighbours(query_nh, pool_nh, k), nearest_neighbours(pool_nh, query_nh, k)
    best_n = neighbour_scores(forward, backward, "ratio").argmax(axis=1)
    first_d, distinct_m = distinct_rows(pool_nh)
    return first_d[distinct_m[forward.row_qk[np.arange(len(best_n)), best_n]]]


def pooled_hits(
    sets: Mapping[str, ParallelSet], embeddings: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
) -> dict[str, HitsByDirection]:
    """Return whether the nearest of all other sentences, in all languages, is a translation of a sentence, by cosine.

    The pool holds each different text of both sides of all languages once. An encoder that puts the sentences of a language
    close to each other finds one of these instead. With a model for each language, a text that occurs in several has the
    embedding of the first. Two texts are translations of each other if they are in pairs with the
    same target. A sentence that equals all of its translations counts as found.

    Args:
        sets: Parallel sentences per language.
        embeddings: Embeddings of the sources and of the targets of each language, shape ``(n, hidden)`` each.

    Returns:
        For each language, the hits of its sources and of its targets, boolean, shape ``(n,)`` each.
    """
    row_of: dict[str, NDArray[Any]] = {}
    targets_of: dict[str, set[str]] = {}
    texts_of: dict[str, set[str]] = {}
    for language, both in embeddings.items():
        one = sets[language]
        for side, side_nh in zip((one.sources, one.targets), both, strict=True):
            for text, target, row_h in zip(side, one.targets, side_nh, strict=True):
                row_of.setdefault(text, row_h)
                targets_of.setdefault(text, set()).add(target)
                texts_of.setdefault(target, set()).add(text)
    texts, pool_mh = list(row_of), unit_rows(np.stack(list(row_of.values())))
    first_d, distinct_m = distinct_rows(pool_mh)  # searched once, see `_nearest`
    found = {}
    size = max(1, _CHUNK // len(texts))
    for first in range(0, len(texts), size):
        cosine_nm = (pool_mh[first : first + size] @ pool_mh[first_d].T)[:, distinct_m]
        row_n = np.arange(len(cosine_nm))
        cosine_nm[row_n, first + row_n] = -np.inf
        for text, at in zip(texts[first : first + size], cosine_nm.argmax(axis=1).tolist(), strict=True):
            is_alone = all(len(texts_of[target]) == 1 for target in targets_of[text])
            found[text] = is_alone or not targets_of[text].isdisjoint(targets_of[texts[at]])
    return {
        language: (
            np.array([found[text] for text in sets[language].sources]),
            np.array([found[text] for text in sets[language].targets]),
        )
        for language in embeddings
    }


@checked
def find_translations(
    model: Encoders,
    sets: Mapping[str, ParallelSet],
    *,
    text_equality: bool = False,
    margin_k: Count | None = None,
    one_pool: bool = False,
    **encoding: Unpack[EncodingOptions],
) -> tuple[dict[str, HitsByDirection], float | None]:
    """Hits of every language, and the mean over the languages of the cosine of unrelated sentences, if there are any.

    With ``one_pool``, see `pooled_hits`.
    """
    if one_pool and margin_k is not None:
        raise ValueError("Retrieval from one pool ranks by cosine. Pass one_pool=False, or margin_k=None.")
    hits: dict[str, HitsByDirection] = {}
    pool: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    cosines = []
    for language, source_nh, target_nh in _embedded(model, sets, **encoding):
        texts = (sets[language].sources, sets[language].targets) if text_equality else None
        if one_pool:
            pool[language] = (source_nh, target_nh)
        else:
            hits[language] = retrieval_hits(source_nh, target_nh, match_text=texts, margin_k=margin_k)
        if (cosine := unrelated_cosine(source_nh, target_nh)) is not None:
            cosines.append(cosine)
    hits = pooled_hits(sets, pool) if one_pool else hits
    return hits, float(np.mean(cosines)) if cosines else None


def _embedded(
    model: Encoders, sets: Mapping[str, ParallelSet], **encoding: Unpack[EncodingOptions]
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Yield each language with the embeddings of its sources and targets."""
    models = model if isinstance(model, Mapping) else {"": model}

    def key(language: str) -> str:
        return language if isinstance(model, Mapping) else ""

    sides: dict[str, list[Sequence[str]]] = {}
    for s in sets.values():
        sides.setdefault(key(s.language), []).append(s.sources)
        sides.setdefault(key(TARGET_LANGUAGE), []).append(s.targets)
    if missing := sorted(sides.keys() - models.keys()):
        raise ValueError(f"There is no model for {', '.join(missing)}, only for {', '.join(sorted(models))}.")
    embedded = {name: embed_sides(models[name], of_model, **encoding) for name, of_model in sides.items()}
    for language, s in sets.items():
        yield language, next(embedded[key(s.language)]), next(embedded[key(TARGET_LANGUAGE)])


@checked
def evaluate_retrieval(
    model: Encoders,
    sets: Mapping[str, ParallelSet],
    *,
    name: str | None = None,
    text_equality: bool = False,
    margin_k: Count | None = None,
    one_pool: bool = False,
    groups: Mapping[str, Sequence[str]] = TATOEBA_GROUPS,
    resamples: Resamples = RESAMPLES,
    seed: Seed = 0,
    **encoding: Unpack[EncodingOptions],
) -> Result:
    """Measure retrieval in both directions for every language.

    Args:
        model: A SentenceTransformer, or an object with its ``encode``; or one for each language, including English (see
            :func:`metaphrase.modeling.languages.fold_languages`).
        sets: Parallel sentences per language, from `load_parallel_folder`.
        name: Name of the model in the result.
        text_equality: Also count a target with the same text as the translation as a hit. Test sets repeat sentences; by
            default only the translation's own row counts, as in the papers.
        margin_k: Retrieve by ratio margin over this number of neighbours, see `retrieval_hits`; None uses the cosine.
        one_pool: Retrieve from all sentences of all languages and both sides, see `pooled_hits`: a sentence of the query's
            own language may be found instead of the translation.
        groups: Groups of languages to average if all their languages are available.
        resamples: Number of bootstrap samples of the intervals. Pairs of several languages with the same target are drawn
            together: an average over languages is as uncertain as its sentences, however many languages it has.
        seed: Seed of the bootstrap.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.

    Returns:
        A result whose scores are the mean accuracies of both directions. In JSON, a language also has::

            "source_to_target": {"accuracy": 73.3, "interval": [68.9, 77.7], "hits": "1101…"},
            "target_to_source": {…}, "mean": {"accuracy": 75.1, "interval": …}

        ``hits`` are the items that :func:`metaphrase.evaluation.compare.compare` tests; ``item_ids`` identify the targets, if
        languages share some. ``facts`` has the mean cosine of sentences that are not translations of each other.
    """
    start = time.perf_counter()
    hits, cosine = find_translations(
        model, sets, text_equality=text_equality, margin_k=margin_k, one_pool=one_pool, **encoding
    )
    scores = {language: (*both, np.mean(both, axis=0)) for language, both in hits.items()}
    ids = shared_ids(sets)

    def measurement(n: int, members: Sequence[str], sha256: str | None = None) -> Measurement:
        """The mean accuracy of some languages, for each direction and for both."""
        details: dict[str, Any] = {}
        for at, key in enumerate((*DIRECTIONS, "mean")):
            items = {language: scores[language][at] for language in members}
            if ids is None or len(items) == 1:
                interval = percentile_interval(resampled_means(items, resamples=resamples, seed=seed))
            else:
                interval = cluster_interval(items, ids, resamples=resamples, seed=seed)
            accuracy = 100 * float(np.mean([item_n.mean() for item_n in items.values()]))
            details[key] = {"accuracy": accuracy, "interval": list(interval)}
        mean = details["mean"]
        return Measurement(n, mean["accuracy"], tuple(mean["interval"]), sha256, details)

    languages: dict[str, Measurement] = {}
    for language, both in hits.items():
        one = measurement(len(both[0]), [language], sets[language].sha256)
        for direction, hits_n in zip(DIRECTIONS, both, strict=True):
            one.details[direction]["hits"] = "".join("01"[hit] for hit in hits_n.tolist())
        shared = {} if ids is None else {"item_ids": ids[language]}
        languages[language] = replace(one, details={**one.details, **shared})
    encoder: Any = next(iter(model.values())) if isinstance(model, Mapping) else model
    return Result(
        suite="retrieval",
        model=name or type(encoder).__name__,
        measure="accuracy",
        statistic="hits",
        protocol=f"top-1 by {'cosine' if margin_k is None else f'ratio margin, k={margin_k}'}, both directions"
        + ", one pool of all languages" * one_pool,
        languages=languages,
        groups={group: measurement(len(members), members) for group, members in complete_groups(groups, hits).items()},
        average=measurement(len(hits), list(hits)),
        **conditions(
            start,
            resamples,
            seed,
            **encoding_settings(encoder, **encoding),
            text_equality=text_equality,
            margin_k=margin_k,
            **({"one_pool": True} if one_pool else {}),
            data=", ".join(sorted({_pattern(s) for s in sets.values() if s.path})),
            data_sha256=sets_digest(sets),
        ),
        facts={} if cosine is None else {"unrelated_cosine": cosine},
    )


def shared_ids(sets: Mapping[str, ParallelSet]) -> dict[str, list[int]] | None:
    """Ids of the targets of each language, the same in all results; None if no target is in several languages."""
    targets = [set(one.targets) for one in sets.values()]
    if len(set().union(*targets)) == sum(map(len, targets)):
        return None
    return {language: [*map(item_id, one.targets)] for language, one in sets.items()}


def _pattern(parallel: ParallelSet) -> str:
    """Path of a set, with ``xx`` for the language: ``data/xx-en.test.tsv.gz``."""
    path = parallel.path or Path()
    return str(path.with_name(f"xx{path.name.removeprefix(parallel.language)}"))


def xsim_error(result: Result) -> Result:
    """The xsim error of a result of `evaluate_retrieval` by margin: 100 − accuracy, in each direction and their mean.

    Reference: Artetxe and Schwenk 2019 (LASER), who report the error of ``source_to_target``.
    """

    def flipped(entry: Mapping[str, Any]) -> dict[str, Any]:
        low, high = entry["interval"]
        others = {key: value for key, value in entry.items() if key not in ("accuracy", "interval")}
        return {"error": 100 - entry["accuracy"], "interval": [100 - high, 100 - low], **others}

    def of(entry: Measurement) -> Measurement:
        details = dict(entry.details) | {name: flipped(entry.details[name]) for name in (*DIRECTIONS, "mean")}
        mean = details["mean"]
        return replace(entry, score=mean["error"], interval=tuple(mean["interval"]), details=details)

    return replace(
        result,
        measure="xsim error",
        lower_is_better=True,
        statistic="misses",
        languages={language: of(entry) for language, entry in result.languages.items()},
        groups={group: of(entry) for group, entry in result.groups.items()},
        average=of(result.average),
    )


class RetrievalEvaluator(EmbeddingEvaluator):
    """Retrieval accuracy during training, by language and direction, and a warning if the embeddings collapse.

    The metrics include ``unrelated_cosine``, the mean over the languages; the evaluator warns if it exceeds
    `COLLAPSED_COSINE`.

    Args:
        sets: Parallel sentences per language, from `load_parallel_folder`.
        language_embedding: A language embedding that is trained with the model; each text is then embedded with the
            vector of its language.
        **options: The other arguments of `EmbeddingEvaluator`.

    Relations: `sentence_transformers`' ``TranslationEvaluator`` measures one language and counts equal texts as hits.
    """

    kind = "retrieval"
    metric = "mean_accuracy"
    on_card = "_accuracy"

    def __init__(
        self, sets: Mapping[str, ParallelSet], *, language_embedding: LanguageEmbedding | None = None, **options: Any
    ) -> None:
        super().__init__(sets, **options)
        self.language_embedding = language_embedding

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics. ``unrelated_cosine`` is not measured if there are no unrelated sentences."""
        names = *(f"{one}_accuracy" for one in ("mean", *DIRECTIONS, *self.sets)), "unrelated_cosine"
        return tuple("_".join(filter(None, (self.name, name))) for name in names)

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model, and warn if its embeddings have collapsed."""
        metrics = super().__call__(model, output_path, epoch, steps)
        cosine = max((value for name, value in metrics.items() if name.endswith("unrelated_cosine")), default=0.0)
        if cosine > COLLAPSED_COSINE:
            logger.warning(
                "The embeddings have collapsed at step %d: unrelated sentences have a mean cosine of %.4f, but at most %g "
                "is expected. Stop the training, and train again from the original encoder with a lower learning rate or "
                "larger batches. `metaphrase diagnose` shows more.",
                steps,
                cosine,
                COLLAPSED_COSINE,
            )
        return metrics

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""
        embedding = self.language_embedding
        model_of = model if embedding is None else fold_languages(model, embedding)
        hits, cosine = find_translations(model_of, self.sets, **self.encoding)
        accuracies = {language: (float(one.mean()), float(other.mean())) for language, (one, other) in hits.items()}
        directions = np.mean(list(accuracies.values()), axis=0)
        scores = {"mean_accuracy": float(directions.mean())}
        scores |= {f"{key}_accuracy": float(value) for key, value in zip(DIRECTIONS, directions, strict=True)}
        scores |= {f"{language}_accuracy": sum(both) / 2 for language, both in accuracies.items()}
        return scores if cosine is None else scores | {"unrelated_cosine": cosine}
