import dataclasses

import numpy as np
import pytest
from scipy.stats import binomtest

from metaphrase.evaluation.compare import compare, verdict_shown
from metaphrase.evaluation.measures import FEWER_RESAMPLES, MEASURES
from metaphrase.evaluation.result import Measurement, Result
from metaphrase.evaluation.significance import (
    cluster_scores,
    holm,
    percentile_interval,
    resampled_means,
    sign_flip_p_value,
    two_sided_p_value,
)
from metaphrase.exceptions import DataError, DataMismatchError


def items_result(items, *, statistic="items", settings=None):
    """A result over single items; those of ``hits`` are the same in both directions."""

    def details(one):
        hits = "".join(map(str, one))
        return (
            {"items": one}
            if statistic in ("items", "shared_items")
            else {direction: {"hits": hits} for direction in ("source_to_target", "target_to_source")}
        )

    languages = {
        language: Measurement(len(one), 100 * float(np.mean(one)), None, f"digest of {language}", details(one))
        for language, one in items.items()
    }
    average = Measurement(len(languages), float(np.mean([one.score for one in languages.values()])))
    errors = statistic == "misses"
    return Result(
        "s", "m", "accuracy", languages, average, statistic=statistic, lower_is_better=errors, settings=settings or {}
    )


@pytest.fixture
def sides():
    rng = np.random.default_rng(0)
    before = {language: rng.integers(0, 2, n).tolist() for language, n in (("te", 60), ("sw", 45), ("vi", 80))}
    after = {
        language: [max(one, int(rng.random() < gain)) for one in before[language]]
        for language, gain in (("te", 0.5), ("sw", 0.0), ("vi", 0.3))
    }
    return before, after


@pytest.mark.parametrize("statistic", ["items", "hits"])
def test_rows_are_those_of_the_paired_bootstrap(sides, statistic):
    before, after = sides
    compared = compare(*(items_result(one, statistic=statistic) for one in sides), resamples=500, seed=3)
    gained = {language: np.subtract(after[language], before[language]) for language in after}
    drawn = {language: resampled_means({"": one}, resamples=500, seed=3) for language, one in gained.items()}
    p_values = {
        language: max(two_sided_p_value(one), sign_flip_p_value(gained[language])) for language, one in drawn.items()
    }
    adjusted = holm(p_values)
    assert list(compared["languages"]) == list(after)
    for language, one in gained.items():
        row = compared["languages"][language]
        assert row["difference"] == pytest.approx(100 * one.mean())
        assert row["interval"] == pytest.approx(percentile_interval(drawn[language]))
        assert (row["n"], row["p_value"], row["p_adjusted"]) == (len(one), p_values[language], adjusted[language])
        assert row["before"] == pytest.approx(100 * np.mean(before[language]))
        assert row["after"] == pytest.approx(100 * np.mean(after[language]))
    assert [row["verdict"] for row in compared["languages"].values()] == ["better", "tie", "better"]
    pooled = resampled_means(gained, resamples=500, seed=3)
    assert compared["pooled"]["difference"] == pytest.approx(100 * np.mean([one.mean() for one in gained.values()]))
    assert compared["pooled"]["interval"] == pytest.approx(percentile_interval(pooled))
    assert compared["pooled"]["p_value"] == two_sided_p_value(pooled)
    assert (compared["pooled"]["n"], compared["pooled"]["languages"]) == (185, 3)
    assert compared["settings"]["resamples"] == 500


def test_errors_mirror_hits(sides):
    hits, misses = (
        compare(*(items_result(one, statistic=statistic) for one in sides), resamples=300)
        for statistic in ("hits", "misses")
    )
    for language, row in misses["languages"].items():
        mirrored = hits["languages"][language]
        assert row["before"] == pytest.approx(100 - mirrored["before"])
        assert row["difference"] == pytest.approx(-mirrored["difference"])
        assert row["interval"] == pytest.approx([-end for end in mirrored["interval"][::-1]])
        assert (row["p_value"], row["verdict"]) == (mirrored["p_value"], mirrored["verdict"])


def test_dictionaries_and_results_are_the_same(sides):
    results = [items_result(one) for one in sides]
    assert compare(*(one.to_dict() for one in results), resamples=50) == compare(*results, resamples=50)


