"""Analyses of an encoder for a report: maps of words, alignments, margins, retrieval errors, geometry, and answers.

Each analysis returns data for JSON; `metaphrase.publishing.plots` draws it.

Shapes: ``n`` sentences or words, ``s`` and ``t`` words of a source and a target, ``k`` neighbours, ``h`` hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from torch.nn import functional as F

from metaphrase.aligners.embedding import EmbeddingAligner, link_units
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.corpus.words import Words, are_tokenised, segmenter_of_text
from metaphrase.evaluation.diagnosis import embeddings_by_language, hubs_of
from metaphrase.evaluation.geometry import isotropy, language_identification
from metaphrase.evaluation.similarity_structure import kept_structure
from metaphrase.exceptions import DataError, DataMismatchError, UsageError
from metaphrase.io.environment import install_command
from metaphrase.io.files import read_json
from metaphrase.io.work_folders import damage_in
from metaphrase.mining.margins import margin_score, neighbour_scores
from metaphrase.mining.search import nearest_neighbours, unit_rows

logger = logging.getLogger(__name__)


#: Models of a report, in order.
SIDES = ("before", "after")
#: Neighbours that define a margin, as in mining.
MARGIN_NEIGHBOURS = 4
#: Neighbours of a word whose languages are counted.
WORD_NEIGHBOURS = 10
#: Smallest and largest number of words per side of an alignment matrix.
_MATRIX_WORDS = (4, 9)
_BINS = 40
#: Result of `metaphrase evaluate` that has the table of question and answer languages.
ANSWERS = "xquad-r mAP in one language"

Embedded = Mapping[str, Mapping[str, tuple[NDArray[Any], NDArray[Any]]]]


# --------------------------------------------------------------------------------------------------------------- words


def word_states(model: SentenceTransformer, sentences: Sequence[Words]) -> list[tuple[list[int], NDArray[np.float32]]]:
    """States of words in the last layer of an encoder: each the mean over the states of its pieces.

    Returns for each sentence the indices of the words that have states (truncation may remove some), and their states.
    """
    aligner = EmbeddingAligner(model, layer=model[0].auto_model.config.num_hidden_layers, level="word")
    return [(words, states_nh.float().cpu().numpy()) for words, states_nh in aligner.word_states(sentences)]


def splitter(side: Sequence[str], language: str) -> Callable[[str], Words | None]:
    """Return a function that splits the texts of one side of a test set into words.

    It returns None if the language is written without spaces and ICU is not installed.
    """
    try:
        tokenised = are_tokenised(side, language)
    except ImportError:
        logger.info("Splitting %s into words requires ICU: %s.", language, install_command("align"))
        return lambda text: None
    return lambda text: Words.of(text, language, segmenter_of_text(text, language, tokenised))


def sample_words(sets: Mapping[str, ParallelSet], limit: int = 100) -> list[tuple[str, Words, list[int]]]:
    """Sample the words of a map from the first translation pairs of each language; English words come from all of them.

    Words without a letter and repeated spellings are skipped. Returns language, sentence and indices of words.
    """
    sample: list[tuple[str, Words, list[int]]] = []
    for side in ("sources", "targets"):
        seen: set[str] = set()
        for language, data in sets.items():
            spoken = TARGET_LANGUAGE if side == "targets" else language
            room = limit if side == "sources" else -(-limit // len(sets))
            seen = seen if side == "targets" else set()
            split = splitter(getattr(data, side), spoken)
            for text in getattr(data, side):
                words = split(text)
                if room <= 0 or words is None:
                    break
                chosen: list[int] = []
                for at, word in enumerate(words):
                    if any(map(str.isalpha, word)) and word.casefold() not in seen and len(chosen) < room:
                        seen.add(word.casefold())
                        chosen.append(at)
                if chosen:
                    room -= len(chosen)
                    sample.append((spoken, words, chosen))
    return sample


def token_map(states_nh: NDArray[Any], languages: Sequence[str]) -> dict[str, Any]:
    """Two projections of word states onto a plane, and a measure of how separate the languages are.

    Returns ``pca`` and ``tsne``, a point per word; ``explained``, the share of the variance on each axis of the PCA;
    ``own_language``, the share of the nearest words by cosine that are in the same language, in percent.

    Reference: Li et al. 2023 (DAP), figure 1 (PCA); Miao et al. 2024 (WACSE), figure 1 (t-SNE).
    """
    unit_nh = unit_rows(states_nh)
    pca = PCA(2, svd_solver="full")
    tsne = TSNE(
        perplexity=min(30.0, (len(unit_nh) - 1) / 3),
        init="pca" if np.ptp(unit_nh, axis=0).any() else "random",
        random_state=0,
    )
    with np.errstate(invalid="ignore"):  # equal rows have no variance
        pca_n2 = pca.fit_transform(unit_nh.astype(np.float64))
    return {
        "pca": _rounded(pca_n2),
        "explained": np.nan_to_num(pca.explained_variance_ratio_).tolist(),
        "tsne": _rounded(tsne.fit_transform(unit_nh)),
        "own_language": own_language_share(unit_nh, languages),
    }


def own_language_share(unit_nh: NDArray[np.float32], languages: Sequence[str], k: int = WORD_NEIGHBOURS) -> float:
    """Share of a word's ``k`` nearest other words that are in its own language, in percent, as a mean over the words.

    >>> own_language_share(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), ["sw", "sw", "en", "en"], k=1)
    100.0
    """
    similarity_nn = unit_nh @ unit_nh.T
    np.fill_diagonal(similarity_nn, -np.inf)
    nearest_nk = np.argsort(-similarity_nn, axis=1, kind="stable")[:, : min(k, len(unit_nh) - 1)]
    language_n = np.asarray(languages)
    return 100 * float(np.mean(language_n[nearest_nk] == language_n[:, None]))


def expected_share(languages: Sequence[str]) -> float:
    """Expected `own_language_share` if the position of a word did not depend on its language."""
    counts_l = np.unique(languages, return_counts=True)[1]
    return 100 * float(np.sum(counts_l * (counts_l - 1)) / (len(languages) * (len(languages) - 1)))


def choose_pairs(
    sets: Mapping[str, ParallelSet], chosen: Sequence[str] = ()
) -> list[tuple[str, int, tuple[Words, Words]]]:
    """Select the pairs whose alignment is drawn.

    Pairs are given as ``language:number``, counted from 1. By default, it is the first pair of each language with four to
    nine words per side, all of which have a letter.
    """
    pairs = []
    for name in chosen:
        language, _, number = name.partition(":")
        if language not in sets or not number.isdecimal() or not 1 <= int(number) <= len(sets[language].sources):
            raise UsageError(
                f"A pair is given as language:number, such as {next(iter(sets))}:1, with one of the languages "
                f"{', '.join(sets)} and a number in its test set; got {name!r}."
            )
        pairs.append((language, int(number)))
    if not chosen:
        pairs = [(language, at) for language, data in sets.items() if (at := _first_short_pair(data)) is not None]
    drawn = []
    for language, at in pairs:
        sides = (sets[language].sources, language), (sets[language].targets, TARGET_LANGUAGE)
        source, target = (splitter(texts, of)(texts[at - 1]) for texts, of in sides)
        if source is not None and target is not None:
            drawn.append((language, at, (source, target)))
    return drawn


def _first_short_pair(data: ParallelSet) -> int | None:
    low, high = _MATRIX_WORDS
    split = splitter(data.sources, data.language)
    for at, (source, target) in enumerate(zip(data.sources, data.targets, strict=True), 1):
        if low <= len(target.split()) <= high and source != target:
            words = split(source)
            if words is None:
                return None
            if low <= len(words) <= high and all(any(map(str.isalpha, word)) for word in words):
                return at
    return None


def alignment_matrix(
    source_model: SentenceTransformer, target_model: SentenceTransformer, pair: tuple[Words, Words]
) -> dict[str, Any]:
    """Cosines between the words of a pair, and the links of `EmbeddingAligner` between words.

    States come from the aligner's default layer, at two thirds of the encoder's depth.

    Returns ``source``, ``target`` (words), ``layer``, ``cosine`` (a row per source word) and ``links``.
    """
    aligners = [EmbeddingAligner(model, level="word") for model in (source_model, target_model)]
    states, texts = [], []
    for aligner, words in zip(aligners, pair, strict=True):
        ((indices, states_nh),) = aligner.word_states([words])
        spelled = list(words)
        states.append(F.normalize(states_nh.float().cpu(), dim=-1))
        texts.append([spelled[index] for index in indices])
    (links,) = link_units([states[0]], [states[1]], aligners[0].rule)
    return {
        "source": texts[0],
        "target": texts[1],
        "layer": aligners[0].layer,
        "cosine": [[round(value, 4) for value in row] for row in (states[0] @ states[1].T).tolist()],
        "links": sorted([s, t] for s, t in links),
    }


# ----------------------------------------------------------------------------------------------------------- sentences


def margins(source_nh: NDArray[Any], target_nh: NDArray[Any], data: ParallelSet) -> tuple[NDArray, NDArray]:
    """Ratio margins of translation pairs, and of each source with the best target that is not its translation.

    Copies of the source or of its translation are not wrong targets. A source without a wrong target has ``-inf``.

    Reference: Artetxe and Schwenk 2019, section 3.1.
    """
    source_nh, target_nh = unit_rows(source_nh), unit_rows(target_nh)
    forward = nearest_neighbours(source_nh, target_nh, MARGIN_NEIGHBOURS)
    backward = nearest_neighbours(target_nh, source_nh, MARGIN_NEIGHBOURS)
    pair_n = margin_score(np.einsum("nh,nh->n", source_nh, target_nh), forward.mean_q, backward.mean_q)
    other_nk = neighbour_scores(forward, backward)
    sources, targets = (np.array(side, dtype=object) for side in (data.sources, data.targets))
    same_nk = (targets[forward.row_qk] == targets[:, None]) | (sources[forward.row_qk] == sources[:, None])
    best_n = np.where(same_nk, -np.inf, other_nk).max(axis=1)
    return pair_n.astype(np.float64), best_n.astype(np.float64)


def margin_histogram(margins_of: Mapping[str, tuple[NDArray, NDArray]]) -> dict[str, Any]:
    """Histograms of margins: translations and wrong targets share bins; each side has separate bins.

    Training can multiply the spread of margins by ten; with common bins, one side would consist of a few bars.

    ``overlap`` is the share of sources, in percent, whose best wrong target has at least the margin of the translation. The
    sources that have a wrong target on all sides are counted, ``n``; without any, nothing is returned.
    """
    counted_n = np.all([np.isfinite(other_n) for _, other_n in margins_of.values()], axis=0)
    if not counted_n.any():
        return {}
    sides: dict[str, Any] = {}
    for side, both in margins_of.items():
        pair_n, other_n = (one_n[counted_n] for one_n in both)
        low, high = np.quantile(np.concatenate([pair_n, other_n]), [0.001, 0.999])
        edges = np.linspace(low, max(high, low + 1e-6), _BINS + 1)
        sides[side] = {
            "edges": edges.tolist(),
            "translations": np.histogram(np.clip(pair_n, edges[0], edges[-1]), edges)[0].tolist(),
            "others": np.histogram(np.clip(other_n, edges[0], edges[-1]), edges)[0].tolist(),
            "translation_median": float(np.median(pair_n)),
            "other_median": float(np.median(other_n)),
            "overlap": 100 * float(np.mean(other_n >= pair_n)),
        }
    return {"neighbours": MARGIN_NEIGHBOURS, "n": int(counted_n.sum()), **sides}


def nearest_targets(source_nh: NDArray[Any], target_nh: NDArray[Any]) -> dict[str, NDArray]:
    """The nearest target of each source by cosine, its cosine, and the translation's cosine, shape ``(n,)`` each."""
    source_nh, target_nh = unit_rows(source_nh), unit_rows(target_nh)
    neighbours = nearest_neighbours(source_nh, target_nh, 1)
    right_n = np.einsum("nh,nh->n", source_nh, target_nh)
    return {"row": neighbours.row_qk[:, 0], "cosine": neighbours.similarity_qk[:, 0], "right": right_n}


