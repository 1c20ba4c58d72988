from metaphrase.corpus import load_corpus
from metaphrase.corpus.overlap import overlap
from tests.corpus.samples import tsv


def test_overlap(tmp_path, fault):
    train = load_corpus(tsv(tmp_path / "sw-en.tsv")).dataset
    test = [
        {"source": "HABARI  ya\u00a0asubuhi", "target": "Something else"},
        {"source": "Kitu kingine", "target": "Ｔhank you very much"},
        {"source": "Thank you very much", "target": "Asante sana"},  # on the other sides
        {"source": "Mbwa", "target": "Dog"},
    ]
    assert overlap(train, test) == 2
    assert overlap(train, train) == 3
    assert overlap(load_corpus(tmp_path, streaming=True).dataset, test) == 2
    fault("C7", "test sentences in the training corpus, counted", tried=2, survived=overlap(train, test))