def test_the_baseline_may_have_more_languages(sides):
    before, after = sides
    assert list(compare(items_result(before), items_result({"sw": after["sw"]}), resamples=9)["languages"]) == ["sw"]
    with pytest.raises(DataMismatchError, match="baseline result lacks te, vi; it has sw"):
        compare(items_result({"sw": before["sw"]}), items_result(after))


def test_what_cannot_be_compared_is_refused(sides):
    before, after = (items_result(one) for one in sides)
    with pytest.raises(DataMismatchError, match="differ in statistic: 'hits' before, 'items' after"):
        compare(items_result(sides[0], statistic="hits"), after)
    changes = {"measure": "F1", "lower_is_better": True}
    for name, value in changes.items():
        with pytest.raises(DataMismatchError, match=f"The two results differ in {name}"):
            compare(dataclasses.replace(before, **{name: value}), after)
    for change in ({"statistic": None}, {"languages": {}}):
        with pytest.raises(DataError, match="keeps no items"):
            compare(before, dataclasses.replace(after, **change))
    other = dataclasses.replace(after.languages["sw"], sha256="other")
    with pytest.raises(DataMismatchError, match=r"'sw' are over different items \(45 before, 45 after\)"):
        compare(dataclasses.replace(before, languages={**before.languages, "sw": other}), after)
    for statistic, item in (("chunk_f1", [1, 2, 2]), ("items", 1)):
        unknown = [Measurement(None, 50.0, details={"items": [item] * n}) for n in (2, 3)]
        results = [Result("pos", "m", "f1", {"sw": one}, one, statistic=statistic) for one in unknown]
        with pytest.raises(DataMismatchError, match="'sw' must have the same items, but one has 2 and the other 3"):
            compare(*results, resamples=9)
    one, another = (items_result(sides[0], statistic="hits", settings={"margin_k": k}) for k in (None, 4))
    with pytest.raises(DataMismatchError, match="differ in margin_k: None before, 4 after"):
        compare(one, another)


DIRECTION = {"hits": "1101"}
ITEMS = {
    "hits": {"source_to_target": DIRECTION, "target_to_source": DIRECTION},
    "items": {"items": [1, 0, 1, 1]},
    "pairs_f1": {"sources": 4, "outcomes": {"a": "1 1 1", "b": "0 1 1"}},
    "spearman": {"scores": [1, 2, 3, 4], "cosines": [0.1, 0.3, 0.2, 0.9]},
    "chunk_f1": {"items": [[1, 2, 2]] * 4},
}


@pytest.mark.parametrize(
    ("statistic", "damage"),
    [
        ("hits", {"source_to_target": {"hits": "110"}}),
        ("hits", {"source_to_target": None}),
        ("items", {"items": [1, 0, 1]}),
        ("items", {"items": [1, 0, 1, float("nan")]}),
        ("items", {"items": [[1, 0], [1, 1], [0, 0], [1, 1]]}),
        ("items", {"items": None}),
        ("items", {"run_scores": None, "items": ["x", 0, 1, 1]}),
        ("items", {"run_scores": "75"}),
        ("items", {"run_scores": [float("nan")]}),
        ("pairs_f1", {"sources": 5}),
        ("pairs_f1", {"sources": None}),
        ("pairs_f1", {"outcomes": {"a": "1 1"}}),
        ("pairs_f1", {"outcomes": ["a"]}),
        ("spearman", {"cosines": [0.1, 0.3, 0.2]}),
        ("spearman", {"cosines": [0.1, 0.3, 0.2], "scores": [1, 2, 3]}),
        ("spearman", {"cosines": [0.1, 0.3, 0.2, float("nan")]}),
        ("spearman", {"cosines": [0.1, 0.3, 0.2, "x"]}),
        ("chunk_f1", {"items": [[1, 2, 2]] * 3}),
        ("chunk_f1", {"items": [[1, 2]] * 4}),
    ],
)
def test_damaged_items_are_refused(statistic, damage):
    def result(details):
        language = Measurement(4, 75.0, sha256="x", details={"run_scores": [75.0], **details})
        return Result("s", "m", "accuracy", {"sw": language}, Measurement(1, 75.0), statistic=statistic)

    intact, damaged = (result(ITEMS[statistic] | change) for change in ({}, damage))
    assert compare(intact, intact, resamples=9)["pooled"]["verdict"] == "tie"
    for sides in ((damaged, intact), (intact, damaged)):
        with pytest.raises(DataError, match=r"'sw'.* damaged"):
            compare(*sides, resamples=9)


