from metaphrase.corpus import load_corpus
from metaphrase.corpus.checks import check_leakage
from metaphrase.corpus.overlap import overlap
from metaphrase.corpus.parallel import ParallelSet
from tests.corpus.samples import tsv


def test_overlap(tmp_path, fault):
    train = load_corpus(tsv(tmp_path / "sw-en.tsv")).dataset
    pairs = [
        ("HABARI  ya\u00a0asubuhi", "Something else"),
        ("Kitu kingine", "Ｔhank you very much"),
        ("Thank you very much", "Asante sana"),  # on the other sides
        ("Mbwa", "Dog"),
    ]
    test = {"sw": ParallelSet("sw", *map(tuple, zip(*pairs, strict=True)))}
    assert overlap(train, test) == 2
    assert overlap(train, train) == 3
    assert overlap(load_corpus(tmp_path, streaming=True).dataset, test) == 2
    fault("C7", "test sentences in the training corpus, counted", tried=2, survived=overlap(train, test))


def test_the_unicode_form_does_not_hide_an_overlap():
    forms = (
        {"fr": ParallelSet("fr", ("Caf\u00e9",), ("Co\u00f6p",))},
        {"fr": ParallelSet("fr", ("Cafe\u0301",), ("Coo\u0308p",))},
    )
    assert overlap(*forms) == overlap(*forms[::-1]) == 1


def test_training_and_checks_agree_on_sentences_that_languages_have_in_common():
    train = {"sw": ParallelSet("sw", ("Nairobi 1963", "Habari"), ("Nairobi, 1963", "Hello"))}
    test = {"te": ParallelSet("te", ("Nairobi 1963", "హలో"), ("In Nairobi", "Hello"))}
    assert overlap(train, test) == sum(finding.count for finding in check_leakage(train, test)) == 1
    assert overlap(train, {"sw-KE": test["te"]}) == 2
    assert overlap(train, {}) == 0
