import gzip
import tracemalloc

import pytest

from metaphrase.corpus.phrases import HEADER, Phrase, PhraseTable
from metaphrase.corpus.words import Words


def pair(source, target, links, languages=("de", "en")):
    return Words.of(source, languages[0]), Words.of(target, languages[1]), links


@pytest.fixture
def table():
    return PhraseTable.of(
        [
            pair("das Haus", "the house", [(0, 0), (1, 1)]),
            pair("das Buch", "the book", [(0, 0), (1, 1)]),
            pair("das Haus", "The home", [(0, 0), (1, 1)]),
        ]
    )


def test_relative_frequencies_by_hand(table):
    phrases = {(phrase.source, phrase.target): phrase[2:] for phrase in table}
    assert phrases == {
        ("das", "the"): (3, 1, 1),
        ("haus", "house"): (1, 1 / 2, 1),
        ("haus", "home"): (1, 1 / 2, 1),
        ("buch", "book"): (1, 1, 1),
        ("das haus", "the house"): (1, 1 / 2, 1),
        ("das haus", "the home"): (1, 1 / 2, 1),
        ("das buch", "the book"): (1, 1, 1),
    }
    assert len(table) == 7


def test_score_and_membership_ignore_case(table):
    assert table.score(["Das", "Haus"], ["the", "HOUSE"]) == 0.5
    assert table.score(["das"], ["house"]) == 0
    assert (["DAS"], ["The"]) in table
    assert (["das"], ["house"]) not in table
    assert (("das", "haus"), ("the",)) not in table


def test_the_cut_and_the_least_count(table):
    assert {phrase.source for phrase in table.filter(0.75)} == {"das", "buch", "das buch"}
    assert len(table.filter(0.5)) == 7
    assert [phrase.source for phrase in table.filter(0, min_count=2)] == ["das"]
    assert len(table.filter(1.01)) == 0


def test_probabilities_add_up_to_one_given_either_side(bitext):
    table = PhraseTable.of_corpus(bitext)
    assert len(table) > 50
    for side, probability in (("source", "p_target"), ("target", "p_source")):
        sums = {}
        for phrase in table:
            sums[getattr(phrase, side)] = sums.get(getattr(phrase, side), 0) + getattr(phrase, probability)
        assert all(total == pytest.approx(1) for total in sums.values())


def test_no_phrase_is_longer_than_allowed(bitext):
    longest = max(len(text.split()) for phrase in PhraseTable.of_corpus(bitext, max_length=2) for text in phrase[:2])
    assert longest == 2


def test_probabilities_are_of_a_pair_of_languages():
    rows = [
        pair("fin", "end", [(0, 0)], ("fr", "en")),
        pair("fin", "end", [(0, 0)], ("es", "en")),
        pair("fin", "aim", [(0, 0)], ("es", "en")),
        pair("slut", "end", [(0, 0)], ("sv", "en")),
    ]
    table = PhraseTable.of(rows)
    assert table.score(["fin"], ["end"]) == 1
    assert table.score(["fin"], ["aim"]) == 0.5
    assert table.score(["slut"], ["end"]) == 1


def test_rows_count_their_words_with_their_segmenter():
    row = {"source": "我喜欢猫", "target": "I like cats", "source_lang": "zh", "target_lang": "en"}
    table = PhraseTable.of_corpus(
        [row | {"alignment": "0-0 1-1 2-2", "segmenter": "icu"}, row | {"alignment": None, "segmenter": None}]
    )
    assert (["喜欢", "猫"], ["like", "cats"]) in table
    assert len(table) == 6


@pytest.mark.parametrize("name", ["p.tsv.gz", "p.tsv"])
def test_saved_and_loaded(tmp_path, table, name):
    path = table.save(tmp_path / "new" / name)
    loaded = PhraseTable.load(path)
    assert list(loaded) == list(table)
    assert path.read_bytes() == loaded.save(tmp_path / name).read_bytes()
    assert [file.name for file in path.parent.iterdir()] == [name]
    content = path.read_bytes()
    lines = (gzip.decompress(content) if name.endswith(".gz") else content).decode().splitlines()
    assert lines[:2] == ["\t".join(HEADER), "buch\tbook\t1\t1\t1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"source\ttarget\na\tb\n", "the columns are not"),
        ("\t".join(HEADER).encode() + b"\na\tb\t1\n", "not enough values"),
        ("\t".join(HEADER).encode() + b"\na\tb\tmany\t1\t1\n", "invalid literal"),
        ("\t".join(HEADER).encode() + b"\na\tb\t1\tnan\t1\n", "line 2: .* but are 1, nan and 1"),
        ("\t".join(HEADER).encode() + b"\na\tb\t1\t1\t1\na\tc\t1\t1\tinf\n", "line 3: .* but are 1, 1 and inf"),
        ("\t".join(HEADER).encode() + b"\na\tb\t0\t1\t-1\n", "line 2: .* but are 0, 1 and -1"),
        ("\t".join(HEADER).encode() + b"\na\tb\t99999999999999999999\t1\t1\n", "line 2: the count"),
        (b"", "the columns are not"),
        (b"\xff", "utf-8"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, message):
    path = tmp_path / "x.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"x.tsv is not a phrase table, or is damaged: .*{message}"):
        PhraseTable.load(path)


def test_a_torn_file_is_refused(tmp_path, table):
    path = table.save(tmp_path / "p.tsv.gz")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="damaged"):
        PhraseTable.load(path)


def test_an_empty_table():
    table = PhraseTable()
    assert len(table) == 0
    assert table.score(["a"], ["b"]) == 0
    assert list(table.filter(0)) == []
    assert Phrase("a", "b", 2, 0.5, 1.0).n == 2


def test_a_table_needs_little_memory():
    tracemalloc.start()
    try:
        table = PhraseTable(Phrase(f"neno {i}", f"word {i}", 1, 0.5, 0.5) for i in range(10_000))
        assert tracemalloc.get_traced_memory()[0] < 250 * len(table)
    finally:
        tracemalloc.stop()
