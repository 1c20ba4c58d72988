from pathlib import Path

import evaluate
import pytest

from metaphrase import metrics
from metaphrase.evaluation.word_alignment import alignment_scores

PREDICTIONS, REFERENCES = ["0-0 1-1", "0-0"], ["0-0 1p1", "1-1"]
#: A = 3 links, S = 2, |A ∩ S| = 1, |A ∩ P| = 2
EXPECTED = {"precision": 2 / 3, "recall": 1 / 2, "f1": 4 / 7, "aer": 1 - 3 / 5}


@pytest.fixture
def aer(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return evaluate.load(metrics.path("aer"), cache_dir=str(tmp_path / "cache"), experiment_id=tmp_path.name)


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
    with pytest.raises(ValueError, match="there is: aer"):
        metrics.path("bleu")
