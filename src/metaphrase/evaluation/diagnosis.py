"""Diagnosis of an encoder, and of a corpus by means of the encoder.

`diagnose` embeds a sample of a corpus and detects embeddings that have collapsed, are NaN or infinite, or did not change
during training; sides that are not translations of each other, or are shifted; a better pooling mode; and frequent words
whose states do not find their translation. The sample consists of blocks of neighbouring pairs, in the order of the file,
because shifts are only visible among neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu
from sentence_transformers import SentenceTransformer

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.aligners.span import bare_span
from metaphrase.corpus.checks import Finding, by_severity, shift_finding
from metaphrase.corpus.identification import language_name
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.corpus.shifts import find_shift
from metaphrase.corpus.words import Words
from metaphrase.encoders.loading import pooling_of
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.encoding import prepare
from metaphrase.evaluation.geometry import geometry, hubs, language_identification
from metaphrase.evaluation.retrieval import COLLAPSED_COSINE, retrieval_hits
from metaphrase.evaluation.significance import (
    RESAMPLES,
    bootstrap_interval,
    percentile_interval,
    resampled_means,
    two_sided_p_value,
    verdict,
)
from metaphrase.evaluation.similarity_structure import kept_structure
from metaphrase.io.arguments import Count, Range, Seed, checked
from metaphrase.io.counts import counted
from metaphrase.io.files import UDHR
from metaphrase.io.progress import Advance
from metaphrase.mining.search import first_occurrences
from metaphrase.modeling.bulk import encode, is_text_transformer

SAMPLE = 2000
#: Number of neighbouring pairs in a block of the sample.
BLOCK = 100
#: Embeddings have collapsed below this effective rank, or above `COLLAPSED_COSINE`.
COLLAPSED_RANK = 2.0
#: They are concentrated above this mean cosine, or above this share of variance of the first component.
CROWDED_COSINE, CROWDED_SHARE = 0.95, 0.5
#: With fewer different sentences, the embeddings of a sound model have as few dimensions as collapsed ones: it is not judged.
FEWEST = 20
#: Mean distance (1 − cosine) to the embeddings of the baseline below which a model is unchanged, or hardly changed.
UNCHANGED, HARDLY_CHANGED = 1e-6, 1e-4
#: Share of pairs that are closer than a random pair; chance is one half. Below the first value the sides are not
#: translations. A model can judge this if it reaches the second value on known translations.
UNPAIRED, FIT = 0.6, 0.8
#: Another pooling mode is reported if it is significantly better, by at least this number of points; maximum number of
#: pairs.
POOLING_GAIN, POOLING_PAIRS = 5.0, 400
#: Number of pairs whose words are aligned, minimum number of occurrences of a word, number of words in a table, and share
#: of the occurrences of a word that must have a link.
WORD_PAIRS, WORD_COUNT, WORDS_SHOWN, LINKED = 400, 5, 15, 0.5
#: Number of hubs of a language that are listed.
HUBS_SHOWN = 3

Embeddings = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True)
class Diagnosis:
    """Findings and the measurements that they are based on.

    Attributes:
        findings: Errors first.
        languages: For each language ``pairs``, ``accuracy`` (percent, mean of both directions) with ``interval``, mean
            cosines of pairs (``pairs_cosine``) and of random pairs (``random_cosine``), and ``closer``, the share of pairs
            that are closer than a random pair; ``hubness``, the skewness of how often a target is among the nearest of a
            source, and ``hubs``, the targets that are most often (``text``, ``count``).
        geometry: ``mean_cosine`` of random sentences, ``first_component`` and ``first_ten`` (shares of variance),
            ``effective_rank``, ``isotropy`` and ``dimensions``; with a baseline the mean ``distance`` to its embeddings, and
            ``structure``, see :func:`metaphrase.evaluation.similarity_structure.kept_structure`.
        language_identification: How well a linear probe tells the languages apart, see
            :func:`metaphrase.evaluation.geometry.language_identification`.
        pooling: Accuracy in percent of each tested pooling mode, the model's first.
        words: For each language the frequent words that find their translation least often: ``word``, ``count``,
            ``linked`` (share), ``score`` (mean score of the links) and ``translation`` (the word that it is
            linked to most often).
    """

    findings: list[Finding] = field(default_factory=list)
    languages: dict[str, dict[str, Any]] = field(default_factory=dict)
    geometry: dict[str, float] = field(default_factory=dict)
    language_identification: dict[str, float] = field(default_factory=dict)
    pooling: dict[str, float] = field(default_factory=dict)
    words: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@checked
def diagnose(
    model: SentenceTransformer,
    sets: Mapping[str, ParallelSet],
    *,
    baseline: SentenceTransformer | None = None,
    target_lang: str = "en",
    sample: Annotated[int, Range(2, 2**31 - 1)] = SAMPLE,
    batch_size: Count = 64,
    seed: Seed = 0,
    advance: Advance = lambda n: None,
) -> Diagnosis:
    """Diagnose a model on a corpus.

    Args:
        model: The model. Its stored query prompt, if any, precedes each sentence.
        sets: The pairs of each source language, in the order of the files.
        baseline: The model before training. It is compared with the prompt of ``model``.
        target_lang: Language of the targets.
        sample: Maximum number of pairs of a language.
        batch_size: Number of pairs per batch of the word aligner.
        seed: Seed of the sample.
        advance: Called with the number of newly embedded sentences, out of `sentences_to_embed`.
    """
    chosen = {language: sample_blocks(pairs, sample, seed) for language, pairs in sets.items()}
    embedded = {language: _embed(model, pairs, advance) for language, (pairs, _) in chosen.items()}
    all_nh = np.concatenate([side_nh for sides in embedded.values() for side_nh in sides])
    if bad := int(np.count_nonzero(~np.isfinite(all_nh).all(axis=1))):
        message = f"{bad:,} of {len(all_nh):,} embeddings are NaN or infinite. Resume from an earlier checkpoint."
        return Diagnosis([Finding("error", "not-finite", message, count=bad, of=len(all_nh))])
    result = Diagnosis(geometry=geometry(all_nh))
    texts = len({text for pairs, _ in chosen.values() for side in (pairs.sources, pairs.targets) for text in side})
    findings = collapse(result.geometry) if texts >= FEWEST else []
    judged = texts >= FEWEST and not any(finding.severity == "error" for finding in findings)
    if baseline is not None:
        prompt = resolve_prompt(model, "auto")
        before = [side_nh for pairs, _ in chosen.values() for side_nh in _embed(baseline, pairs, advance, prompt)]
        findings += _compare(result.geometry, all_nh, np.concatenate(before))
        sources = [pairs.sources for pairs, _ in chosen.values()]
        after = [source_nh for source_nh, _ in embedded.values()]
        result.geometry["structure"] = kept_structure(sources, before[::2], after)
    if not judged:
        message = "The corpus was not checked, because the embeddings have collapsed."
        if texts < FEWEST:
            message = (
                f"The model was not checked, because the pairs have only {counted(texts, 'different sentence')}, fewer than "
                f"{FEWEST}. Pass more pairs, or a larger --sample."
            )
        findings.append(Finding("info", "not-measured", message))
    result.language_identification.update(language_identification(embeddings_by_language(embedded, target_lang)))
    for language, (part, row_n) in chosen.items():
        result.languages[language] = measure(embedded[language], seed) | hubs_of(part, embedded[language])
        if judged:
            findings += _paired(model, sets[language], result.languages[language], embedded[language], row_n)
    if judged and is_text_transformer(model):
        findings += _pooling(model, {language: pairs for language, (pairs, _) in chosen.items()}, result.pooling)
        for language, (pairs, _) in chosen.items():
            result.words[language], finding = under_aligned(model, pairs, target_lang, batch_size=batch_size)
            findings += [finding] if finding else []
    result.findings.extend(by_severity(findings))
    return result


def sentences_to_embed(sets: Mapping[str, ParallelSet], *, sample: int = SAMPLE, models: int = 1) -> int:
    """Number of sentences that `diagnose` embeds."""
    return sum(2 * models * min(sample, len(pairs.sources)) for pairs in sets.values())


def sample_blocks(pairs: ParallelSet, sample: int, seed: int = 0) -> tuple[ParallelSet, NDArray[np.integer]]:
    """A sample of pairs in blocks of `BLOCK` neighbours, in the order of the file.

    Returns the sample, and the position of each of its pairs in the file.
    """
    n = len(pairs.sources)
    if n <= sample:
        return pairs, np.arange(n)
    size = min(BLOCK, sample)
    blocks = np.random.default_rng(seed).choice(n // size, sample // size, replace=False)
    row_n = (np.sort(blocks)[:, None] * size + np.arange(size)).ravel()
    return pairs.rows(row_n), row_n


def _embed(model: SentenceTransformer, pairs: ParallelSet, advance: Advance, prompt: str = "auto") -> Embeddings:
    """Normalized embeddings of both sides."""
    prompt = resolve_prompt(model, prompt)
    source_nh, target_nh = (
        np.asarray(encode(model, side, prompt=prompt, normalize_embeddings=True, advance=advance), dtype=np.float32)
        for side in (pairs.sources, pairs.targets)
    )
    return source_nh, target_nh


# ------------------------------------------------------------------------------------------------------------ geometry


def collapse(facts: Mapping[str, float]) -> list[Finding]:
    """Findings about collapsed embeddings, from the facts of `geometry`."""
    where = (
        f"two random sentences have a cosine of {facts['mean_cosine']:.3f}, the first component explains "
        f"{facts['first_component']:.0%} of the variance, and the effective rank is {facts['effective_rank']:.1f} of "
        f"{facts['dimensions']:.0f}"
    )
    if facts["mean_cosine"] > COLLAPSED_COSINE or facts["effective_rank"] < COLLAPSED_RANK:
        message = (
            f"The embeddings have collapsed: {where}. Train again from the original encoder with a lower learning rate "
            "or larger batches."
        )
        return [Finding("error", "collapse", message)]
    if facts["mean_cosine"] > CROWDED_COSINE or facts["first_component"] > CROWDED_SHARE:
        message = (
            f"The embeddings are concentrated: {where}. If the original encoder's are not, lower the learning rate."
        )
        return [Finding("warning", "crowded", message)]
    return []


def _compare(facts: dict[str, float], new_nh: NDArray[np.float32], old_nh: NDArray[np.float32]) -> list[Finding]:
    """Findings about unchanged embeddings. Adds the mean ``distance`` to the facts."""
    if new_nh.shape != old_nh.shape:
        message = f"The baseline has {old_nh.shape[1]} dimensions, the model {new_nh.shape[1]}: they are not compared."
        return [Finding("info", "not-comparable", message)]
    facts["distance"] = float((1 - np.einsum("nh,nh->n", new_nh, old_nh, dtype=np.float64)).clip(min=0).mean())
    if facts["distance"] < UNCHANGED:
        message = (
            "The embeddings equal the baseline's: training changed nothing. Check that this is the folder of the "
            "trained model, that the learning rate is not 0, and that not all weights are frozen."
        )
        return [Finding("error", "unchanged", message)]
    if facts["distance"] < HARDLY_CHANGED:
        message = (
            f"The embeddings hardly differ from those of the baseline (mean 1 − cosine {facts['distance']:.1e}). Train "
            "longer, or with a higher learning rate."
        )
        return [Finding("warning", "hardly-changed", message)]
    return []


def embeddings_by_language(embedded: Mapping[str, Embeddings], target_lang: str) -> dict[str, NDArray[np.float32]]:
    """Embeddings of each language; the target language's are taken from all sets in turn."""
    targets = [target_nh for _, target_nh in embedded.values()]
    n = min(map(len, targets))
    mixed_nh = np.stack([targets[row % len(targets)][row] for row in range(n)])
    return {language: source_nh for language, (source_nh, _) in embedded.items()} | {target_lang: mixed_nh}


