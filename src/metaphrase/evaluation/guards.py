"""Guards: measurements that must not get worse while an encoder improves, and the choice of a task vector's weight.

A guard compares an encoder with the original one. A guard on labelled data *holds* unless the encoder is significantly
worse in the mean over languages (:mod:`metaphrase.evaluation.compare`). Similarity structure, which needs no labels, holds if
its whole interval lies above a red line.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, Unpack

from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.prompts import USES, resolve_prompt
from metaphrase.evaluation.compare import compare, difference_shown, red_line_verdict
from metaphrase.evaluation.encoding import CachedEncoder, EncodingOptions, encode_texts
from metaphrase.evaluation.evaluator import RecordedEvaluator
from metaphrase.evaluation.guard_data import LabelledData
from metaphrase.evaluation.similarity_structure import similarity_structure
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import AtLeast0, checked
from metaphrase.merging.projection import find_projection

#: Largest loss of similarity structure, in points of correlation ×100. In our measurements of encoders that were trained on a
#: bitext, a loss of four points went with a loss of one point on STS-B (Spearman ×100).
MAX_STRUCTURE_LOSS = 4.0
#: Weights that `choose_alpha` tries.
ALPHAS = tuple(at / 10 for at in range(11))
STRUCTURE = "similarity structure"
RULE = (
    "An alpha is allowed if its guards hold and, for an alpha above 0, those of all smaller ones above 0. The chosen alpha "
    "has the largest gain on the development data among the allowed ones. If none of these gains anything, it is the one "
    "that loses least; without an allowed alpha, it is 0. A guard with labels holds unless its score is "
    f"significantly worse than the base's; {STRUCTURE}, compared without the directions that the encoder projects out, "
    "holds if its whole interval lies above a red line."
)


@dataclass(frozen=True)
class Guard:
    """A measurement of an encoder against the original.

    Attributes:
        name: Name of the data, or ``"similarity structure"``.
        measure: Takes an encoder and returns its ``before``, ``after``, ``difference`` and ``interval``, in percent and
            points, a ``verdict``, and whether it ``holds``.
        digests: Digests of labelled data by language.
    """

    name: str
    measure: Callable[[Any], dict[str, Any]]
    digests: Mapping[str, str | None] = field(default_factory=dict)


def metric_name(guard: str) -> str:
    """The metric of a guard during training.

    >>> metric_name("similarity structure")
    'guard_similarity_structure'
    """
    return f"guard_{guard.replace(' ', '_')}"


def check_guard_names(names: Iterable[str]) -> None:
    """Refuse guards, and data of the gain, with the same name: one result would replace the other."""
    names = list(names)
    if len(set(map(metric_name, names))) < len(names):
        raise UsageError(
            f"Results of guards and dev data are stored by name, but two have the same name: {', '.join(names)}. Rename one."
        )


def check_guard_folders(folders: Iterable[str], dev: str = "dev") -> None:
    """Refuse folders of --guard with the name of another one, of the dev data or of similarity structure."""
    check_guard_names([STRUCTURE, *(Path(folder).resolve().name for folder in (dev, *folders))])


class Change(Protocol):
    """A change of an encoder that can be applied to a degree, such as a `TaskVector` with a weight."""

    def apply(self, base: Any, alpha: Any, /) -> Any:
        """A changed copy of the encoder."""


@dataclass(frozen=True)
class AlphaCurve:
    """Gain and cost of a task vector at several weights.

    Attributes:
        alpha: The chosen weight. If none gains anything without a loss, the one that loses least among those whose guards
            hold; 0 if there is none.
        gain: Name of the data of the gain.
        points: For each weight its ``alpha``, its ``gain``, its ``guards`` by name, as `Guard.measure` returns them, and
            whether all of them ``hold``.
        gains: Whether the weight gains something, and all guards hold. The gain may be due to chance: its verdict is then
            ``"tie"``.
        rule: How the weight was chosen.
    """

    alpha: float
    gain: str
    points: list[dict[str, Any]]
    gains: bool = True
    rule: str = RULE

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain data."""
        return asdict(self)

    @property
    def chosen(self) -> dict[str, Any]:
        """The point of the chosen weight."""
        return next(point for point in self.points if point["alpha"] == self.alpha)

    def __str__(self) -> str:
        """The choice in words; if nothing can be gained without a loss, with gain and cost of each weight."""
        if not self.gains:
            why = "which loses least of those whose guards hold" if self.alpha else "the weights before training"
            return f"{self.without_gain()} The release has alpha {self.alpha:g}, {why}."
        choice = f"Alpha {self.alpha:g} was chosen: {changes_in_words(self.gain, self.chosen)}."
        return choice + chance_in_words(self.chosen)

    def without_gain(self) -> str:
        """Why nothing can be gained without a loss, with gain and cost of each weight, in words."""
        reason = f"no alpha gains anything on {self.gain}"
        gaining = [point["alpha"] for point in self.points if point["gain"]["difference"] > 0]
        broken = [point for point in self.points if not point["holds"] and (point["alpha"] or not any(gaining))]
        if gaining and broken:
            point = broken[0]
            lost = [name for name, row in point["guards"].items() if not row["holds"]]
            do = "this guard does" if len(lost) == 1 else "these guards do"
            reason = f"at alpha {point['alpha']:g}, {do} not hold: {', '.join(lost)}"
        frontier = "; ".join(
            f"alpha {point['alpha']:g}: {changes_in_words(self.gain, point)}" for point in self.points
        )
        return f"Nothing can be gained without a loss: {reason}. Gain and cost: {frontier}."