def nearest_errors(
    sets: Mapping[str, ParallelSet], nearest: Mapping[str, Mapping[str, Mapping[str, NDArray]]], *, limit: int = 12
) -> dict[str, Any]:
    """List retrieval errors: sentences whose nearest English sentence is not their translation.

    The lists are ``wrong`` after training, and with a baseline ``fixed`` (wrong before, right after) and ``broken`` (right
    before, wrong after), with the largest gap between both cosines first, and ``counts`` of each. Languages take turns; if
    one has fewer errors than its share, the others have more.
    """
    lists: dict[str, dict[str, list[dict[str, Any]]]] = {"wrong": {}, "fixed": {}, "broken": {}}
    for language, data in sets.items():
        sides = nearest[language]
        wrong_n = {
            side: np.array([data.targets[row] != right for row, right in zip(one["row"], data.targets, strict=True)])
            for side, one in sides.items()
        }
        groups = {"wrong": wrong_n["after"]}
        if "before" in sides:
            groups["fixed"] = wrong_n["before"] & ~wrong_n["after"]
            groups["broken"] = ~wrong_n["before"] & wrong_n["after"]
        for kind, chosen_n in groups.items():
            judged = sides["before" if kind == "fixed" else "after"]
            gap_n = judged["cosine"] - judged["right"]
            rows = sorted(np.flatnonzero(chosen_n).tolist(), key=lambda at: -gap_n[at])
            lists[kind][language] = [_error(data, at, sides) for at in rows]
    errors: dict[str, Any] = {
        "counts": {kind: sum(map(len, by_language.values())) for kind, by_language in lists.items() if by_language},
        "pairs": sum(len(data.sources) for data in sets.values()),
    }
    for kind, by_language in lists.items():
        if by_language:
            ranked = list(by_language.values())
            turns = sorted((rank, at) for at, rows in enumerate(ranked) for rank in range(len(rows)))[:limit]
            errors[kind] = [ranked[at][rank] for at, rank in sorted((at, rank) for rank, at in turns)]
    return errors


