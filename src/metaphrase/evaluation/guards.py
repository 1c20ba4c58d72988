"""Guards: what must not be lost while an encoder improves, and the weight of a task vector chosen under them.

A guard compares an encoder with the original on data of its own. With labels, it *holds* unless the encoder is significantly
worse: unless the 95 % interval of the paired difference of the mean over the languages lies below zero. Similarity structure,
which needs no labels, holds if its whole interval lies above a red line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import CachedEncoder, EncodingOptions, encode_texts
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.similarity_structure import similarity_structure
from metaphrase.evaluation.sts import evaluate_sts, load_sts_folder
from metaphrase.exceptions import MissingFileError
from metaphrase.io.arguments import AtLeast0, Count, checked
from metaphrase.merging import TaskVector

#: Largest loss of similarity structure, in points of correlation ×100. In our measurements of encoders that were trained on a
#: bitext, a loss of four points went with a loss of one point on STS-B (Spearman ×100).
MAX_STRUCTURE_LOSS = 4.0
#: Weights that `choose_alpha` tries.
ALPHAS = tuple(at / 10 for at in range(11))
STRUCTURE = "similarity structure"
RULE = (
    "The chosen alpha has the largest gain on the development data among those whose guards hold, at this alpha and at all "
    "smaller ones; 0 if none gains anything. A guard with labels holds unless the 95 % interval of its difference to the "
    f"base lies below zero; {STRUCTURE} holds if its whole interval lies above its red line."
)


@dataclass(frozen=True)
class Guard:
    """A measurement of an encoder against the original.

    Attributes:
        name: Name of the data.
        measure: Takes an encoder and returns its ``before``, ``after``, ``difference`` and ``interval``, in percent and
            points, a ``verdict``, and whether it ``holds``.
    """

    name: str
    measure: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class AlphaCurve:
    """Gain and cost of a task vector by its weight.

    Attributes:
        alpha: The chosen weight.
        gain: Name of the data of the gain.
        points: For each weight its ``alpha``, its ``gain``, its ``guards`` by name, as `Guard.measure` returns them, and
            whether all of them ``hold``.
        rule: How the weight was chosen.
    """

    alpha: float
    gain: str
    points: list[dict[str, Any]]
    rule: str = RULE

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain data."""
        return asdict(self)

    @property
    def chosen(self) -> dict[str, Any]:
        """The point of the chosen weight."""
        return next(point for point in self.points if point["alpha"] == self.alpha)


@checked
def data_guard(
    original: SentenceTransformer, folder: str | Path, *, max_items: Count = 300, **encoding: Unpack[EncodingOptions]
) -> Guard:
    """A guard on a folder of STS data or of parallel sentences: their development split, or the files without a split.

    Args:
        original: The encoder that others are compared with.
        folder: ``xx-dev.csv[.gz]`` for STS, ``xx-en[.dev].tsv[.gz]`` for retrieval.
        max_items: Maximum number of pairs of a language, evenly spaced over its file.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.

    Raises:
        MissingFileError: The folder does not exist, or has no such files.
    """
    folder = Path(folder)
    sets: Mapping[str, Any]
    evaluate: Callable[..., Any]
    if any(folder.glob("*-dev.csv*")):
        sets, evaluate = load_sts_folder(folder, split="dev"), evaluate_sts
    elif any(folder.glob("*-en*.tsv*")):
        sets = load_parallel_folder(folder, split="dev" if any(folder.glob("*.dev.tsv*")) else None)
        evaluate = evaluate_retrieval
    else:
        raise MissingFileError(
            f"{folder} has no development data: neither STS pairs (de-dev.csv.gz) nor parallel sentences (de-en.dev.tsv.gz "
            "or de-en.tsv.gz). Name a folder of one of these."
        )
    sets = {language: _sample(one, max_items) for language, one in sets.items()}
    before = evaluate(original, sets, **encoding)

    def measure(model: SentenceTransformer) -> dict[str, Any]:
        after = before if model is original else evaluate(model, sets, **encoding)
        pooled = compare(before, after)["pooled"]
        row = {key: pooled[key] for key in ("before", "after", "difference", "interval", "verdict")}
        return row | {"holds": pooled["verdict"] != "worse"}

    return Guard(folder.resolve().name, measure)