def test_results_without_items_are_refused():
    for n in (0, None):
        empty = Result(
            "s", "m", "f", {"sw": Measurement(n, 0.0, details={"items": []})}, Measurement(1, 0.0), statistic="items"
        )
        with pytest.raises(DataError, match="no items for 'sw', or damaged ones"):
            compare(empty, empty)


@pytest.mark.parametrize("statistic", sorted(MEASURES))
def test_a_measure_scores_equal_sides_as_a_tie(statistic):
    """The contract of `Measure`: equal items have no difference, whatever is drawn."""
    details = {
        "hits": {direction: {"hits": "1101"} for direction in ("source_to_target", "target_to_source")},
        "items": {"items": [1.0, 0.0, 0.5]},
        "shared_items": {"items": [1.0, 0.0, 0.5]},
        "pairs_f1": {"sources": 5, "outcomes": {"a": "1 1 1", "b": "0 1 1"}},
        "spearman": {"scores": [1.0, 2.0, 3.0, 4.0], "cosines": [0.1, 0.3, 0.2, 0.9]},
        "error_rate": {"counts": [[2, 2, 1, 1], [3, 2, 2, 3]]},
        "chunk_f1": {"items": [[1, 2, 2], [2, 3, 3]]},
    }
    measure = MEASURES[statistic]
    items = {"sw": measure.items(details.get(statistic, details["hits"]))}
    resampled = measure.resample(items, items, resamples=20, seed=0)
    assert not resampled.languages["sw"].any()
    assert not resampled.pooled.any()
    expected = {
        "hits": 75,
        "misses": 25,
        "items": 50,
        "shared_items": 50,
        "pairs_f1": 50,
        "spearman": 80,
        "error_rate": 100 * 2 / 9,
        "chunk_f1": 60,
    }
    assert measure.score(items["sw"]) == pytest.approx(expected[statistic])


@pytest.mark.parametrize(
    ("gained", "lost", "verdict"), [(5, 0, "tie"), (6, 0, "better"), (0, 6, "worse"), (8, 1, "better")]
)
def test_a_few_changes_are_no_proof(gained, lost, verdict):
    """The p-value is at least that of the sign test, which is 0.0625 for five gains and no loss."""
    before = [0.0] * gained + [1.0] * (300 - gained)
    after = [1.0] * gained + [0.0] * lost + [1.0] * (300 - gained - lost)
    row = compare(items_result({"sw": before}), items_result({"sw": after}))["pooled"]
    assert row["verdict"] == verdict
    assert row["p_value"] >= binomtest(gained, gained + lost).pvalue - 1e-9


def test_sentences_that_languages_share_are_drawn_together():
    """The interval of the mean covers the truth as often as it claims, although languages share sentences in part."""
    rng = np.random.default_rng(0)
    covered, alone = 0, 0
    for _ in range(300):
        easy = rng.random(60)  # how easily a sentence is found in any language
        ids = {f"l{at}": np.sort(rng.choice(60, size, replace=False)) for at, size in enumerate((60, 50, 40, 30) * 4)}
        items = {language: (rng.random(len(known)) < easy[known]).astype(float) for language, known in ids.items()}
        for clusters in (cluster_scores(items, {one: known.tolist() for one, known in ids.items()}), None):
            drawn = items if clusters is None else {"": clusters}
            low, high = percentile_interval(resampled_means(drawn, resamples=400, seed=1))
            if clusters is None:
                alone += low <= 50 <= high
            else:
                covered += low <= 50 <= high
    assert covered / 300 > 0.9
    assert alone / 300 < 0.75


def test_correlations_are_resampled_less_often():
    details = {"scores": [1.0, 2.0, 3.0, 4.0], "cosines": [0.1, 0.3, 0.2, 0.9]}
    result = Result(
        "sts",
        "m",
        "Spearman",
        {"de": Measurement(4, 80.0, details=details)},
        Measurement(1, 80.0),
        statistic="spearman",
    )
    assert compare(result, result)["settings"]["resamples"] == FEWER_RESAMPLES


