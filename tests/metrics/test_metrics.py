from pathlib import Path

import evaluate
import numpy as np
import pytest

from metaphrase import metrics
from metaphrase.evaluation.retrieval import retrieval_hits
from metaphrase.evaluation.word_alignment import alignment_scores
from metaphrase.mining.margins import best_threshold

PREDICTIONS, REFERENCES = ["0-0 1-1", "0-0"], ["0-0 1p1", "1-1"]
#: A = 3 links, S = 2, |A ∩ S| = 1, |A ∩ P| = 2
EXPECTED = {"precision": 2 / 3, "recall": 1 / 2, "f1": 4 / 7, "aer": 1 - 3 / 5}


@pytest.fixture
def load(tmp_path):
    cache = str(tmp_path / "cache")
    return lambda name: evaluate.load(metrics.path(name), cache_dir=cache, experiment_id=tmp_path.name)


@pytest.fixture
def aer(load):
    return load("aer")


def test_computes(aer):
    assert aer.compute(predictions=PREDICTIONS, references=REFERENCES) == pytest.approx(EXPECTED)


def test_adds_batches(aer):
    aer.add(prediction=PREDICTIONS[0], reference=REFERENCES[0])
    aer.add_batch(predictions=PREDICTIONS[1:], references=REFERENCES[1:])
    assert aer.compute() == pytest.approx(EXPECTED)


def test_is_the_packages_own_function(aer):
    links = [[(0, 0), (1, 2)], [(2, 2)]]
    gold = [[(0, 0)], [(2, 2), (3, 3)]]
    found = aer.compute(predictions=["0-0 1-2", "2-2"], references=["0-0", "2-2 3-3"])
    assert found == alignment_scores(links, gold, gold)._asdict()


def test_malformed_links_are_refused(aer):
    with pytest.raises(ValueError, match="0-0 1p2"):
        aer.compute(predictions=["0-0"], references=["0:0"])


def test_describes_itself(aer):
    assert "Och" in aer.citation
    assert "0-0 1p2" in aer.inputs_description


def test_paths():
    assert (Path(metrics.path("aer")) / "aer.py").is_file()
    with pytest.raises(ValueError, match="Available metrics: aer, bitext_mining_f1, retrieval_accuracy"):
        metrics.path("bleu")


MINED = ["z1\te1\t1.4", "z2\te9\t1.3", "z3\te3\t1.2", "z4\te8\t1.1"]
GOLD = ["z1\te1", "z3\te3", "z5\te5"]


def test_mining_is_the_packages_own_function(load):
    metric = load("bitext_mining_f1")
    best = best_threshold([1.4, 1.3, 1.2, 1.1], [True, False, True, False], 3)
    assert metric.compute(predictions=[MINED], references=[GOLD]) == {
        "precision": best.precision,
        "recall": best.recall,
        "f1": best.f1,
        "threshold": best.threshold,
    }
    assert (best.precision, best.recall, best.threshold) == (2 / 3, 2 / 3, pytest.approx(1.15))


def test_mining_at_a_threshold(load):
    metric = load("bitext_mining_f1")
    found = metric.compute(predictions=[MINED], references=[GOLD], threshold=1.3)
    assert found == {"precision": 1 / 2, "recall": 1 / 3, "f1": 2 / 5, "threshold": 1.3}
    both = metric.compute(predictions=[MINED, ["z5\te5\t2.0"]], references=[GOLD, GOLD], threshold=1.3)
    assert (both["precision"], both["recall"]) == (2 / 3, 2 / 6)


def test_malformed_pairs_are_refused(load):
    with pytest.raises(ValueError, match="Expected 3 tab-separated columns, got 1 in 'z1 e1'"):
        load("bitext_mining_f1").compute(predictions=[["z1 e1"]], references=[GOLD])


@pytest.mark.parametrize("score", ["best", "nan", ""])
def test_scores_that_are_no_numbers_are_refused(load, score):
    with pytest.raises(ValueError, match=f"score of a pair must be a number, but is '{score}'"):
        load("bitext_mining_f1").compute(predictions=[[f"z1\te1\t{score}"]], references=[GOLD])


def test_embeddings_of_several_sizes_are_refused(load):
    with pytest.raises(ValueError, match=r"must have one size, but have the sizes \[2, 3\]"):
        load("retrieval_accuracy").compute(predictions=[[1.0, 2.0]], references=[[1.0, 2.0, 3.0]])


def test_retrieval_is_the_packages_own_function(load):
    rng = np.random.default_rng(0)
    source = rng.normal(size=(30, 4)).astype(np.float32)
    target = source + rng.normal(size=(30, 4)).astype(np.float32)
    found = load("retrieval_accuracy").compute(predictions=source, references=target)
    forward, backward = retrieval_hits(source, target)
    assert found == pytest.approx(
        {
            "source_to_target": forward.mean(),
            "target_to_source": backward.mean(),
            "accuracy": (forward.mean() + backward.mean()) / 2,
        }
    )
    assert 0 < found["accuracy"] < 1


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_a_repeated_pair_counts_once(load, threshold):
    found = load("bitext_mining_f1").compute(
        predictions=[["a\tb\t0.8", "a\tb\t0.9"]], references=[["a\tb", "c\td"]], threshold=threshold
    )
    assert (found["precision"], found["recall"], found["f1"]) == (1.0, 0.5, pytest.approx(2 / 3))
