from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.functional import pooled_spans
from metaphrase.modeling.views import (
    UNSCORED,
    Batch,
    concatenated,
    kept_links,
    links_view,
    masked_sentence,
    mutual_links,
    paired,
    source_view,
    swapped,
)
from metaphrase.objectives.aligned_word_prediction import MaskedWords
from tests.oracles import mutual_links_loop


def build(view, rows, tokenizer, seed=1):
    return view.build(Batch(rows, tokenizer), [np.random.default_rng((seed, i)) for i in range(len(rows))])


def row(source, target, alignment="", **more):
    return {
        "source": source,
        "target": target,
        "source_lang": "de",
        "target_lang": "en",
        "alignment": alignment,
        **more,
    }


class TestLinks:
    def test_spans_cover_exactly_the_pieces_of_each_word(self, tokenizer, bitext):
        links = build(links_view(32), bitext, tokenizer)
        sources = build(source_view(32), bitext, tokenizer)
        for example, ids, spans in zip(bitext, sources["input_ids"], links["source_spans"], strict=True):
            words = example["source"].split()
            assert (spans[len(words) :] == 0).all()
            for word, (start, end) in zip(words, spans.tolist(), strict=False):
                assert tokenizer.decode(ids[start:end]).replace(" ", "").replace("##", "") == word.lower()

    def test_links_are_those_of_the_corpus(self, tokenizer, bitext):
        links = build(links_view(32), bitext, tokenizer)["links"]
        for example, rows in zip(bitext, links.tolist(), strict=True):
            kept = " ".join(f"{i}-{j}" for i, j in rows if i >= 0)
            assert kept == example["alignment"]

    def test_a_cut_word_drops_its_links(self, tokenizer):
        pair = row("der Hund trinkt Wasser", "the dog drinks water", "0-0 1-1 2-2 3-3")
        whole = build(links_view(32), [pair], tokenizer)
        last = int(whole["source_spans"][0, 3, 0])
        cut = build(links_view(last + 1), [pair], tokenizer)  # no place for the last word and the separator
        assert cut["source_spans"][0, 3].tolist() == [0, 0]
        assert cut["links"][0].tolist() == [[0, 0], [1, 1], [2, 2]]

    def test_a_word_with_remaining_pieces_is_cut_too(self, tokenizer):
        pair = row("Wasser schläftnichtgut", "water", "1-0")
        start, end = build(links_view(32), [pair], tokenizer)["source_spans"][0, 1].tolist()
        assert end - start > 2
        cut = build(links_view(end), [pair], tokenizer)  # its last piece gives way to the separator
        assert cut["source_spans"][0, 1].tolist() == [0, 0]
        assert cut["links"].shape == (1, 0, 2)

    def test_a_truncated_word_loses_its_links(self, tokenizer):
        pair = row("der Hund trinkt Wasser", "the dog", "0-0 3-1 1-1", alignment_scores="0.5 0.25 0.125")
        whole = build(links_view(32), [pair], tokenizer)
        last = int(whole["source_spans"][0, 3, 0])
        cut = build(links_view(last + 1), [pair, row("der", "the", "0-0")], tokenizer)
        assert cut["links"].tolist() == [[[0, 0], [1, 1]], [[0, 0], [-1, -1]]]

    def test_a_link_given_twice_is_one_link_with_the_higher_score(self, tokenizer):
        pair = row("der Hund", "the dog", "0-0 1-1 0-0", alignment_scores="0.25 0.5 0.75")
        assert build(links_view(32), [pair], tokenizer)["links"].tolist() == [[[0, 0], [1, 1]]]
        spans = [Batch([pair], tokenizer).words(side, 32)[0] for side in ("source", "target")]
        assert list(kept_links(pair, *spans).values()) == [0.75, 0.5]
        assert build(links_view(3), [pair], tokenizer)["links"].tolist() == [[[0, 0]]]

    @settings(max_examples=80)
    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), unique=True, max_size=12), st.data())
    def test_mutual_links_match_loop(self, links, data):
        scores = data.draw(st.lists(st.sampled_from([0.2, 0.5, 1.0]), min_size=len(links), max_size=len(links)))
        kept = mutual_links(links, scores)
        assert kept == mutual_links_loop(links, scores)
        assert len({x for x, _ in kept}) == len({y for _, y in kept}) == len(kept)
        assert mutual_links(kept, [1.0] * len(kept)) == kept
        assert bool(kept) == bool(links)

    def test_mutual_links_are_decided_before_truncation(self, tokenizer):
        pair = row("der Hund", "the dog", "0-0 1-0", alignment_scores="0.5 0.9")
        assert build(links_view(32, mutual=True), [pair], tokenizer)["links"].tolist() == [[[1, 0]]]
        cut = build(links_view(3, mutual=True), [pair], tokenizer)
        assert cut["links"].shape == (1, 0, 2)

    def test_words_of_unspaced_languages(self, tokenizer):
        pair = {**row("我爱北京天安门", "I", "0-0"), "source_lang": "zh"}
        assert build(links_view(32), [pair], tokenizer)["source_spans"].shape[1] == 1
        assert build(links_view(32), [{**pair, "segmenter": "icu"}], tokenizer)["source_spans"].shape[1] == 4

    @pytest.mark.parametrize("more", [{"alignment": "0-7"}, {"alignment": "0-0", "alignment_scores": "1 1"}])
    def test_links_that_do_not_fit_are_refused(self, tokenizer, more):
        with pytest.raises(ValueError, match=r"does not fit a pair of 1 and 1 words.*metaphrase align"):
            build(links_view(32), [{**row("der", "the"), **more}], tokenizer)

    def test_the_collator_asks_for_the_column(self, tokenizer):
        rows = [{"source": "der", "target": "the"}]
        with pytest.raises(ValueError, match=r"'links' reads the column 'alignment'.*metaphrase align"):
            ParallelCollator(tokenizer, (links_view(32),))(rows)