@pytest.mark.parametrize(("statistic", "languages"), [("items", 205), ("shared_items", 60)])
def test_a_clear_gain_is_found_in_each_of_many_languages(statistic, languages):
    """Holm's correction over 60 languages needs more than `FEWER_RESAMPLES`."""
    worse, better = (
        dataclasses.replace(items_result({f"l{at:03}": [hit] * 100 for at in range(languages)}), statistic=statistic)
        for hit in (0, 1)
    )
    assert {row["verdict"] for row in compare(worse, better)["languages"].values()} == {"better"}


def test_a_clear_loss_is_found_with_few_samples():
    """With 100 samples, no p-value would be significant after Holm's correction over eight languages."""
    codes = ("de", "fr", "ru", "sw", "te", "th", "tl", "zh")
    right, wrong = (items_result({code: [hit] * 30 for code in codes}) for hit in (1, 0))
    compared = compare(right, wrong, resamples=100)
    assert {row["verdict"] for row in compared["languages"].values()} == {"worse"}
    assert compared["settings"]["resamples"] == 8 * 2 / 0.05


def test_items_that_all_languages_share_are_few_changes():
    """Four gains in each of ten languages are four changes, if these are translations of four sentences."""
    before = {f"l{at}": [0.0] * 4 + [1.0] * 296 for at in range(10)}
    after = {language: [1.0] * 300 for language in before}
    for statistic, verdict in (("shared_items", "tie"), ("items", "better")):
        sides = [items_result(one, statistic=statistic) for one in (before, after)]
        assert compare(*sides)["pooled"]["verdict"] == verdict


def test_few_sentences_in_many_languages_are_few():
    """The same 50 sentences in four languages are too few to tell, but 200 sentences are not."""
    before = {f"l{at}": [0.0] * 25 + [1.0] * 25 for at in range(4)}
    for statistic, verdict in (("shared_items", "too few to tell"), ("items", "tie")):
        pooled = compare(*[items_result(before, statistic=statistic)] * 2)["pooled"]
        assert (pooled["n"], verdict_shown(pooled)) == (200, verdict)


def test_few_pairs_of_sentences_in_many_languages_are_few():
    """The 50 pairs of sentences of STS in three languages are too few to tell; other pairs are other items."""
    rng = np.random.default_rng(0)

    def result(sizes):
        languages = {
            f"l{at}": Measurement(
                n, 0.0, details={"scores": rng.random(n).tolist(), "cosines": rng.random(n).tolist()}
            )
            for at, n in enumerate(sizes)
        }
        return Result("sts", "m", "Spearman", languages, Measurement(3, 0.0), statistic="spearman")

    for sizes, clusters, verdict in (((50, 50, 50), 50, "too few to tell"), ((50, 60, 50), 110, "tie")):
        one = result(sizes)
        pooled = compare(one, one)["pooled"]
        assert (pooled["n"], pooled["clusters"], verdict_shown(pooled)) == (sum(sizes), clusters, verdict)


def test_languages_that_share_some_sentences_are_compared_together():
    """More languages with the same sentences leave the interval as it is; other sentences make it narrower."""
    rng = np.random.default_rng(0)
    gains = rng.choice([-1.0, 0.0, 1.0], size=100, p=[0.1, 0.6, 0.3])

    def width(ids):
        sides = [items_result(dict.fromkeys(ids, side)) for side in (0 * gains, gains)]
        for side in sides:
            for one in side.languages:
                details = {**side.languages[one].details, "item_ids": ids[one]}
                side.languages[one] = dataclasses.replace(side.languages[one], details=details)
        low, high = compare(*sides)["pooled"]["interval"]
        return high - low

    same = [*range(100)]
    alone = width({"de": same, "sw": [*range(100, 200)]})
    assert width({"de": same, "sw": same}) == pytest.approx(2**0.5 * alone, rel=0.1)
    assert alone < width({"de": same, "sw": [*range(50), *range(150, 200)]}) < 2**0.5 * alone
