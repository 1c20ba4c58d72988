"""The result of an evaluation, in one shape for all suites.

In JSON, every language, group and average has its ``n``, ``score`` and ``interval`` in percent. Suites add
keys at the same level: retrieval has ``source_to_target``, ``target_to_source`` and ``mean``, mining has
``precision`` and ``recall``. Languages also have the digest of their data, and the items that `compare` resamples.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metaphrase.evaluation.measures import MEASURES, Measure, ScoreOfSamples
from metaphrase.evaluation.significance import CONFIDENCE, cluster_interval, percentile_interval
from metaphrase.exceptions import DataError
from metaphrase.io.arguments import check_value, hints_of
from metaphrase.io.environment import versions


@dataclass(frozen=True)
class Measurement:
    """One score.

    Attributes:
        n: Number of items of a language, None if unknown; number of languages of a group or an average.
        score: The score in percent (correlations ×100).
        interval: 95 % bootstrap interval of the score in percent, if it was computed.
        sha256: Digest of the data, for a language.
        details: Further facts for JSON, among them the items that are resampled.
    """

    n: int | None
    score: float
    interval: tuple[float, float] | None = None
    sha256: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Dictionary for JSON; the details are at the same level as the other keys."""
        head: dict[str, Any] = {} if self.n is None else {"n": self.n}
        if self.sha256 is not None:
            head["sha256"] = self.sha256
        head["score"] = self.score
        if self.interval is not None:
            head["interval"] = list(self.interval)
        return head | dict(self.details)

    @classmethod
    def of_items(cls, item_n: NDArray[Any], sha256: str, **details: Any) -> Measurement:
        """The mean of the scores of items, which are resampled."""
        return cls(len(item_n), 100 * float(item_n.mean()), None, sha256, {"items": item_n.tolist(), **details})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Measurement:
        """Read what `to_dict` returned."""
        details = {key: value for key, value in content.items() if key not in ("n", "sha256", "score", "interval")}
        interval = tuple(content["interval"]) if content.get("interval") is not None else None
        return cls(content.get("n"), content["score"], interval, content.get("sha256"), details)


def mean_of(measurements: Sequence[Measurement], interval: tuple[float, float] | None = None) -> Measurement:
    """Unweighted mean over some languages."""
    return Measurement(len(measurements), float(np.mean([one.score for one in measurements])), interval)


def item_id(text: str) -> int:
    """Id of an item, the same in all languages and results, from what identifies it in the data."""
    return zlib.crc32(text.encode())


def item_ids(languages: Mapping[str, Measurement]) -> dict[str, list[int]] | None:
    """Ids of the items of each language, if languages share items, such as translations of one sentence.

    Raises:
        DataError: The ids are not those of the items.
    """
    ids = {language: one.details["item_ids"] for language, one in languages.items() if "item_ids" in one.details}
    if not ids or len(ids) < len(languages):
        return None
    for language, one in languages.items():
        numbers = ids[language] if isinstance(ids[language], list) else []
        if len(numbers) != one.n or not all(isinstance(number, int) for number in numbers):
            raise DataError(f"The ids of the items of {language!r} are damaged. Measure the model again.")
    return ids


def complete_groups(groups: Mapping[str, Sequence[str]], languages: Iterable[str]) -> dict[str, Sequence[str]]:
    """The groups with all their languages."""
    available = set(languages)
    return {group: members for group, members in groups.items() if available.issuperset(members)}


def conditions(start: float, resamples: int, seed: int, **settings: Any) -> dict[str, Any]:
    """Fields of a `Result`: its settings, including the bootstrap's, the versions, and the seconds since ``start``."""
    return {
        "settings": {**settings, "confidence": CONFIDENCE, "resamples": resamples, "seed": seed},
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 3),
    }