def chance_in_words(point: Mapping[str, Any]) -> str:
    """What to add to the gain of a chosen point if it is a tie."""
    return "" if point["gain"]["verdict"] == "better" else " This gain may be due to chance."


def changes_in_words(gain: str, point: Mapping[str, Any]) -> str:
    """The differences of a point of a curve, of the gain and the guards, with intervals, verdicts and limits."""
    return ", ".join(
        f"{name} {difference_shown(row)} {row['verdict']}"
        + (f" (limit {0 - row['limit']:g})" if "limit" in row else "")
        for name, row in {gain: point["gain"], **point["guards"]}.items()
    )


@checked
def data_guard(
    original: SentenceTransformer,
    data: LabelledData,
    *,
    prompts: Sequence[str | None] = (),
    **encoding: Unpack[EncodingOptions],
) -> Guard:
    """Create a guard on labelled data.

    Its rows also have the differences by ``languages`` and the number ``n`` of items.

    Args:
        original: The encoder that others are compared with. It is measured immediately, and may be trained afterwards.
        data: The data, see `load_guard_data`.
        prompts: Further prompts to measure the original with; the best result counts.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.
    """
    different: dict[tuple[str, ...], str | None] = {}
    for prompt in (encoding.get("prompt"), *prompts):
        different.setdefault(tuple(resolve_prompt(original, prompt, use) for use in USES), prompt)
    results = (data.evaluate(original, data.sets, **{**encoding, "prompt": one}) for one in different.values())
    before = max(results, key=lambda result: result.average.score)

    def measure(model: SentenceTransformer) -> dict[str, Any]:
        comparison = compare(before, data.evaluate(model, data.sets, **encoding))
        pooled: Mapping[str, Any] = comparison["pooled"]
        keys = ("before", "after", "difference", "interval", "verdict", "n", "clusters")
        return {
            **{key: pooled[key] for key in keys if key in pooled},
            "holds": pooled["verdict"] != "worse",
            "languages": {language: row["difference"] for language, row in comparison["languages"].items()},
        }

    return Guard(data.name, measure, {language: one.sha256 for language, one in before.languages.items()})


