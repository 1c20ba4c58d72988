import json
import random
from collections import Counter

import pytest
from datasets import Dataset

from metaphrase.corpus import Cleaning, load_corpus
from metaphrase.corpus.checks import check_pairs
from metaphrase.corpus.parallel import ParallelSet
from tests.corpus.samples import dropped, many, moses, pairs_of, tsv, write


def test_basic_cleaning(tmp_path):
    pairs = [
        ("  paka ", "cat"),
        ("paka", "cat"),
        ("paka", "Cat"),
        ("...", "cat"),
        ("paka", "—"),
        ("OK", "OK"),
        ("猫", "cat"),
    ]
    path = tsv(tmp_path / "sw-en.tsv", pairs)
    corpus = load_corpus(path)
    assert pairs_of(corpus) == [("paka", "cat"), ("paka", "Cat"), ("OK", "OK"), ("猫", "cat")]
    assert dropped(corpus) == {"duplicate": 1, "no words": 2}
    assert pairs_of(load_corpus(path, cleaning=None)) == pairs
    assert len(load_corpus(path, cleaning=Cleaning(duplicates=False)).dataset) == 5


BLANKS = ["", " ", "\u00a0\u3000 ", "\u2028", "...", "—!?", "\u200b", "()[]{}", "，。"]


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("kind", ["tsv", "jsonl", "moses"])
def test_sides_without_words_in_every_combination(tmp_path, kind, streaming, fault):
    """Each goes with its links and its reason; the pairs around it keep theirs."""
    good = [("paka mweusi", "black cat", "0-1 1-0"), ("mbwa wawili", "two dogs", "0-1")]
    bad = [
        pair for blank in BLANKS for pair in ((blank, "cat"), ("paka", blank), *((blank, other) for other in BLANKS))
    ]
    rows = [good[0], *((source, target, "") for source, target in bad), good[1]]
    if kind == "tsv":
        corpus = tsv(tmp_path / "sw-en.tsv", rows, "source\ttarget\talignment")
    elif kind == "jsonl":
        records = [dict(zip(("source", "target", "alignment"), row, strict=True)) for row in rows]
        corpus = write(tmp_path / "sw-en.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    else:
        corpus = moses(tmp_path, pairs=[row[:2] for row in rows])
    corpus = load_corpus(corpus, streaming=streaming)
    assert [row.get("alignment") for row in corpus.dataset] == (
        [None] * 2 if kind == "moses" else [row[2] for row in good]
    )
    assert pairs_of(corpus) == [row[:2] for row in good]
    empty = sum(not {*BLANKS[:4], "\u200b"}.isdisjoint(pair) for pair in bad)
    assert dropped(corpus) == {"empty side": empty, "no words": len(bad) - empty}
    fault(
        "C4", "a side that is empty, blank or without letters", tried=len(bad), survived=corpus.report.dropped.total()
    )


def test_repeated_pairs_are_dropped_once_read(tmp_path, fault):
    generator = random.Random(0)
    pairs = many(700)
    repeated = pairs + generator.choices(pairs, k=300)
    generator.shuffle(repeated)
    corpus = load_corpus(tsv(tmp_path / "sw-en.tsv", repeated))
    assert sorted(pairs_of(corpus)) == sorted(pairs)
    assert dropped(corpus) == {"duplicate": 300}
    fault("C6", "repeated pairs, dropped", tried=300, survived=corpus.report.dropped["duplicate"])


def test_copies_in_another_unicode_form_or_spacing_are_duplicates(tmp_path):
    pairs = [
        ("Caf\u00e9 noir", "Coffee"),
        ("Cafe\u0301 noir", "Coffee"),
        ("Caf\u00e9\u00a0 noir", "Coffee"),
        ("Cafe noir", "Coffee"),
    ]
    corpus = load_corpus(tsv(tmp_path / "fr-en.tsv", pairs))
    assert pairs_of(corpus) == [pairs[0], pairs[3]]
    assert dropped(corpus) == {"duplicate": 2}
    (finding,) = check_pairs(ParallelSet("fr", *zip(*pairs, strict=True)))[:1]
    assert (finding.code, finding.count) == ("duplicates", 2)


def test_the_same_pair_in_two_languages_is_no_duplicate(tmp_path):
    tsv(tmp_path / "sw-en.tsv", [("Linux", "Linux"), ("Linux", "Linux")])
    tsv(tmp_path / "te-en.tsv", [("Linux", "Linux")])
    assert load_corpus(tmp_path).report.languages == {"sw": 1, "te": 1}


def words(n: int, prefix: str = "w") -> str:
    return " ".join(f"{prefix}{i}" for i in range(n))


@pytest.mark.parametrize(
    ("source", "target", "fault"),
    [
        (words(4, "a"), words(4), None),
        (words(3, "a"), words(4), "too few pieces"),
        (words(4, "a"), words(3), "too few pieces"),
        (words(4, "a"), words(32), None),  # 32 is never too long
        (words(4, "a"), words(33), "length ratio"),
        (words(20, "a"), words(40), None),
        (words(20, "a"), words(41), "length ratio"),
        (words(41), words(20, "a"), "length ratio"),
        (words(64, "a"), words(128), None),
        (words(65, "a"), words(66), "too many pieces"),
        (words(8, "a") + " a@b", words(8), "forbidden string"),
        (words(8, "a"), words(8) + " http", "forbidden string"),
        ("N/A", words(8), "placeholder"),
        (words(8), "N/A", "placeholder"),
        (words(4), words(4), "identical sides"),
        (words(5), "x " + words(4), None),  # not both sides have more than five pieces
        (words(6), words(3) + " " + words(3, "a"), "copied"),  # half of them
        (words(6), words(2) + " " + words(4, "a"), None),
        ("w0 w0 w0 a b c", "w0 d e f g h", "copied"),  # half of the source's, a sixth of the target's
        ("w0 d e f g h", "w0 w0 w0 a b c", "copied"),
    ],
)
def test_daps_filters(source, target, fault):
    assert Cleaning.dap(str.split).fault(source, target) == fault


def test_daps_filters_as_the_released_code_has_them():
    """Against a transcription of the published conditions, on random pairs near every limit."""

    def keeps(one: str, two: str) -> bool:
        if "@" in one or "@" in two or "http" in one or "http" in two or "N/A" in (one, two):
            return False
        ones, twos = one.split(), two.split()
        n, m = len(ones), len(twos)
        if min(n, m) <= 3 or max(n, m) > max(2 * min(n, m), 32) or min(n, m) > 64 or one == two:
            return False
        if min(n, m) <= 5:
            return True
        return 2 * sum(w in twos for w in ones) < n and 2 * sum(w in ones for w in twos) < m

    generator = random.Random(0)
    cleaning = Cleaning.dap(str.split)
    outcomes = Counter()
    for _ in range(3000):
        n = generator.choice([2, 3, 4, 5, 6, 7, 12, 20, 31, 33, 63, 64, 65, 66])
        m = max(1, round(n * generator.choice([0.5, 1, 1, 1, 1.9, 2, 2.1, 5])))
        shared = generator.choice([4, 20, 200, 2000])
        one, two = (" ".join(f"w{generator.randrange(shared)}" for _ in range(k)) for k in (n, m))
        assert (cleaning.fault(one, two) is None) == keeps(one, two)
        outcomes[cleaning.fault(one, two)] += 1
    assert set(outcomes) >= {None, "too few pieces", "length ratio", "too many pieces", "copied"}
    assert min(outcomes[reason] for reason in (None, "copied", "length ratio")) > 100


def test_dap_tidies():
    assert Cleaning.dap().tidy('a\tb "c"\x07d\x0be\x7f\x00\nf\r') == "a b cde f"
    assert Cleaning().tidy(' a "b"\x07 ') == 'a "b"\x07'


def test_ppas_filters():
    cleaning = Cleaning.ppa(str.split)
    assert cleaning.fault(words(9), words(10)) == "too few pieces"
    assert cleaning.fault(words(10), words(9)) == "too few pieces"
    assert cleaning.fault(words(10), words(118)) is None
    assert cleaning.fault(words(11), words(118)) == "too many pieces"


def test_pieces_need_a_tokenizer(tmp_path, tokenizer):
    path = tsv(tmp_path / "sw-en.tsv", [*many(3), ("a@b neno neno", "one two three"), ("a b c d", "e f g h")])
    with pytest.raises(ValueError, match="counts pieces: pass a tokenizer"):
        load_corpus(path, cleaning=Cleaning.dap())
    assert dropped(load_corpus(path, cleaning=Cleaning.dap().without_pieces())) == {"forbidden string": 1}
    assert dropped(load_corpus(path, cleaning=Cleaning.dap(), tokenizer=str.split))["too few pieces"] == 3
    assert load_corpus(path, cleaning=Cleaning(min_pieces=1), tokenizer=tokenizer).report.kept == 5


def test_limit_is_per_language(tmp_path):
    tsv(tmp_path / "a.sw-en.tsv", many(5))
    tsv(tmp_path / "b.sw-en.tsv", many(5, "kitu"))
    tsv(tmp_path / "te-en.tsv", many(3))
    for streaming in (False, True):
        corpus = load_corpus(tmp_path, limit=7, streaming=streaming)
        assert Counter(row["source_lang"] for row in corpus.dataset) == {"sw": 7, "te": 3}
    rows = [(*pair, "sw") for pair in many(5)]
    mixed = tsv(tmp_path / "mixed.tsv", rows, "source\ttarget\tsource_lang")
    assert dropped(load_corpus(mixed, limit=2)) == {"beyond the limit": 3}


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "parquet", "memory"])
def test_limit_of_a_language_does_not_end_a_file_with_other_languages(tmp_path, suffix):
    rows = [
        {"source": f"{language} neno {i}", "target": f"{language} word {i}", "source_lang": language}
        for language in ("sw", "te", "sw", "ha")
        for i in range(4)
    ]
    data, corpus = Dataset.from_list(rows), tmp_path / f"mixed.{suffix}"
    if suffix == "memory":
        corpus = data
    elif suffix == "parquet":
        data.to_parquet(corpus)
    elif suffix == "jsonl":
        data.to_json(corpus)
    else:
        data.to_csv(corpus, sep="\t" if suffix == "tsv" else ",", index=False)
    kept = load_corpus(corpus, source_lang="sw", limit=2).report.languages
    assert kept == {"sw": 2, "te": 2, "ha": 2}
    assert load_corpus(corpus, languages=["sw"], limit=2).report.read == 2
    assert load_corpus(corpus, languages=["te", "sw"], limit=2).report.languages == {"sw": 2, "te": 2}


def test_a_file_in_one_language_is_read_up_to_the_limit(tmp_path):
    path = tsv(tmp_path / "pairs.tsv", many(5), "source\ttarget")
    assert load_corpus(path, source_lang="sw", limit=2).report.read == 2
