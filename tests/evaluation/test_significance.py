import numpy as np
import pytest

from metaphrase.evaluation import significance
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.measures import MEASURES
from metaphrase.evaluation.result import Measurement, Result
from metaphrase.evaluation.significance import (
    bootstrap_interval,
    cluster_scores,
    cluster_sums,
    holm,
    percentile_interval,
    resampled_means,
    two_sided_p_value,
    verdict,
)


def paired(before, after, **options):
    """The comparison of two models in one language, from the scores of the items."""
    results = []
    for items in (before, after):
        language = Measurement(len(items), 100 * float(np.mean(items)), details={"items": list(map(float, items))})
        average = Measurement(1, language.score)
        results.append(Result("s", "m", "accuracy", {"xx": language}, average, statistic="items"))
    return compare(*results, **options)["languages"]["xx"]


def bootstrap_loop(values, resamples, seed):
    """Draw the items one by one and average them: the definition."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        drawn = [values[rng.integers(len(values))] for _ in values]
        means.append(sum(drawn) / len(drawn))
    return means


def p_value_loop(means):
    below = sum(mean <= 0 for mean in means)
    above = sum(mean >= 0 for mean in means)
    return min(1.0, 2 * min(1 + below, 1 + above) / (1 + len(means)))


@pytest.fixture
def scores():
    rng = np.random.default_rng(3)
    before = rng.integers(0, 3, size=60) / 2
    after = np.clip(before + rng.choice([-0.5, 0, 0, 0.5, 0.5], size=60), 0, 1)
    return before, after


def test_interval_matches_loop(scores):
    before, _ = scores
    expected = 100 * np.quantile(bootstrap_loop(before, 4000, seed=1), [0.025, 0.975])
    assert bootstrap_interval(before, resamples=40_000) == pytest.approx(expected, abs=0.9)
    expected = 100 * np.quantile(bootstrap_loop(before, 4000, seed=1), [0.25, 0.75])
    assert bootstrap_interval(before, resamples=40_000, confidence=0.5) == pytest.approx(expected, abs=0.9)


def test_paired_test_matches_loop(scores):
    before, after = scores
    means = bootstrap_loop(after - before, 4000, seed=1)
    result = paired(before, after, resamples=40_000)
    assert result["n"] == 60
    assert result["difference"] == pytest.approx(100 * (after - before).mean())
    assert result["interval"] == pytest.approx(100 * np.quantile(means, [0.025, 0.975]), abs=0.9)
    assert result["p_value"] == pytest.approx(p_value_loop(means), abs=0.01)
    assert 0.001 < result["p_value"] < 0.1  # neither end of the scale, or the line above compares nothing


@pytest.mark.parametrize("scores", [[1, float("nan"), 0], [100, 0, 50], [[1, 0], [0, 1]], [-1, 0, 1]])
def test_scores_outside_the_range_are_refused(scores):
    with pytest.raises(ValueError, match="numbers from 0 to 1, in one dimension"):
        bootstrap_interval(scores)


def test_pairing_matters():
    """Two models that agree on all but 4 of 100 items differ by far less than their own intervals are wide."""
    before = np.arange(100) % 2
    after = before.copy()
    after[:8] = 1
    result = paired(before, after)
    low, high = bootstrap_interval(after)
    assert result["difference"] == pytest.approx(4.0)
    assert result["interval"][1] - result["interval"][0] < (high - low) / 2


def test_interval_covers_the_truth():
    """Of 200 samples from a known accuracy, about 95 % give an interval that holds it."""
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.random(150) < 0.7, resamples=1000, seed=trial)
        covered += low <= 70 <= high
    assert 180 <= covered <= 199


def test_p_value_holds_its_level():
    """Where nothing has changed, p < 0.05 turns up about once in twenty."""
    rng = np.random.default_rng(0)
    rejected = sum(
        paired(rng.random(150) < 0.7, rng.random(150) < 0.7, resamples=1000, seed=trial)["p_value"] < 0.05
        for trial in range(300)
    )
    assert 4 <= rejected <= 27


def test_no_change_is_a_certain_tie():
    result = paired([1, 0, 1], [1, 0, 1])
    assert (result["difference"], result["interval"], result["p_value"]) == (0.0, [0.0, 0.0], 1.0)


def test_smallest_p_value_is_set_by_the_resamples():
    assert paired([0] * 20, [1] * 20, resamples=999)["p_value"] == pytest.approx(2 / 1000)


def test_p_value_agrees_with_the_interval(scores):
    before, after = scores
    for shift in range(20):
        moved = after.copy()
        moved[:shift] = 0
        result = paired(before, moved)
        excludes_zero = result["interval"][0] > 0 or result["interval"][1] < 0
        if result["p_value"] < 0.05:
            assert excludes_zero
        if result["p_value"] > 0.06:
            assert not excludes_zero


def test_swapping_the_sides_changes_the_sign_only(scores):
    before, after = scores
    forth, back = paired(before, after, resamples=40_000), paired(after, before, resamples=40_000)
    assert back["difference"] == -forth["difference"]
    assert back["interval"] == pytest.approx([-forth["interval"][1], -forth["interval"][0]], abs=0.9)
    assert back["p_value"] == pytest.approx(forth["p_value"], abs=0.01)


def test_pooled_languages_count_the_same():
    means_r = resampled_means({"aa": np.zeros(1000), "bb": np.ones(10)}, resamples=100, seed=0)
    assert set(means_r.tolist()) == {50.0}  # resampling stays inside a language, and neither varies


def test_pooling_narrows_the_interval():
    rng = np.random.default_rng(0)
    hits = {f"l{i}": rng.random(100) < 0.6 for i in range(9)}
    single, pooled = (
        bootstrap_interval(hits["l0"]),
        percentile_interval(resampled_means(hits, resamples=10_000, seed=0)),
    )
    assert (pooled[1] - pooled[0]) == pytest.approx((single[1] - single[0]) / 3, rel=0.15)


def test_pooled_ignores_the_order_of_languages(scores):
    before, after = scores
    forward = resampled_means({"a": before, "b": after}, resamples=100, seed=4)
    backward = resampled_means({"b": after, "a": before}, resamples=100, seed=4)
    assert forward.tolist() == backward.tolist()


def test_same_seed_same_result(scores):
    before, after = scores
    assert paired(before, after, seed=5) == paired(before, after, seed=5)
    assert paired(before, after, seed=5) != paired(before, after, seed=6)


def test_chunks_do_not_change_the_result(scores, monkeypatch):
    before, after = scores
    whole = paired(before, after)
    monkeypatch.setattr(significance, "CHUNK", 7)
    assert paired(before, after) == whole


def test_no_scores_are_refused():
    with pytest.raises(ValueError, match="empty"):
        bootstrap_interval([])


def test_holm_known_example():
    """Four hypotheses, adjusted by hand: 4 × 0.005, 3 × 0.01, 2 × 0.03, and 0.04 raised to 0.06."""
    adjusted = holm({"h1": 0.01, "h2": 0.04, "h3": 0.03, "h4": 0.005})
    assert adjusted == pytest.approx({"h1": 0.03, "h2": 0.06, "h3": 0.06, "h4": 0.02})
    assert list(adjusted) == ["h1", "h2", "h3", "h4"]


def test_holm_edges():
    assert holm({}) == {}
    assert holm({"a": 0.2}) == {"a": 0.2}
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_verdict_needs_significance():
    assert verdict(10.0, 0.0499) == "better"
    assert verdict(-10.0, 0.0499) == "worse"
    assert verdict(10.0, 0.05) == "tie"
    assert verdict(0.0, 0.001) == "tie"


def test_small_shares_of_clusters_are_not_rounded_away():
    """One hit of 5,000 items in one of two languages is 0.01 % of their mean."""
    ids = dict.fromkeys(("de", "sw"), range(5000))
    scores = {"de": [1.0] + [0.0] * 4999, "sw": [0.0] * 5000}
    assert cluster_sums(scores, ids).sum() == pytest.approx(1e-4)
    assert cluster_scores(scores, ids).mean() == pytest.approx(1e-4)


def test_a_language_without_errors_adds_no_variation():
    """However few items it has: what varies is the score of an item within its language."""
    scores = {"de": [1, 0, 1, 0], "sw": [1]}
    ids = {"de": [1, 2, 3, 4], "sw": [1]}
    assert cluster_scores(scores, ids).tolist() == [1.0, 0.5, 1.0, 0.5]


def test_items_of_languages_of_other_sizes_have_other_ids():
    """Languages of equal size share their items, the others do not."""
    ids = MEASURES["shared_items"].row_ids({"de": 100, "fr": 100, "sw": 150, "te": 101})
    assert ids["de"] == ids["fr"]
    assert len(set().union(*ids.values())) == 100 + 150 + 101


def test_sources_without_pairs_are_drawn_too():
    """One of four sources has the only pair: with a probability of (3/4)⁴ it is in no sample."""
    (f1_r,) = MEASURES["pairs_f1"].scores([(4, {"a": (1, 1, 1)})], 4000, np.random.default_rng(0))
    assert set(f1_r.tolist()) == {0.0, 100.0}
    assert (f1_r == 0).mean() == pytest.approx(0.75**4, abs=0.03)


@pytest.mark.parametrize(
    ("statistic", "items", "shared"),
    [
        ("spearman", np.array([[1.0, 2.0, 3.0, 4.0, 5.0], [0.1, 0.3, 0.2, 0.9, 0.4]]).T, True),
        ("shared_items", np.array([0.0, 1.0, 0.5, 1.0, 0.0]), True),
        ("pairs_f1", (30, {"a": (1, 1, 1), "b": (0, 1, 1), "c": (0, 0, 1), "d": (1, 1, 2)}), False),
    ],
)
def test_languages_share_their_samples_if_their_items_are_translations(statistic, items, shared):
    drawn = MEASURES[statistic].samples([{"de": items, "sw": items}], resamples=50, seed=0)
    assert np.array_equal(drawn["de"][0], drawn["sw"][0]) == shared


def test_equal_samples_are_no_difference():
    """Samples without a difference count on both sides of zero, also if rounding leaves one of 1e-13."""
    assert two_sided_p_value(np.zeros(99)) == 1
    assert (
        two_sided_p_value(np.array([-1.0] * 50 + [1e-13] * 49))
        == two_sided_p_value(np.array([1.0] * 50 + [-1e-13] * 49))
        == 1
    )