@checked
def structure_guard(
    original: SentenceTransformer,
    texts_by_language: Mapping[str, Sequence[str] | Mapping[str, Hashable]],
    *,
    max_loss: AtLeast0 = MAX_STRUCTURE_LOSS,
    **encoding: Unpack[EncodingOptions],
) -> Guard:
    """Create a guard on the similarities within each language; see `similarity_structure`.

    A debiased encoder is compared with the original without the same directions, so that the guard measures what training
    changed. In our measurements, removing directions lowers the structure but not the scores on STS-B.

    Its rows also have the differences by ``languages``, the number ``n`` of sentences, and the red line ``limit``.

    Args:
        original: The encoder that others are compared with. It encodes the texts immediately, and may be trained afterwards.
        texts_by_language: Monolingual sentences, such as `structure_texts`, see `similarity_structure`.
        max_loss: Largest loss that holds, in points of correlation ×100: the red line is at ``100 - max_loss``.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.
    """
    encoding["prompt"] = prompt = resolve_prompt(original, encoding.get("prompt"))
    cached = CachedEncoder(original)
    texts = list(dict.fromkeys(chain.from_iterable(texts_by_language.values())))
    size = original.truncate_dim
    with original.truncate_embeddings(None):  # directions are removed before embeddings are truncated
        cached.add(texts, prompt, encode_texts(original, texts, **encoding))

    def measure(model: SentenceTransformer) -> dict[str, Any]:
        removed = find_projection(model)

        def encode_original(texts: Sequence[str], **settings: Any) -> NDArray[Any]:
            rows_nh = cached.encode(texts, **settings)
            if removed is not None:
                rows_nh = rows_nh - (rows_nh @ removed[1].T.numpy()) @ removed[1].numpy()
            return rows_nh[:, :size]

        result = similarity_structure(cached, model, texts_by_language, encode_original=encode_original, **encoding)
        score, (low, high) = result.average.score, result.average.interval or (0.0, 100.0)
        verdict = red_line_verdict(low - 100, high - 100, limit=max_loss)
        return {
            "before": 100.0,
            "after": score,
            "difference": score - 100,
            "interval": [low - 100, high - 100],
            "verdict": verdict,
            "holds": verdict == "kept",
            "limit": max_loss,
            "n": sum(one.n or 0 for one in result.languages.values()),
            "languages": {language: one.score - 100 for language, one in result.languages.items()},
        }

    return Guard(STRUCTURE, measure)


class GuardEvaluator(RecordedEvaluator):
    """Guards during training: the metrics are the encoder's scores, ``guard_similarity_structure`` and e.g. ``guard_stsb``.

    They are fractions, like those of the other evaluators.

    Args:
        guards: Similarity structure and further guards, made with the encoder before training.
        **options: The other arguments of `RecordedEvaluator`.

    Raises:
        UsageError: Two guards have the same name.
    """

    kind = "guard"
    metric = metric_name(STRUCTURE)
    on_card = None  # the card has the guards of the release

    def __init__(self, guards: Sequence[Guard], **options: Any) -> None:
        super().__init__(**options)
        check_guard_names(one.name for one in guards)
        self.guards = {metric_name(one.name): one for one in guards}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return tuple(self.guards)

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""
        return {name: guard.measure(model)["after"] / 100 for name, guard in self.guards.items()}


def choose_alpha(
    base: SentenceTransformer,
    vector: Change,
    gain: Guard,
    guards: Sequence[Guard],
    *,
    alphas: Sequence[float] = ALPHAS,
    finish: Callable[[Any], Any] = lambda model: model,
    advance: Callable[[int], None] = lambda n: None,
    complete: bool = True,
) -> AlphaCurve:
    """Measure gain and cost of a task vector at several weights, and choose one by `RULE`.

    Args:
        base: The original encoder, with which the guards were made.
        vector: What training changed, or another change that can be applied to a degree.
        gain: Measurement that should improve.
        guards: Measurements that must not get worse.
        alphas: The weights.
        finish: Applied to a merged encoder before it is measured, as before its release; with weight 0 to the base.
        advance: Called with 1 after each weight.
        complete: Measure all weights. Otherwise, those after the first one above 0 whose guards do not hold are skipped,
            which does not change the choice.

    Raises:
        UsageError: Two measurements have the same name.
    """
    check_guard_names(one.name for one in (gain, *guards))
    points: list[dict[str, Any]] = []
    for alpha in sorted({0.0, *alphas}):
        model = finish(vector.apply(base, alpha) if alpha else base)
        rows = {guard.name: guard.measure(model) for guard in guards}
        holds = all(row["holds"] for row in rows.values())
        points.append({"alpha": alpha, "gain": gain.measure(model), "guards": rows, "holds": holds})
        advance(1)
        if alpha and not holds and not complete:
            break
    # `finish` may break a guard by itself, for example by removing directions: alpha 0 does not decide about the others.
    allowed = [*filter(itemgetter("holds"), points[:1]), *takewhile(itemgetter("holds"), points[1:])]
    best = max(allowed or points[:1], key=lambda point: point["gain"]["difference"])
    return AlphaCurve(best["alpha"], gain.name, points, gains=best["holds"] and best["gain"]["difference"] > 0)
