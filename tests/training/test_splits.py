import pytest

from metaphrase.corpus import load_corpus
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.corpus.text import normalised
from metaphrase.exceptions import CorpusError
from metaphrase.training.splits import held_out, replay, split, split_all, write_split


def pairs_of(n, language="sw", *, repeat=0):
    sources = [f"chanzo {i}" for i in range(n)]
    targets = [f"source {i % (n - repeat)}" for i in range(n)]
    return ParallelSet(language, tuple(sources), tuple(targets))


def test_held_out_sentences_are_not_trained_on():
    one = split(pairs_of(1000, repeat=300), seed=3)
    sides = [
        [{side.casefold() for side in column} for column in zip(*part, strict=True)]
        for part in (one.train, one.dev, one.test)
    ]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for column in (0, 1):
            assert not sides[first][column] & sides[second][column]
    assert 50 < len(one.test) <= 100
    assert 50 < len(one.dev) <= 100
    assert len(one.train) + len(one.dev) + len(one.test) + one.excluded == 1000
    assert one.excluded > 0


def test_sentences_of_what_is_searched_are_told_apart():
    one = split(pairs_of(1000, repeat=300), seed=3)
    for part in (one.dev, one.test):
        for column in zip(*part, strict=True):
            assert len(set(column)) == len(column)


def test_copies_in_another_unicode_form_or_spacing_count_once():
    pairs = pairs_of(1000)
    copies = ParallelSet(
        "sw", tuple(f"e\u0301 {one}" for one in pairs.sources), tuple(f"{one} " for one in pairs.targets)
    )
    both = [tuple(f"\u00e9  {one}" for one in pairs.sources) + copies.sources, pairs.targets + copies.targets]
    one, whole = split(copies, seed=3), split(ParallelSet("sw", *both), seed=3)
    assert [len(one.train), len(one.dev), len(one.test)] == [len(whole.train), len(whole.dev), len(whole.test)]
    assert all(source.startswith("\u00e9  ") for source, _ in whole.train)  # the first of the copies


def test_what_one_language_holds_out_no_other_is_trained_on():
    """The English sides of interfaces are the same in every language."""
    sets = {code: pairs_of(n, code) for code, n in (("sw", 1000), ("te", 900), ("fi", 1000))}
    own = {code: sets[code] for code in ("sw", "te")}
    splits = split_all(own, seed=1)
    held = held_out(splits.values())
    mixed_in = replay({"fi": sets["fi"]}, 10**6, held=held, seed=1)["fi"]
    for pairs in (splits["sw"].train, splits["te"].train, mixed_in):
        assert held.isdisjoint(normalised(side) for pair in pairs for side in pair)
        assert len(pairs) > 500
    tested = {normalised(side) for one in splits.values() for pair in one.test for side in pair}
    for one in splits.values():
        assert tested.isdisjoint(normalised(side) for pair in one.dev for side in pair)
    alone = [split(own[code], seed=1) for code in own]
    assert any(not tested.isdisjoint(normalised(target) for _, target in one.dev) for one in alone)
    assert any(not held.isdisjoint(normalised(target) for _, target in one.train) for one in alone)
    for code, one in splits.items():
        assert len(one.train) + len(one.dev) + len(one.test) + one.excluded == len(sets[code].sources)


def test_the_same_seed_divides_alike():
    assert split(pairs_of(400), seed=1) == split(pairs_of(400), seed=1)
    assert split(pairs_of(400), seed=1) != split(pairs_of(400), seed=2)


def test_large_corpora_hold_out_no_more_than_needed():
    one = split(pairs_of(20_000))
    assert (len(one.test), len(one.dev), len(one.train)) == (500, 250, 19_250)


def test_too_few_pairs_are_refused():
    with pytest.raises(CorpusError, match="has 99 different pairs"):
        split(ParallelSet("sw", tuple(f"a{i % 99}" for i in range(500)), tuple(f"b{i % 99}" for i in range(500))))


def test_pairs_that_all_repeat_a_sentence_are_refused():
    pairs = ParallelSet("sw", tuple(f"a{i}" for i in range(200)), tuple(f"b{i % 5}" for i in range(200)))
    with pytest.raises(CorpusError, match=r"sw repeats its sentences too often: 0 pairs for training"):
        split_all({"sw": pairs})


def test_replay_is_as_even_as_there_are_pairs():
    others = {code: pairs_of(n, code) for code, n in (("fi", 50), ("et", 1000), ("te", 1000))}
    chosen = replay(others, 650)
    assert {code: len(pairs) for code, pairs in chosen.items()} == {"et": 300, "fi": 50, "te": 300}
    assert chosen == replay(others, 650)
    assert all(len(set(pairs)) == len(pairs) for pairs in chosen.values())
    assert replay(others, 0) == {}
    assert sum(map(len, replay(others, 10**6).values())) == 2050


def test_what_is_written_is_read(tmp_path):
    pairs = [("habari ya asubuhi", "good morning"), ("line\tone\nand two", "x  y")]
    first = write_split(tmp_path, "sw", "train", pairs)
    assert first.name == "sw-en.train.tsv.gz"
    rows = load_corpus(str(tmp_path)).dataset
    assert [(row["source"], row["target"]) for row in rows] == [pairs[0], ("line one and two", "x y")]
    assert write_split(tmp_path / "again", "sw", "train", pairs).read_bytes() == first.read_bytes()