def hubs_of(pairs: ParallelSet, sides: Embeddings) -> dict[str, Any]:
    """``hubness`` of the targets for the sources, and the worst ``hubs``; copies of a target are one hub."""
    source_nh, target_nh = sides
    first_m = first_occurrences(pairs.targets)
    skewness, count_m = hubs(source_nh, target_nh[first_m])
    worst = np.argsort(-count_m, kind="stable")[:HUBS_SHOWN]
    rows = [{"text": pairs.targets[first_m[row]], "count": int(count_m[row])} for row in worst]
    return {"hubness": skewness, "hubs": rows}


# --------------------------------------------------------------------------------------------------------------- pairs


def measure(sides: Embeddings, seed: int = 0) -> dict[str, Any]:
    """Retrieval accuracy, and cosines of pairs and of random pairs; see `Diagnosis.languages`."""
    source_nh, target_nh = sides
    hits_n = np.mean(retrieval_hits(source_nh, target_nh), axis=0)
    pair_n = np.einsum("nh,nh->n", source_nh, target_nh)
    half = max(1, len(pair_n) // 2)
    random_n = np.einsum("nh,nh->n", source_nh, np.roll(target_nh, half, axis=0))
    return {
        "pairs": len(pair_n),
        "accuracy": 100 * float(hits_n.mean()),
        "interval": list(bootstrap_interval(hits_n, seed=seed)),
        "pairs_cosine": float(pair_n.mean()),
        "random_cosine": float(random_n.mean()),
        "closer": closer(pair_n, random_n),
    }


def closer(pair_n: NDArray[Any], random_n: NDArray[Any]) -> float:
    """Probability that the similarity of a pair exceeds that of a random pair; ties count half.

    >>> closer(np.array([0.9, 0.5]), np.array([0.1, 0.5]))
    0.875
    """
    return float(mannwhitneyu(pair_n, random_n, method="asymptotic").statistic) / (len(pair_n) * len(random_n))


def _paired(
    model: SentenceTransformer,
    pairs: ParallelSet,
    facts: Mapping[str, Any],
    sides: Embeddings,
    row_n: NDArray[np.integer],
) -> list[Finding]:
    """Findings about sides that are not translations of each other, row by row."""
    source_nh, target_nh = sides
    shift = find_shift(lambda at_r, below_r: np.einsum("rh,rh->r", source_nh[at_r], target_nh[below_r]), row_n)
    if shift is not None:
        some = f", in a sample of {len(row_n):,} pairs" if len(row_n) < len(pairs.sources) else ""
        return [shift_finding(pairs, shift, f"the model{some}")]
    if facts["closer"] >= UNPAIRED or facts["pairs"] < BLOCK // 2:
        return []
    fit = _fit(model, pairs.language)
    language, share = language_name(pairs.language), f"{facts['closer']:.0%}"
    measured = f"In {language} a pair is closer than a random pair in {share} of cases; chance is 50 %"
    if fit is not None and fit >= FIT:
        message = (
            f"The sides are not translations of each other. {measured}, but the model reaches {fit:.0%} on the Universal "
            "Declaration of Human Rights. Check whether one side was sorted or shuffled, or comes from another text."
        )
        return [Finding("error", "not-translations", message, pairs.language, of=facts["pairs"])]
    reason = "it is no better on known translations" if fit is not None else "no known translations are available"
    message = (
        f"{measured}. Either the sides are not translations of each other, or the model does not know the language "
        f"({reason}). Inspect some of the pairs."
    )
    return [Finding("warning", "not-translations", message, pairs.language, of=facts["pairs"])]


def _fit(model: SentenceTransformer, language: str) -> float | None:
    """``closer`` on the Universal Declaration of Human Rights; None if it lacks the language."""
    try:
        pairs = load_parallel_folder(UDHR, [language])[language]
    except FileNotFoundError:
        return None
    return float(measure(_embed(model, pairs, lambda n: None))["closer"])


# ------------------------------------------------------------------------------------------------------------- pooling


def _pooling(model: SentenceTransformer, sets: Mapping[str, ParallelSet], facts: dict[str, float]) -> list[Finding]:
    """Findings about a better pooling mode. Adds the accuracy of each mode to the facts."""
    stored = pooling_of(model)
    share = max(1, POOLING_PAIRS // max(len(sets), 1))
    hits: dict[str, NDArray[np.float64]] = {}
    for mode in dict.fromkeys((stored, "mean", "cls")):
        try:
            other = model if mode == stored else prepare(model, pooling=mode)
        except ValueError:  # no pooling to replace
            return []
        hits_n = []
        for pairs in sets.values():
            sides = _embed(other, pairs.rows(range(len(pairs.sources))[:share]), lambda n: None)
            if np.isfinite(sides).all():
                hits_n.append(np.mean(retrieval_hits(*sides), axis=0))
        hits[mode] = np.concatenate(hits_n) if hits_n else np.zeros(0)
    n = len(hits[stored])
    facts.update({mode: 100 * float(hits_n.mean()) for mode, hits_n in hits.items() if len(hits_n) == n and n})
    best = max(facts, key=lambda mode: facts[mode], default=stored)
    if best == stored:
        return []
    difference = facts[best] - facts[stored]
    difference_r = resampled_means({"": hits[best] - hits[stored]}, resamples=RESAMPLES, seed=0)
    if difference < POOLING_GAIN or verdict(difference, two_sided_p_value(difference_r)) != "better":
        return []
    low, high = percentile_interval(difference_r)
    message = (
        f"The model stores {stored} pooling, but {best} pooling finds {facts[best]:.1f} % of {n} translations and "
        f"{stored} pooling {facts[stored]:.1f} % ({difference:+.1f} points, {low:+.1f} to {high:+.1f}). The "
        f"stored pooling may be wrong. Load the model with pooling='{best}', and check which one it was trained with."
    )
    return [Finding("warning", "pooling", message, of=n)]


# --------------------------------------------------------------------------------------------------------------- words


def under_aligned(
    model: SentenceTransformer, pairs: ParallelSet, target_lang: str = "en", *, batch_size: int = 64
) -> tuple[list[dict[str, Any]], Finding | None]:
    """Find frequent source words whose states rarely find their translation.

    A word is linked to a word of the other side if they are mutual nearest neighbours, by the states of the aligner's
    layer.

    Returns rows as in `Diagnosis.words`, the least linked first, and a finding if one of them is linked in less than half
    of its occurrences.
    """
    language = pairs.language
    sides = [(language, pairs.sources[:WORD_PAIRS]), (target_lang, pairs.targets[:WORD_PAIRS])]
    try:
        sources, targets = (Words.of_texts(texts, of) for of, texts in sides)
    except ImportError as error:
        message = f"The words of {language_name(language)} were not checked. {error}"
        return [], Finding("info", "words-not-aligned", message, language)
    words = list(zip(sources, targets, strict=True))
    counts: Counter[str] = Counter()
    links: dict[str, list[tuple[str, float]]] = defaultdict(list)  # mutual nearest neighbours: at most one for a word
    alignments = EmbeddingAligner(model, method="argmax", level="word", batch_size=batch_size).align(words)
    for (source, target), alignment in zip(words, alignments, strict=True):
        source_words, target_words = list(map(_bare, source)), list(map(_bare, target))
        counts.update(filter(None, source_words))
        for (i, j), score in zip(alignment.links, alignment.scores, strict=True):
            links[source_words[i]].append((target_words[j], score))
    rows: list[dict[str, Any]] = [
        {
            "word": word,
            "count": count,
            "linked": len(links[word]) / count,
            "score": float(np.mean([score for _, score in links[word]])) if links[word] else None,
            "translation": Counter(other for other, _ in links[word]).most_common(1)[0][0] if links[word] else None,
        }
        for word, count in counts.items()
        if count >= WORD_COUNT
    ]
    rows.sort(key=lambda row: (row["linked"], -row["count"]))
    weak = [row for row in rows if row["linked"] < LINKED]
    if not weak:
        return rows[:WORDS_SHOWN], None
    message = (
        f"{len(weak)} of {len(rows)} frequent words of {language_name(language)} find their translation in less than half "
        f"of their occurrences: {', '.join(row['word'] for row in weak[:5])}. This is common for function "
        "words. For content words, train with a word objective."
    )
    return rows[:WORDS_SHOWN], Finding("info", "under-aligned-words", message, language, len(weak), len(rows))


def _bare(word: str) -> str:
    """Lower-case word without punctuation; empty if it has no letters."""
    word = word[slice(*bare_span(word, (0, len(word))))].casefold()
    return word if any(map(str.isalpha, word)) else ""