def crossing(*pieces):
    """A tokenizer whose pieces cross the word boundaries of a language without spaces."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces, "i", "love", "cats"]
    inner = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **{f"{key}_token": name for key, name in names.items()})


class TestPiecesOfSeveralWords:
    def pair(self):
        words = {"source": "ฉันรักแมว", "target": "i love cats", "source_lang": "th", "target_lang": "en"}
        return {**words, "segmenter": "icu", "alignment": "0-0 1-1 2-2"}

    def test_words_share_no_states(self):
        tokenizer = crossing("ฉันรั", "##กแ", "##ม", "##ว")
        spans = build(links_view(16), [self.pair()], tokenizer)["source_spans"][0].tolist()
        assert spans == [[1, 2], [2, 3], [3, 5]]

    def test_masked_words_keep_their_own_labels(self):
        tokenizer = crossing("ฉันรั", "##กแ", "##ม", "##ว")
        i, love, cats, first, second, third = tokenizer.convert_tokens_to_ids(
            ["i", "love", "cats", "ฉันรั", "##กแ", "##ม"]
        )
        labels = {
            side: build(MaskedWords("w", side, 16), [self.pair()], tokenizer)["labels"][0].tolist()
            for side in ("source", "target")
        }
        assert labels["source"] == [UNSCORED, i, love, cats, UNSCORED, UNSCORED]
        assert labels["target"] == [UNSCORED, first, second, third, UNSCORED]

    def test_a_word_that_keeps_no_piece_drops_its_links(self):
        built = build(links_view(16), [self.pair()], crossing("ฉันรัก", "##แมว"))
        assert built["source_spans"][0].tolist() == [[1, 2], [0, 0], [2, 3]]
        assert built["links"][0].tolist() == [[0, 0], [2, 2]]


class TestConcatenated:
    pair = row("der Hund trinkt", "the dog")

    def test_pair_layout_is_the_tokenizers_own(self, tokenizer):
        view = concatenated(32, 0.0, positions="continuous", layout="pair", segments=True)
        built = build(view, [self.pair], tokenizer)
        own = tokenizer(self.pair["source"], self.pair["target"])
        first = len(tokenizer(self.pair["source"])["input_ids"])
        assert built["input_ids"][0].tolist() == own["input_ids"]
        assert built["token_type_ids"][0].tolist() == [0] * first + [1] * (len(own["input_ids"]) - first)
        assert built["position_ids"][0].tolist() == list(range(len(own["input_ids"])))

    def test_xlmr_pairs_have_two_separators(self, tokenizer):
        class Doubled:
            sep_token_id = 2

            def num_special_tokens_to_add(self, pair=False):
                return 4 if pair else 2

        assert paired([0, 876, 2], Doubled()) == [2, 876, 2]
        assert paired([tokenizer.cls_token_id, 7, 8], tokenizer) == [7, 8]

    def test_half_of_the_pairs_are_swapped_and_every_view_agrees(self, tokenizer):
        rows = [row(f"der {i}", f"the {i}") for i in range(300)]
        shuffled = build(concatenated(32, 0.0, order="shuffled"), rows, tokenizer)["input_ids"]
        straight = build(concatenated(32, 0.0), rows, tokenizer)["input_ids"]
        changed = [bool((a != b).any()) for a, b in zip(shuffled, straight, strict=True)]
        assert changed == [swapped(np.random.default_rng((1, i))) for i in range(300)]
        assert 120 < sum(changed) < 180

    def test_monolingual_texts(self, tokenizer):
        view = concatenated(32, 0.0, layout="pair", segments=True, positions="continuous", monolingual=True)
        rows = [{"monolingual": ["der Hund\nthe dog", "das Auto"]}, {"monolingual": []}]
        built = build(view, rows, tokenizer)
        assert view.columns == ("monolingual",)
        assert built["input_ids"].shape[0] == 2
        assert built["input_ids"][0].tolist() == tokenizer("der Hund", "the dog")["input_ids"]
        assert built["attention_mask"][1].sum() == len(tokenizer("das Auto")["input_ids"])

    def test_a_batch_without_monolingual_text_has_nothing_to_predict(self, tokenizer):
        view = concatenated(32, 0.9, monolingual=True)
        built = build(view, [{"monolingual": []}, {"monolingual": []}], tokenizer)
        assert built["input_ids"].tolist() == [[tokenizer.cls_token_id, tokenizer.sep_token_id]]
        assert (built["labels"] == UNSCORED).all()

    def test_views_of_different_settings_have_different_names(self):
        names = {
            concatenated(32, 0.15).name,
            concatenated(32, 0.2).name,
            concatenated(32, 0.2, positions="continuous").name,
            concatenated(32, 0.2, layout="pair").name,
            concatenated(32, 0.2, segments=True).name,
            concatenated(32, 0.2, order="shuffled").name,
            concatenated(32, 0.2, monolingual=True).name,
            masked_sentence("source", 32, 0.2).name,
            masked_sentence("target", 32, 0.2).name,
        }
        assert len(names) == 9

    def test_equal_settings_have_equal_names(self):
        view = concatenated(32, 0.2, positions="continuous", layout="pair", segments=True)
        assert view.name == "concatenated-0.2-continuous-pair-segments"
        assert concatenated(32, 0.2, segments=True, layout="pair", positions="continuous", order="pair") == view
        assert concatenated(32, 0.2, positions="reset", monolingual=False) == concatenated(32, 0.2)


def test_what_two_views_mask_are_independent_draws(tokenizer):
    words = " ".join(["der"] * 28)
    rows = [row(words, words, monolingual=[words]) for _ in range(60)]
    views = [masked_sentence("source", 32, 0.4), masked_sentence("target", 32, 0.4)]
    views += [concatenated(32, 0.4, monolingual=True)]
    masked = torch.stack([(build(v, rows, tokenizer)["labels"][:, 1:29] != UNSCORED).flatten() for v in views])
    correlation = torch.corrcoef(masked.double())
    assert masked.double().mean(1).sub(0.4).abs().max() < 0.05
    assert correlation.fill_diagonal_(0).abs().max() < 0.1


def test_masked_sentence(tokenizer, bitext):
    plain = build(source_view(32), bitext, tokenizer)
    masked = build(masked_sentence("source", 32, 0.5), bitext, tokenizer)
    scored = masked["labels"] != UNSCORED
    assert 0.3 < scored.sum() / (plain["attention_mask"].sum() - 2 * len(bitext)) < 0.7
    assert torch.equal(torch.where(scored, masked["labels"], masked["input_ids"]), plain["input_ids"])


def test_pooled_spans_matches_loop():
    torch.manual_seed(0)
    tokens = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    spans = torch.tensor([[[1, 2], [2, 5], [0, 0]], [[0, 7], [3, 4], [4, 6]], [[0, 0], [0, 0], [6, 7]]])
    expected = torch.stack(
        [
            torch.stack([tokens[b, i:j].mean(0) if j > i else torch.zeros(5, dtype=torch.float64) for i, j in row])
            for b, row in enumerate(spans.tolist())
        ]
    )
    actual = pooled_spans(tokens, spans)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((x * weight).sum(), tokens, retain_graph=True)[0] for x in (actual, expected)]
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_a_link_that_is_repeated_has_its_highest_score():
    example = {"source": "a", "target": "b", "alignment": "0-0 0-0 0-0", "alignment_scores": "0.5 0.9 0.2"}
    spans = np.array([[1, 2]])
    assert kept_links(example, spans, spans) == {(0, 0): 0.9}
