import random
import warnings

import pytest
from seqeval import metrics

from metaphrase.evaluation.transfer.data import UPOS
from metaphrase.evaluation.transfer.tag_scores import tag_chunks, tag_scores

# gold, predicted, gold chunks, predicted chunks and F1, all as seqeval 1.2.2 gives them
CASES = {
    "a wrong word costs the run": (
        [["DET", "NOUN", "NOUN"]],
        [["DET", "NOUN", "VERB"]],
        {("ET", 0, 0), ("OUN", 1, 2)},
        {("ET", 0, 0), ("OUN", 1, 1), ("ERB", 2, 2)},
        40.0,
    ),
    "SYM is never joined": (
        [["SYM", "SYM"]],
        [["SYM", "X"]],
        {("YM", 0, 0), ("YM", 1, 1)},
        {("YM", 0, 0)},
        200 / 3,
    ),
    "SCONJ and CCONJ are one type": ([["CCONJ"]], [["SCONJ"]], {("CONJ", 0, 0)}, {("CONJ", 0, 0)}, 100.0),
    "SCONJ ends, CCONJ does not begin": (
        [["SCONJ", "CCONJ"]],
        [["CCONJ", "SCONJ"]],
        {("CONJ", 0, 0), ("CONJ", 0, 1)},
        {("CONJ", 1, 1)},
        0.0,
    ),
    "INTJ, an I of a type": (
        [["INTJ", "INTJ", "PUNCT"]],
        [["INTJ", "PUNCT", "PUNCT"]],
        {("NTJ", 0, 1), ("UNCT", 2, 2)},
        {("NTJ", 0, 0), ("UNCT", 1, 2)},
        0.0,
    ),
    "X at the start of a sentence": (
        [["NOUN"], ["X", "VERB"]],
        [["NOUN"], ["X", "VERB"]],
        {("OUN", 0, 0), ("_", 0, 2), ("ERB", 3, 3)},
        {("OUN", 0, 0), ("_", 0, 2), ("ERB", 3, 3)},
        100.0,
    ),
    "X across the end of a sentence": (
        [["VERB", "X"], ["X", "NOUN"]],
        [["VERB", "X"], ["NOUN", "NOUN"]],
        {("ERB", 0, 0), ("_", 1, 3), ("OUN", 4, 4)},
        {("ERB", 0, 0), ("OUN", 3, 4)},
        40.0,
    ),
    "no chunk at all": ([["X"]], [["X"]], set(), set(), 0.0),
    "runs stop at the end of a sentence": (
        [["NOUN", "NOUN"], ["NOUN"]],
        [["NOUN", "NOUN"], ["NOUN"]],
        {("OUN", 0, 1), ("OUN", 3, 3)},
        {("OUN", 0, 1), ("OUN", 3, 3)},
        100.0,
    ),
    "entities": (
        [["B-PER", "I-PER", "O", "I-LOC"]],
        [["B-PER", "I-LOC", "O", "I-LOC"]],
        {("PER", 0, 1), ("LOC", 3, 3)},
        {("PER", 0, 0), ("LOC", 1, 1), ("LOC", 3, 3)},
        40.0,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hard_cases(case):
    gold, predicted, gold_chunks, predicted_chunks, f1 = case
    assert tag_chunks(gold) == gold_chunks
    assert tag_chunks(predicted) == predicted_chunks
    assert tag_scores(gold, predicted)[0]["f1"] == pytest.approx(f1)


def test_accuracy_is_of_words():
    scores, chunks = tag_scores([["DET", "NOUN", "NOUN"], ["VERB"]], [["DET", "NOUN", "VERB"], ["VERB"]])
    assert chunks == [(1, 3, 2), (1, 1, 1)]
    f1, recall = 200 * 2 / (4 + 3), 200 / 3
    assert scores == pytest.approx({"f1": f1, "accuracy": 75.0, "precision": 50.0, "recall": recall})


def test_whole_types_tell_the_conjunctions_apart():
    assert tag_scores([["CCONJ"]], [["SCONJ"]], whole_types=True)[0]["f1"] == 0
    assert tag_chunks([["SCONJ", "X"]], whole_types=True) == {("SCONJ", 0, 0), ("X", 1, 1)}


@pytest.mark.parametrize(
    "tags",
    [UPOS, ("CCONJ", "SCONJ", "X", "SYM", "INTJ"), ("B-A", "I-A", "B-B", "I-B", "E-A", "S-A", "O"), (*UPOS, "_", "O")],
    ids=["upos", "odd ones", "entities", "with _ and O"],
)
def test_equals_seqeval(tags):
    for seed in range(200):
        draw = random.Random(seed)
        gold = [[draw.choice(tags) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 4))]
        predicted = [[tag if draw.random() < 0.5 else draw.choice(tags) for tag in sentence] for sentence in gold]
        scores, _ = tag_scores(gold, predicted)
        with warnings.catch_warnings(action="ignore"):  # seqeval: "NOUN seems not to be NE tag"
            expected = {name: 100 * getattr(metrics, f"{name}_score")(gold, predicted) for name in scores}
        assert scores == pytest.approx(expected), (gold, predicted)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="shorter"):
        tag_scores([["DET"], ["DET", "NOUN"]], [["DET"], ["DET"]])
    with pytest.raises(ValueError, match="no words"):
        tag_scores([], [])
