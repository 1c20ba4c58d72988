import re
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from metaphrase.corpus.words import Words, format_links, parse_links, phrase_pairs, piece_spans, word_spans
from metaphrase.exceptions import AlignmentFormatError
from tests.oracles import disjoint_pieces_loop

LINKS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


@st.composite
def aligned(draw, most=6):
    """Sizes of a pair and links between its words."""
    n_source, n_target = draw(st.integers(1, most)), draw(st.integers(1, most))
    links = draw(st.lists(st.tuples(st.integers(0, n_source - 1), st.integers(0, n_target - 1)), max_size=8))
    return links, n_source, n_target


# --------------------------------------------------------------------------------------------------------------- words


@given(st.text(max_size=40))
def test_whitespace_words_are_those_of_split(text):
    assert list(Words.of(text)) == text.split()


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        ("我喜欢猫。", "zh", ["我", "喜欢", "猫", "。"]),
        ("ฉันรักแมว😀สวัสดี hello there", "th", ["ฉัน", "รัก", "แมว", "😀", "สวัสดี", "hello", "there"]),
        ("𠮷野家 で", "ja", ["𠮷", "野家", "で"]),
        ("ខ្ញុំ\u200bស្រលាញ់", "km", ["ខ្ញុំ", "ស្រលាញ់"]),
        ("the cat's 猫", "en", ["the", "cat's", "猫"]),
        ("the cat", None, ["the", "cat"]),
        ("", "zh", []),
    ],
)
def test_icu_finds_words_where_no_spaces_stand(text, language, words):
    assert list(Words.of(text, language, "icu")) == words


@settings(max_examples=60)
@given(
    st.text(st.sampled_from("我喜欢猫。 ab1😀𠮷ใจรักแมวก็à\u3000\u0301\u200b\n"), max_size=30),
    st.sampled_from(["zh", "th", "ja", "km"]),
)
def test_icu_splits_further_and_loses_nothing(text, language):
    spans = word_spans(text, language, "icu")
    assert all(start < end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    covered = "".join(text[start:end] for start, end in spans)
    assert covered.replace("\u200b", "") == re.sub(r"[\s\u200b]", "", text)
    for start, end in spans:
        assert any(a <= start and end <= b for a, b in word_spans(text))


def test_an_unknown_segmenter_is_refused():
    with pytest.raises(ValueError, match="not 'spacy'"):
        word_spans("a", "zh", "spacy")


def test_without_icu_the_extra_is_named(monkeypatch):
    from metaphrase.corpus import words

    words._word_breaker.cache_clear()
    monkeypatch.setitem(sys.modules, "icu4py.breakers", None)
    with pytest.raises(ImportError, match=r"pip install '.*\[align\]'"):
        word_spans("猫", "zh", "icu")
    assert word_spans("cat", "en", "icu") == [(0, 3)]
    words._word_breaker.cache_clear()


# --------------------------------------------------------------------------------------------------------------- links


@given(LINKS)
def test_pharaoh_round_trip(links):
    assert parse_links(format_links(links)) == links


@pytest.mark.parametrize("text", ["0", "0-", "-1", "0--1", "0-1-2", "a-b", "0_1-2", "٣-١", "0-0,1-1", "0p1"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ValueError, match=f"'0-0 1-2', not '0-0 {re.escape(text)}'"):
        parse_links(f"0-0 {text}")


def test_links_that_are_not_text_are_refused():
    with pytest.raises(AlignmentFormatError, match=r"not \[\[0, 0\], \[1, 1\]\]\. Convert .*format_links\(pairs\)"):
        parse_links([[0, 0], [1, 1]])


# -------------------------------------------------------------------------------------------------------------- pieces


def wordpiece(pieces, max_length):
    vocab = ["[UNK]", "[CLS]", "[SEP]", *pieces]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    if max_length:
        tokenizer.enable_truncation(max_length)
    return tokenizer


def pieces_tokenizer(max_length):
    """Pieces of one or two characters, ``[CLS] … [SEP]``, in lower case and without carets."""
    alphabet = [chr(c) for c in range(ord("a"), ord("e"))] + ["é", "😀"]
    tokenizer = wordpiece([*alphabet, *("##" + c for c in alphabet), "ab", "##cd"], max_length)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace("^", "")])
    return tokenizer


@settings(max_examples=200)
@given(st.text("abcdAé😀^ ", max_size=20), st.integers(3, 12), st.sampled_from(["whitespace", "icu"]))
def test_pieces_of_whole_words_and_none_of_cut_ones(text, max_length, segmenter):
    words = Words.of(text, "zh", segmenter)
    cut, full = pieces_tokenizer(max_length).encode(text), pieces_tokenizer(None).encode(text)
    spans = piece_spans(cut, words)
    assert spans.shape == (len(words), 2)
    for (start, end), (first, last) in zip(words.spans, spans.tolist(), strict=True):
        own = [
            piece
            for piece, (a, b) in enumerate(full.offsets)
            if not full.special_tokens_mask[piece] and max(a, start) < min(b, end)
        ]
        whole = own and own[-1] < max_length - 1
        assert (first, last) == ((own[0], own[-1] + 1) if whole else (0, 0))


def crossing_tokenizer(max_length=None):
    """Pieces of one to three characters that do not stop at word boundaries."""
    characters = "ฉันรกแมว"
    pieces = [*characters, "ฉันรั", "ัก", "แมว", "รักแ", "นร", "กแ", "มวฉ"]
    return wordpiece([*pieces, *("##" + piece for piece in pieces)], max_length)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["ฉัน", "รัก", "แมว", "กก", "น", " "]), max_size=8))