def _error(data: ParallelSet, at: int, sides: Mapping[str, Mapping[str, NDArray]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "language": data.language,
        "number": at + 1,
        "source": data.sources[at],
        "right": data.targets[at],
    }
    for side, one in sides.items():
        row[side] = {
            "found": data.targets[one["row"][at]],
            "found_cosine": round(float(one["cosine"][at]), 4),
            "right_cosine": round(float(one["right"][at]), 4),
        }
    return row


def _rounded(points_n2: NDArray[Any]) -> list[list[float]]:
    return [[float(f"{value:.5g}") for value in point] for point in points_n2.tolist()]


# ----------------------------------------------------------------------------------------------------------- languages


def geometry_of(embedded: Embedded, sets: Mapping[str, ParallelSet]) -> dict[str, dict[str, Any]]:
    """Geometry of each side of a report, as `metaphrase diagnose` measures it.

    Returns for each side ``language``, the accuracy of a linear probe of the language, with ``chance``; ``isotropy``;
    ``hubness``, the mean skewness over the languages, with the worst ``hub`` and its ``hub_count``; and after training
    ``structure``, the mean Spearman correlation ×100 of the similarities within each language with those before.
    """
    facts: dict[str, dict[str, Any]] = {}
    for side in next(iter(embedded.values())):
        pairs = {code: (unit_rows(sides[side][0]), unit_rows(sides[side][1])) for code, sides in embedded.items()}
        probe = language_identification(embeddings_by_language(pairs, TARGET_LANGUAGE))
        hubs = [hubs_of(sets[code], both) for code, both in pairs.items()]
        worst = max((one["hubs"][0] for one in hubs), key=lambda hub: hub["count"])
        facts[side] = {
            "language": probe.get("accuracy"),
            "chance": probe.get("chance"),
            "isotropy": isotropy(np.concatenate([rows_nh for both in pairs.values() for rows_nh in both])),
            "hubness": float(np.mean([one["hubness"] for one in hubs])),
            "hub": worst["text"],
            "hub_count": worst["count"],
        }
    if "before" in facts:
        before, after = ([sides[side][0] for sides in embedded.values()] for side in SIDES)
        facts["after"]["structure"] = kept_structure([sets[code].sources for code in embedded], before, after)
    return facts


def read_answers(path: str | Path, after: Collection[str], before: Collection[str]) -> dict[str, Any]:
    """The table of question and answer languages in the output of `metaphrase evaluate`, of the model and its baseline.

    Args:
        path: The JSON file. Of the results of several encoders, those of the model are read.
        after: The `model_hash` of the model; the results of other encoders are refused.
        before: That of the baseline, or nothing without one; the table of another baseline is omitted.

    Returns:
        ``languages``, and a matrix of mAP in percent for ``after`` and, with a baseline, ``before``: a row for each language
        of the questions, a column for each language of the candidates.

    Raises:
        DataError: The file has no answer retrieval.
        DataMismatchError: The results are those of another encoder.
    """
    with damage_in(path):
        content = read_json(path)
        models = content.get("models", [content])
        fitting = [one for one in models if one.get("model_hash") in (None, *after)]
        if not fitting:
            measured = ", ".join(f"{one['model']} ({one['model_hash'][:8]})" for one in models)
            expected = ", ".join(one[:8] for one in after)
            raise DataMismatchError(
                f"{path} must have results of this model ({expected}), but has those of {measured}. Evaluate the model with "
                "its own settings: `metaphrase evaluate RUN --suite answer-retrieval --data FOLDER --output FILE`."
            )
        baseline: dict[str, Any] = (content.get("baseline") if before else None) or {}
        if baseline.get("model_hash") not in (None, *before):
            logger.warning("%s has another baseline, %s, whose answers are not shown.", path, baseline.get("model"))
            baseline = {}
        scores = {"before": baseline.get("scores", {}), "after": fitting[0]["scores"]}
        answers = {side: one[ANSWERS]["languages"] for side, one in scores.items() if ANSWERS in one}
        if "after" not in answers:
            raise DataError(f"{path} has no answer retrieval. Evaluate with --suite answer-retrieval or --suite all.")
        languages = list(answers["after"])
        tables = {
            side: [[one[asked]["answers"][answer] for answer in languages] for asked in languages]
            for side, one in answers.items()
        }
    return {"languages": languages, **tables}