def with_intervals(
    statistic: str,
    languages: Mapping[str, Measurement],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Fields of a `Result` whose scores are resampled: the languages and their means, with bootstrap intervals.

    Groups with all their languages are averaged. The statistic is a `ScoreOfSamples`.
    """
    measure = MEASURES[statistic]
    assert isinstance(measure, ScoreOfSamples)
    items = {language: measure.items(one.details) for language, one in languages.items()}
    samples = {
        language: one_r for language, (one_r,) in measure.samples([items], resamples=resamples, seed=seed).items()
    }

    def mean(members: Iterable[str]) -> Measurement:
        chosen = sorted(members)
        ids = item_ids({member: languages[member] for member in chosen})
        if ids is None or len(chosen) == 1:
            interval = percentile_interval(np.mean([samples[member] for member in chosen], axis=0))
        else:
            scores = {member: items[member] for member in chosen}
            interval = cluster_interval(scores, ids, resamples=resamples, seed=seed)
        return mean_of([languages[member] for member in chosen], interval)

    return {
        "statistic": statistic,
        "lower_is_better": measure.lower_is_better,
        "languages": {
            language: replace(one, interval=percentile_interval(samples[language]))
            for language, one in languages.items()
        },
        "groups": {group: mean(members) for group, members in complete_groups(groups or {}, languages).items()},
        "average": mean(languages),
    }


@dataclass(frozen=True)
class Result:
    """Scores of one model on one benchmark, for every language.

    Attributes:
        suite: Name of the suite, such as ``"retrieval"``.
        model: Name of the model.
        measure: Name of the measure, such as ``"accuracy"``.
        languages: Scores per language.
        average: Unweighted mean over the languages.
        groups: Means over named sets of languages, or among a part of the candidates.
        statistic: Name of the measure in `MEASURES` that `compare` tests with; None if no items were kept.
        lower_is_better: Whether the scores are errors.
        protocol: How the scores were measured, in words.
        settings: Settings of the evaluation.
        versions: Versions of the packages.
        seconds: Duration.
        facts: Further facts for JSON, such as the training runs of a fine-tuned model.

    >>> english = Measurement(n=4, score=75.0, sha256="…", details={"items": [1, 1, 0, 1]})
    >>> result = Result("nli", "starter", "accuracy", {"en": english}, Measurement(1, 75.0), statistic="items")
    >>> Result.from_dict(result.to_dict()) == result
    True
    """

    suite: str
    model: str
    measure: str
    languages: Mapping[str, Measurement]
    average: Measurement
    groups: Mapping[str, Measurement] = field(default_factory=dict)
    statistic: str | None = None
    lower_is_better: bool = False
    protocol: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def statistic_measure(self) -> Measure:
        """The measure that `compare` tests with.

        Raises:
            DataError: The result keeps no items.
        """
        if self.statistic is None or not self.languages:
            raise DataError(f"The {self.suite} result of {self.model} keeps no items, so it cannot be compared.")
        if self.statistic not in MEASURES:
            raise DataError(
                f"The {self.suite} result of {self.model} has the unknown statistic {self.statistic!r}. Measure it "
                "again."
            )
        return MEASURES[self.statistic]

    def item_ids(self) -> dict[str, list[int]] | None:
        """Ids of the items of each language, if languages share items, such as translations of one sentence."""
        return item_ids(self.languages)

    def items(self, language: str) -> Any:
        """The items to resample for a language: their scores, or the counts that its score is computed from.

        Raises:
            DataError: The items are missing, damaged, or not as many as ``n``.
        """
        measure, one = self.statistic_measure(), self.languages[language]
        try:
            items = measure.items(one.details)
            if (size := measure.size(items)) == 0 or one.n not in (None, size):
                raise ValueError(size)
            return items
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(
                f"The {self.suite} result of {self.model} has no items for {language!r}, or damaged ones. Measure the model "
                "again to compare it."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Dictionary for JSON."""
        content = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "facts" or self.facts}
        for key in ("languages", "groups"):
            content[key] = {name: one.to_dict() for name, one in content[key].items()}
        return content | {"average": self.average.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Result:
        """Read what `to_dict` returned.

        Raises:
            DataError: A key is missing, or one that `compare` reads has a value of the wrong type.
        """
        try:
            known = {one.name: content[one.name] for one in fields(cls) if one.name in content}
            known |= {key: content[key] for key in _REQUIRED}
            for key in ("languages", "groups"):
                known[key] = {name: Measurement.from_dict(one) for name, one in known.get(key, {}).items()}
            result = cls(**known | {"average": Measurement.from_dict(known["average"])})
        except KeyError as error:
            raise DataError(f"This is not a result of `metaphrase evaluate`: the key {error} is missing.") from error
        except (TypeError, AttributeError) as error:
            raise DataError(f"This is not a result of `metaphrase evaluate`: {error}.") from error
        for part in (result, result.average, *result.languages.values(), *result.groups.values()):
            for name, hint in hints_of(type(part)).items():
                if name in _COMPARED:
                    check_value(getattr(part, name), hint, f"{name!r} of a result", DataError)
        return result


_COMPARED = {"suite", "measure", "statistic", "lower_is_better", "settings", "n", "score"}
_REQUIRED = ("suite", "model", "measure", "languages", "average", "statistic", "lower_is_better")
