import pytest

from metaphrase.evaluation.retention import overall_verdict, retention
from tests.publishing.reports import comparison


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [([-0.9, 0.2], "kept"), ([-1.0, 3.0], "kept"), ([-1.1, 0.5], "uncertain"), ([-4.0, -1.1], "lost")],
)
def test_retention_is_a_test_against_the_red_line(interval, verdict):
    assert retention(comparison({"de": -1.0}, interval), 1.0)["verdict"] == verdict


def test_retention_names_the_worst():
    differences = {"a": 1, "b": -9, "c": -2, "d": -1, "e": -0.5, "f": -8, "g": -7, "h": -6, "i": -5.5, "j": -5.1}
    found = retention(comparison(differences, [-3.0, -2.0]), 1.5)
    assert [row["language"] for row in found["languages"]] == ["b", "f", "g", "h", "i", "j", "c", "d", "e", "a"]
    assert found["worst"] == ["b", "f", "g", "h", "i", "j"]  # all that are significantly worse, at least five
    assert [row["language"] for row in found["languages"] if row["below"]] == ["b", "f", "g", "h", "i", "j", "c"]
    assert retention(comparison({"a": 1.0, "b": 0.0}, [0, 1]), 1)["worst"] == []
    small = {"a": -0.7, "b": -0.6, "c": -0.5, "d": -0.4, "e": -0.3, "f": -0.2, "g": 0.1}  # none significant
    assert retention(comparison(small, [-1, 0]), 1)["worst"] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("pooled", ["better", "tie", "worse"])
@pytest.mark.parametrize("languages", ["kept", "lost", "uncertain"])
@pytest.mark.parametrize("abilities", ["kept", "lost", "uncertain", "better", "tie", "worse", None])
def test_a_model_that_lost_something_or_may_have_keeps_nothing_in_words(pooled, languages, abilities):
    rows = {} if abilities is None else {"stsb": {"verdict": abilities}}
    said = overall_verdict({"test": {"pooled": {"verdict": pooled}}}, {"udhr": {"verdict": languages}}, rows).lower()
    assert ("better at test" in said) == (pooled == "better")
    worse = "worse" in (pooled, abilities) or "lost" in (languages, abilities)
    assert ("worse at " in said) == worse
    uncertain = "uncertain" in (languages, abilities)
    assert ("uncertain: " in said) == uncertain
    assert ("kept" in said) == (not worse and not uncertain)
    assert ("other languages (udhr)" in said) == (languages != "kept" or "kept" in said)
    assert overall_verdict({}, {}, {}) == ""


def test_a_guard_with_the_name_of_a_test_set_hides_no_verdict():
    said = overall_verdict({"tatoeba": {"pooled": {"verdict": "worse"}}}, {}, {"tatoeba": {"verdict": "tie"}})
    assert said == "Worse at tatoeba; a tie: tatoeba (guard)."
