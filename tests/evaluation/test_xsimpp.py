"""Retrieval of English translations among distractors."""

import numpy as np
import pytest

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.compare import compare, verdict_shown
from metaphrase.evaluation.xsimpp import (
    XsimPlusPlusEvaluator,
    distractor_pool,
    evaluate_xsimpp,
    find_errors,
    retrieval_errors,
)

ENGLISH = ("He is tall.", "The train arrives at 8 o'clock.", "She bought 3 red apples.", "Hello there.", "No one.")


@pytest.fixture
def sets():
    """Languages with other targets; those of the second have fewer kinds of distractors."""
    pairs = {"de": ENGLISH, "sw": ("Hello there.", "He is tall.", "Good morning.")}
    return {
        language: ParallelSet(language, tuple(f"{language} {text}" for text in targets), targets)
        for language, targets in pairs.items()
    }


class Near:
    """Embeds a source beside its target, and the distractor of the first target closer to it."""

    def __init__(self, distractor):
        self.distractor = distractor

    def encode(self, texts, **_):
        return np.stack([self.vector(text) for text in texts]).astype(np.float32)

    def vector(self, text):
        target = text[3:] if text[:3] in ("de ", "sw ") else text
        own, place = (np.random.default_rng([at, *target.encode()]).normal(size=32) for at in (1, 2))
        if text == self.distractor:
            return self.vector("de " + ENGLISH[0])
        return own + 0.5 * place * (text == target)


def test_a_kind_without_distractors_has_the_error_without_any(sets):
    pool = distractor_pool(ENGLISH)
    wrong = pool.texts[len(ENGLISH)]  # the first distractor of the first target
    kind = pool.kinds[len(ENGLISH)]
    found = find_errors(Near(wrong), sets)
    errors = found["de"][1]
    assert errors.without.tolist() == 5 * [False]
    assert errors.kinds[kind].tolist() == [True, *4 * [False]]
    assert errors.together.tolist() == [True, *4 * [False]]
    missing = set(errors.kinds) - set(found["sw"][1].kinds)
    assert missing
    result = evaluate_xsimpp(Near(wrong), sets, resamples=10)
    assert result.languages["de"].score == pytest.approx(20)
    for name in missing:  # of Swahili, the error without distractors counts
        sides = errors.kinds[name].mean(), found["sw"][1].without.mean()
        assert result.groups[name].score == pytest.approx(100 * np.mean(sides))


def test_sentences_that_languages_do_not_share_are_different_items():
    """As in Tatoeba: 60 sentences in each of three languages are 180 items, although the sizes are equal."""
    sets = {
        language: ParallelSet(language, *(tuple(f"{mark}{language} {at}" for at in range(60)) for mark in ("x", "")))
        for language in ("de", "sw", "zh")
    }
    result = evaluate_xsimpp(Near(None), sets, resamples=10)
    pooled = compare(result, result)["pooled"]
    assert (pooled["n"], pooled["clusters"], verdict_shown(pooled)) == (180, 180, "tie")


def test_the_nearest_candidate_is_not_right_if_it_is_a_distractor():
    pool = distractor_pool(["He is tall."])
    vectors = np.eye(len(pool.texts), 8)
    errors = retrieval_errors(vectors[1:2], vectors, pool)
    assert (errors.without.tolist(), errors.together.tolist()) == ([False], [True])


def test_the_evaluator_logs_fractions(sets, tiny_encoder, tmp_path):
    evaluator = XsimPlusPlusEvaluator(sets, name="dev")
    metrics = evaluator(tiny_encoder, str(tmp_path), epoch=1, steps=10)
    result = evaluate_xsimpp(tiny_encoder, sets, resamples=10)
    assert evaluator.primary_metric == "dev_accuracy"
    assert 100 * (1 - metrics["dev_accuracy"]) == pytest.approx(result.average.score, abs=1e-3)
    for name, group in result.groups.items():
        key = name.replace(" ", "_") if name == "without distractors" else f"{name}_accuracy"
        assert 100 * (1 - metrics[f"dev_{key}"]) == pytest.approx(group.score, abs=1e-3)