def test_disjoint_spans_match_loop(parts):
    text, spans = "", []
    for part in parts:
        if part.strip():
            spans.append((len(text), len(text) + len(part)))
        text += part
    words = Words(text, tuple(spans), "th")
    encoding = crossing_tokenizer().encode(text)
    found = piece_spans(encoding, words, disjoint=True).tolist()
    owned = disjoint_pieces_loop(spans, encoding.offsets)
    assert found == [[pieces[0], pieces[-1] + 1] if pieces else [0, 0] for pieces in owned]
    covered = [piece for first, end in found for piece in range(first, end)]
    assert len(covered) == len(set(covered))
    assert sorted(covered) == [n for n in range(len(encoding.ids)) if not encoding.special_tokens_mask[n]]


def test_a_piece_of_two_words_belongs_to_the_one_with_more_of_its_characters():
    text = "ฉันรักแมว"
    words = Words.of(text, "th", "icu")
    assert list(words) == ["ฉัน", "รัก", "แมว"]
    encoding = crossing_tokenizer().encode(text)
    assert encoding.tokens[1:-1] == ["ฉันรั", "##กแ", "##ม", "##ว"]
    assert piece_spans(encoding, words).tolist() == [[1, 2], [1, 3], [2, 5]]
    assert piece_spans(encoding, words, disjoint=True).tolist() == [[1, 2], [2, 3], [3, 5]]


def test_a_word_that_keeps_no_piece_has_an_empty_span():
    words = Words("รักแ", ((0, 3), (3, 4)), "th")
    encoding = crossing_tokenizer().encode(words.text)
    assert encoding.tokens[1:-1] == ["รักแ"]
    assert piece_spans(encoding, words, disjoint=True).tolist() == [[1, 2], [0, 0]]


def test_a_disjoint_word_that_truncation_cut_has_an_empty_span():
    words = Words("ฉันรักแมว", ((0, 3), (3, 6), (6, 9)), "th")
    spans = piece_spans(crossing_tokenizer(4).encode(words.text), words, disjoint=True)
    assert spans.tolist() == [[1, 2], [2, 3], [0, 0]]


def test_words_of_a_real_tokenizer(tokenizer):
    text = "Paka anakunywa  maziwa"
    words = Words.of(text)
    encoding = tokenizer([text], truncation=True, max_length=32).encodings[0]
    spans = piece_spans(encoding, words)
    for (start, end), (first, last) in zip(words.spans, spans.tolist(), strict=True):
        assert encoding.offsets[first][0] == start
        assert encoding.offsets[last - 1][1] == end
    cut = tokenizer([text], truncation=True, max_length=int(spans[2, 1])).encodings[0]
    assert piece_spans(cut, words).tolist() == [*spans[:2].tolist(), [0, 0]]


def test_no_words_have_no_pieces(tokenizer):
    encoding = tokenizer([" "], truncation=True, max_length=8).encodings[0]
    assert piece_spans(encoding, Words.of(" ")).shape == (0, 2)


# ------------------------------------------------------------------------------------------------------------- phrases


def phrases_by_definition(links, n_source, n_target, max_length):
    """Every pair of spans that a link joins and no link leaves."""
    found = []
    for i1 in range(n_source):
        for i2 in range(i1 + 1, n_source + 1):
            for j1 in range(n_target):
                for j2 in range(j1 + 1, n_target + 1):
                    inside = [(i, j) for i, j in links if i1 <= i < i2 and j1 <= j < j2]
                    leaving = [(i, j) for i, j in links if (i1 <= i < i2) != (j1 <= j < j2)]
                    if inside and not leaving and i2 - i1 <= max_length and j2 - j1 <= max_length:
                        found.append(((i1, i2), (j1, j2)))
    return found


@settings(max_examples=300)
@given(aligned(), st.integers(1, 7))
def test_phrases_are_those_of_the_definition(pair, max_length):
    assert phrase_pairs(*pair, max_length=max_length) == phrases_by_definition(*pair, max_length)


@given(aligned())
def test_phrases_turn_round_with_their_pair(pair):
    links, n_source, n_target = pair
    turned = phrase_pairs([(j, i) for i, j in links], n_target, n_source)
    assert sorted((a, b) for b, a in turned) == phrase_pairs(links, n_source, n_target)


def test_the_phrases_of_crossing_links():
    found = phrase_pairs([(0, 0), (1, 2), (2, 1)], 3, 3)
    assert found == [((0, 1), (0, 1)), ((0, 3), (0, 3)), ((1, 2), (2, 3)), ((1, 3), (1, 3)), ((2, 3), (1, 2))]


def test_words_without_links_extend_phrases():
    assert phrase_pairs([(0, 1)], 1, 3) == [((0, 1), (0, 2)), ((0, 1), (0, 3)), ((0, 1), (1, 2)), ((0, 1), (1, 3))]
    assert phrase_pairs([], 2, 2) == []


def test_a_piece_belongs_to_the_word_of_most_of_its_characters():
    """The first piece is one character of the first word and two of the second; in a tie, the first word has it."""
    words = Words("abcde", ((0, 1), (1, 4), (4, 5)))
    encoding = SimpleNamespace(offsets=[(0, 3), (3, 5)], special_tokens_mask=[0, 0], overflowing=[])
    assert piece_spans(encoding, words, disjoint=True).tolist() == [[0, 0], [0, 2], [0, 0]]
    assert piece_spans(encoding, words).tolist() == [[0, 1], [0, 2], [1, 2]]
