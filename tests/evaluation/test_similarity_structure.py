"""Similarity structure is the rank correlation of a slow loop, and depends on what it should depend on only."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import CachedEncoder
from metaphrase.evaluation.measures import draw_counts
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.similarity_structure import (
    LANGUAGES,
    kept_structure,
    similarity_structure,
    structure_texts,
)
from metaphrase.exceptions import DataError

TEXTS = {"xx": [f"x{at}" for at in range(12)], "yy": [f"y{at}" for at in range(9)]}


class Table:
    """An encoder of random vectors, the same for the same text and seed."""

    def __init__(self, seed: int, change=lambda vectors_nh: vectors_nh) -> None:
        self.seed, self.change, self.calls = seed, change, 0

    def encode(self, texts, **_):
        self.calls += 1
        rows = [np.random.default_rng([self.seed, *text.encode()]).normal(size=5) for text in texts]
        return self.change(np.array(rows))


def mix(weight: float) -> Table:
    base, other = Table(0), Table(1)
    mixed = Table(0)
    mixed.encode = lambda texts, **_: base.encode(texts) + weight * other.encode(texts)
    return mixed


def cosines_loop(model, texts: list[str], drawn: list[int]) -> list[float]:
    """Cosines of all pairs of drawn sentences, except of a sentence and itself."""
    vectors = model.encode(texts)
    found = []
    for at, i in enumerate(drawn):
        for j in drawn[at + 1 :]:
            if i != j:
                a, b = vectors[i], vectors[j]
                found.append(round(float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b)), 6))
    return found


def test_scores_match_the_loop():
    result = similarity_structure(Table(0), mix(0.7), TEXTS)
    for language, texts in TEXTS.items():
        sides = [cosines_loop(model, texts, list(range(len(texts)))) for model in (Table(0), mix(0.7))]
        assert result.languages[language].score == pytest.approx(100 * spearmanr(*sides).statistic, abs=0.05)
        assert result.languages[language].n == len(texts)
    scores = [one.score for one in result.languages.values()]
    assert result.average.score == pytest.approx(np.mean(scores))


@pytest.mark.parametrize("seed", range(10))
def test_a_resample_matches_the_loop_over_the_same_draws(seed):
    texts, models = TEXTS["xx"], (Table(0), mix(0.7))
    (counts,) = draw_counts(len(texts), 1, np.random.default_rng(seed))
    drawn = np.repeat(np.arange(len(texts)), counts).tolist()
    wanted = 100 * spearmanr(*(cosines_loop(model, texts, drawn) for model in models)).statistic
    one = similarity_structure(*models, {"xx": texts}, resamples=1, seed=seed).languages["xx"]
    assert one.interval == pytest.approx(sorted((wanted, one.score)), abs=0.05)


@pytest.mark.long
def test_intervals_match_those_of_a_loop():
    texts = TEXTS["xx"]
    result = similarity_structure(Table(0), mix(0.7), {"xx": texts}, resamples=2000)
    rng, found = np.random.default_rng(1), []
    for _ in range(2000):
        drawn = rng.integers(len(texts), size=len(texts)).tolist()
        found.append(100 * spearmanr(*(cosines_loop(model, texts, drawn) for model in (Table(0), mix(0.7)))).statistic)
        if len(found) == 400:  # each takes a millisecond
            break
    low, high = result.languages["xx"].interval
    assert (low, high) == pytest.approx(np.quantile(found, [0.025, 0.975]), abs=6)
    assert low < result.languages["xx"].score < high


def test_translations_are_drawn_together():
    """Two languages with the same sentences are one: their mean is as uncertain as each of them."""
    meanings = {language: {text: text[1:] for text in TEXTS["xx"]} for language in ("aa", "xx")}
    together = similarity_structure(Table(0), mix(0.7), meanings)
    assert together.average.interval == together.languages["xx"].interval == together.languages["aa"].interval
    apart = similarity_structure(Table(0), mix(0.7), {language: list(texts) for language, texts in meanings.items()})
    assert apart.average.score == together.average.score
    widths = [np.diff(one.average.interval).item() for one in (apart, together)]
    assert widths[0] < 0.9 * widths[1]


def test_it_falls_with_the_change_and_ignores_rotations_scales_and_copies():
    scores = [similarity_structure(Table(0), mix(weight), TEXTS).average.score for weight in (0, 0.3, 1, 10)]
    assert scores[0] == 100.0
    assert scores == sorted(scores, reverse=True)
    rotation_hh = np.linalg.qr(np.random.default_rng(3).normal(size=(5, 5)))[0]
    turned = Table(0, lambda vectors_nh: 3 * vectors_nh @ rotation_hh)
    assert similarity_structure(Table(0), turned, TEXTS).average.score == pytest.approx(100, abs=0.01)
    twice = {language: [*texts, *texts] for language, texts in TEXTS.items()}
    assert (
        similarity_structure(Table(0), mix(1), twice).to_dict()["average"]
        == (similarity_structure(Table(0), mix(1), TEXTS).to_dict()["average"])
    )
    collapsed = Table(0, lambda vectors_nh: 0 * vectors_nh + 1)
    assert similarity_structure(Table(0), collapsed, TEXTS).average.score == 0.0


def test_moving_one_language_as_a_whole_changes_nothing(tiny_encoder):
    """Each language is compared with itself only."""
    rotation_hh = np.linalg.qr(np.random.default_rng(3).normal(size=(5, 5)))[0]
    moved = Table(0)
    moved.encode = lambda texts, **_: np.stack(
        [
            row_h @ rotation_hh if text[0] == "x" else row_h
            for text, row_h in zip(texts, Table(0).encode(texts), strict=True)
        ]
    )
    assert similarity_structure(Table(0), moved, TEXTS).average.score == pytest.approx(100, abs=0.01)


def test_it_is_a_result_that_cannot_be_compared_again(tiny_encoder):
    original = CachedEncoder(tiny_encoder)
    texts = {"en": ["the dog sleeps", "the cat sleeps", "Guten Morgen", "1 2 3"]}
    result = similarity_structure(tiny_encoder, tiny_encoder, texts, encode_original=original.encode, name="tuned")
    assert result.average.score == 100.0
    assert len(original.rows) == 4
    assert Result.from_dict(result.to_dict()) == result
    with pytest.raises(DataError, match="keeps no items"):
        compare(result, result)


@pytest.mark.parametrize("texts", [{}, {"xx": []}, {"xx": TEXTS["xx"], "yy": ["a", "b", "a"]}])
def test_too_few_texts_are_refused(texts):
    with pytest.raises(DataError, match="at least 3 different sentences for each language"):
        similarity_structure(Table(0), Table(0), texts)


def test_a_language_without_an_order_loses_none(caplog):
    class Constant:
        def encode(self, texts, **_):
            return np.ones((len(texts), 4))

    result = similarity_structure(Constant(), Table(0), {"xx": TEXTS["xx"]})
    assert (result.average.score, result.average.interval) == (100.0, (100.0, 100.0))
    assert "finds all sentences of xx equally similar" in caplog.text


def test_texts_are_packaged():
    texts = structure_texts()
    assert set(texts) == {*LANGUAGES, "en"}
    assert all(len(set(one)) > 50 for one in texts.values())
    assert len(texts["en"]) == 300
    shared = [set(texts[language].values()) for language in LANGUAGES]
    assert all(len(shared[0] & one) > 45 for one in shared)
    assert structure_texts(["sw"], english=0).keys() == {"sw"}


def test_the_structure_of_languages_is_their_mean():
    before = np.random.default_rng(0).normal(size=(6, 8))
    after = before + np.random.default_rng(1).normal(size=(6, 8))
    upper = np.triu_indices(6, 1)
    cosines = [(one @ one.T)[upper] for one in (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (before, after))]
    expected = 100 * spearmanr(*cosines).statistic
    texts = list("abcdef")
    assert kept_structure([texts], [before], [after]) == pytest.approx(expected)
    assert kept_structure([texts] * 2, [before, before], [after, 3 * before]) == pytest.approx((expected + 100) / 2)
    assert kept_structure([texts[:2]], [before[:2]], [after[:2]]) == 100
    assert kept_structure([texts], [np.ones((6, 8))], [after]) == 100  # no order to lose
    repeated = [0, 1, 1, 2, 3, 0, 4, 5]
    sides = [[one[repeated]] for one in (before, after)]
    assert kept_structure([[texts[at] for at in repeated]], *sides) == pytest.approx(expected)


@pytest.mark.parametrize("weight", [0.003, 0.01, 0.03])
def test_the_interval_of_a_small_loss_contains_it(weight):
    texts = {"xx": [f"x{at}" for at in range(60)]}
    result = similarity_structure(Table(0), mix(weight), texts)
    for one in (result.average, result.languages["xx"]):
        low, high = one.interval
        assert low <= one.score <= high
