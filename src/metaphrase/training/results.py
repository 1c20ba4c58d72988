"""The result of a run, and the effects of training that it is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import Encoders
from metaphrase.evaluation.guards import AlphaCurve, Guard
from metaphrase.evaluation.retention import collapse_in_words, overall_verdict
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.training.baseline import Baseline, EvaluationSets, measure, measure_retention


@dataclass(frozen=True)
class RunResult:
    """The result of a training run. Its representation omits facts and measurements.

    Attributes:
        output: Folder of the release; with a language embedding, a release for each language in it.
        model: Name of the encoder that was trained.
        facts: Facts of the run, as in ``run.json``: recipe, corpus, files, steps, seconds, hardware, versions and log.
        before: Results before training, by test set.
        after: Results of the release, by test set.
        comparisons: Before and after compared, by test set.
        retention: Retention of languages that were not trained on, by test set.
        abilities: Retention of abilities other than retrieval of translations: rows of guards by their names.
        curve: Gain and cost by the weight of the trained encoder, if the weight was chosen.
        verdict: What the release is better and worse at than the encoder before, as one sentence.
        report: The HTML report; ``report.json`` is in the same folder. None without test sets.
        usage: Python that loads the release.
        pushed: Address of the commit on the Hub, if the release was pushed.
    """

    output: Path
    model: str
    facts: Mapping[str, Any] = field(repr=False)
    before: Mapping[str, Any] = field(default_factory=dict, repr=False)
    after: Mapping[str, Any] = field(default_factory=dict, repr=False)
    comparisons: Mapping[str, Any] = field(default_factory=dict, repr=False)
    retention: Mapping[str, Any] = field(default_factory=dict, repr=False)
    abilities: Mapping[str, Any] = field(default_factory=dict, repr=False)
    curve: AlphaCurve | None = field(default=None, repr=False)
    verdict: str = ""
    report: Path | None = None
    usage: str = ""
    pushed: str | None = None

    def add_to(self, card: AlignmentModelCardData) -> None:
        """Add what training changed to a model card."""
        for test, comparison in self.comparisons.items():
            card.add_comparison(test, comparison)
        for test, one in self.retention.items():
            card.add_retention(test, one)
        for ability, row in self.abilities.items():
            card.add_ability(ability, row)
        card.verdict = self.verdict

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data: the facts with ``output``, comparisons, retention, verdict and ``pushed``."""
        names = ("comparisons", "retention", "abilities", "verdict", "pushed")
        curve = None if self.curve is None else self.curve.to_dict()
        return {
            **self.facts,
            "output": str(self.output),
            **{name: getattr(self, name) for name in names},
            "curve": curve,
        }


def measure_effects(
    result: RunResult,
    model: Encoders,
    tests: EvaluationSets,
    baseline: Baseline,
    guards: Sequence[Guard],
    *,
    show_progress: bool = False,
) -> RunResult:
    """Measure a trained encoder on test sets, retention sets and guards, and compare it with the baseline."""
    before, name = baseline.trained, str(result.output)
    after = measure(model, tests.trained, name=name, show_progress=show_progress)
    comparisons = {test: compare(before[test], one) for test, one in after.items()}
    retained = measure_retention(model, tests, baseline, result.facts, name=name, show_progress=show_progress)
    abilities = {guard.name: guard.measure(model) for guard in guards}
    return replace(
        result,
        before=before,
        after=after,
        comparisons=comparisons,
        retention=retained,
        abilities=abilities,
        verdict=collapse_in_words(before, after) or overall_verdict(comparisons, retained, abilities),
    )