@checked
def structure_guard(
    original: SentenceTransformer,
    texts_by_language: Mapping[str, Sequence[str]],
    *,
    max_loss: AtLeast0 = MAX_STRUCTURE_LOSS,
    **encoding: Unpack[EncodingOptions],
) -> Guard:
    """A guard on the similarities within each language; see `similarity_structure`.

    Its rows also have the scores by ``languages``, the number ``n`` of sentences, and the red line ``limit``.

    Args:
        original: The encoder that others are compared with. It is encoded at once, and may be trained afterwards.
        texts_by_language: Monolingual sentences, such as `structure_texts`.
        max_loss: Largest loss that holds, in points of correlation ×100: the red line is at ``100 - max_loss``.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.
    """
    encoding["prompt"] = prompt = resolve_prompt(original, encoding.get("prompt"))
    cached = CachedEncoder(original)
    texts = list(dict.fromkeys(chain.from_iterable(texts_by_language.values())))
    cached.add(texts, prompt, encode_texts(original, texts, **encoding))

    def measure(model: SentenceTransformer) -> dict[str, Any]:
        result = similarity_structure(
            cached,
            cached if model is original else model,
            texts_by_language,
            encode_original=cached.encode,
            **encoding,
        )
        score, (low, high) = result.average.score, result.average.interval or (0.0, 100.0)
        verdict = "kept" if low >= 100 - max_loss else "lost" if high < 100 - max_loss else "uncertain"
        return {
            "before": 100.0,
            "after": score,
            "difference": score - 100,
            "interval": [low - 100, high - 100],
            "verdict": verdict,
            "holds": verdict == "kept",
            "limit": max_loss,
            "n": sum(one.n or 0 for one in result.languages.values()),
            "languages": {language: one.score for language, one in result.languages.items()},
        }

    return Guard(STRUCTURE, measure)


def choose_alpha(
    base: SentenceTransformer,
    vector: TaskVector,
    gain: Guard,
    guards: Sequence[Guard],
    *,
    alphas: Sequence[float] = ALPHAS,
    advance: Callable[[int], None] = lambda n: None,
) -> AlphaCurve:
    """Measure gain and cost of a task vector at several weights, and choose one by `RULE`.

    Args:
        base: The original encoder, with which the guards were made.
        vector: What training changed.
        gain: What should improve.
        guards: What must not be lost.
        alphas: The weights.
        advance: Called with 1 after each weight.
    """
    points = []
    for alpha in sorted({0.0, *alphas}):
        model = vector.apply(base, alpha) if alpha else base
        rows = {guard.name: guard.measure(model) for guard in guards}
        holds = all(row["holds"] for row in rows.values())
        points.append({"alpha": alpha, "gain": gain.measure(model), "guards": rows, "holds": holds})
        advance(1)
    best = max(_holding(points), key=lambda point: point["gain"]["difference"])
    return AlphaCurve(best["alpha"], gain.name, points)


def _holding(points: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The base, and the points up to the first whose guards do not hold."""
    for point in points:
        if point["alpha"] and not point["holds"]:
            return
        yield point


def _sample(one: Any, size: int) -> Any:
    """Evenly spaced items of an `STSSet` or a `ParallelSet`."""
    names = ("sources", "targets") if isinstance(one, ParallelSet) else ("first", "second", "scores")
    n = len(getattr(one, names[0]))
    if n <= size:
        return one
    chosen = np.linspace(0, n - 1, size).round().astype(int)
    return replace(one, **{name: tuple(getattr(one, name)[at] for at in chosen) for name in names})
