import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import FNetConfig, FNetModel

from metaphrase.corpus.words import parse_links
from metaphrase.exceptions import ModelError
from metaphrase.objectives.base import HeadSources
from metaphrase.objectives.word_contrast import (
    WordContrast,
    WordStates,
    hard_word_contrast,
    soft_word_contrast,
    word_states,
)
from tests.oracles import assert_same_loss, hard_word_contrast_loop, padded, soft_word_contrast_loop, word_places

ROWS = (6, 15, 22, 19)


def sides(encodings):
    return [encodings[side].tokens_blh for side in ("source", "target")]


def words_of(states, row, side, tokenizer, units="mean"):
    """Vectors of words and of pieces."""
    places = word_places(row, side, tokenizer)
    words = [states[at[0]] if units == "first" else sum(states[i] for i in at) / len(at) for at in places]
    return words, [states[i] for at in places for i in at]


@pytest.mark.parametrize("units", ["mean", "first"])
@pytest.mark.parametrize("reduction", ["anchor_mean", "sum"])
def test_hard_matches_loop(make_loss, encodings_of, bitext, tokenizer, units, reduction):
    loss = make_loss("word-contrast", units=units, reduction=reduction)
    rows = [bitext[i] for i in ROWS]
    encodings = encodings_of(loss, rows)
    leaves = sides(encodings)
    words = [
        [words_of(leaf[i], row, side, tokenizer, units)[0] for i, row in enumerate(rows)]
        for leaf, side in zip(leaves, ("source", "target"), strict=True)
    ]
    links = [parse_links(row["alignment"]) for row in rows]
    assert any(len(pairs) < len(row["target"].split()) for pairs, row in zip(links, rows, strict=True))
    slow = hard_word_contrast_loop(*words, links, summed=reduction == "sum")
    assert_same_loss(loss.objectives["word-contrast"](encodings), slow, leaves)


def test_mutual_anchors_match_loop(make_loss, encodings_of, bitext, tokenizer):
    """Section 2.2: only mutual links are anchors, all other words of the sentence are negatives."""
    loss = make_loss("word-contrast", mutual=True)
    rows = [
        {**bitext[6], "alignment": "0-0 0-1 1-1 2-2 3-2", "alignment_scores": "0.9 0.5 0.8 0.3 0.7"},
        {**bitext[15], "alignment": "0-0 1-0 1-1"},
    ]
    mutual = [[(0, 0), (1, 1), (3, 2)], [(0, 0)]]
    encodings = encodings_of(loss, rows)
    leaves = sides(encodings)
    words = [
        [words_of(leaf[i], row, side, tokenizer)[0] for i, row in enumerate(rows)]
        for leaf, side in zip(leaves, ("source", "target"), strict=True)
    ]
    assert_same_loss(loss.objectives["word-contrast"](encodings), hard_word_contrast_loop(*words, mutual), leaves)


@pytest.mark.parametrize("units", ["mean", "first"])
@pytest.mark.parametrize("reduction", ["anchor_mean", "sum"])
def test_soft_matches_loop(make_loss, encodings_of, bitext, tokenizer, units, reduction):
    loss = make_loss("word-contrast", kind="soft", units=units, reduction=reduction)
    rows = [bitext[i] for i in ROWS]
    encodings = encodings_of(loss, rows)
    leaves = sides(encodings)
    head = loss.objectives["word-contrast"].head
    torch.nn.init.normal_(head.in_proj_bias)
    torch.nn.init.normal_(head.out_proj.bias)
    words = [
        [words_of(leaf[i], row, side, tokenizer, units) for i, row in enumerate(rows)]
        for leaf, side in zip(leaves, ("source", "target"), strict=True)
    ]
    slow = soft_word_contrast_loop(head, *words, summed=reduction == "sum")
    assert_same_loss(loss.objectives["word-contrast"](encodings), slow, [*leaves, *head.parameters()])


def states(*words):
    """States of one sentence whose words are one piece each."""
    words_bwh = torch.tensor([words], dtype=torch.float64)
    real = torch.ones(words_bwh.shape[:2], dtype=torch.bool)
    return WordStates(words_bwh, real, words_bwh, real)


def test_a_number_by_hand():
    source, target = states((1.0, 0.0)), states((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0))
    value = hard_word_contrast(source, target, torch.tensor([[[0, 0]]]), reduction="sum")
    assert value.item() == pytest.approx(4.5400960e-05, rel=1e-7)  # its other direction has one candidate: 0
    assert value.item() == pytest.approx(math.log(1 + math.exp(-10) + math.exp(-20)), rel=1e-9)


def test_directions_are_swapped_with_the_sides():
    source, target = states((1.0, 0.2), (0.3, 1.0)), states((1.0, 0.0), (0.0, 1.0), (-1.0, 0.4))
    links = torch.tensor([[[0, 0], [1, 2]]])
    one = hard_word_contrast(source, target, links)
    torch.testing.assert_close(hard_word_contrast(target, source, links.flip(-1)), one)
    attention = torch.nn.MultiheadAttention(2, 1, batch_first=True, dtype=torch.float64)
    torch.testing.assert_close(
        soft_word_contrast(attention, target, source), soft_word_contrast(attention, source, target)
    )
    assert one > 0


def test_other_partners_of_an_anchor_can_be_masked():
    source, target = states((1.0, 0.0)), states((1.0, 0.0), (1.0, 0.1), (0.0, 1.0))
    links = torch.tensor([[[0, 0], [0, 1]]])
    plain, spared = (hard_word_contrast(source, target, links, mask_positives=mask) for mask in (False, True))
    assert plain > math.log(2) / 2
    assert 0 < spared < 1e-3


@pytest.mark.parametrize("words", [2, 5])
def test_attention_to_all_alike_scores_log_words(words):
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    torch.nn.init.zeros_(attention.in_proj_weight[:8])
    source, target = (states(*torch.randn(words, 4).tolist()) for _ in range(2))
    value = soft_word_contrast(attention, source, target, reduction="anchor_mean")
    assert value.item() == pytest.approx(math.log(words), rel=1e-12)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_sentence_of_one_word_costs_nothing(make_loss, encodings_of, bitext, kind):
    loss = make_loss("word-contrast", kind=kind)
    encodings = encodings_of(loss, [bitext[22]])
    value = loss.objectives["word-contrast"](encodings)
    value.backward()
    assert value.item() == 0
    assert not any(leaf.grad.any() for leaf in sides(encodings))


def test_without_links_the_loss_is_a_zero_with_a_graph(make_loss, encodings_of, bitext):
    loss = make_loss("word-contrast")
    encodings = encodings_of(loss, [{**row, "alignment": ""} for row in bitext[:3]])
    value = loss.objectives["word-contrast"](encodings)
    assert value.item() == 0
    value.backward()
    assert not any(leaf.grad.any() for leaf in sides(encodings))


def test_soft_is_refused_for_an_encoder_without_attention(tokenizer):
    config = FNetConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, intermediate_size=8)
    sources = HeadSources(FNetModel(config), tokenizer)
    with pytest.raises(ModelError, match=r"but FNetModel has no attention\. Use 'kind: hard'"):
        WordContrast(kind="soft").head_settings(sources)
    assert WordContrast(kind="hard").head_settings(sources) == {}


def test_soft_needs_no_links(make_loss, batch_of, bitext):
    loss = make_loss("word-contrast", kind="soft")
    assert not any(view.columns for view in loss.views)
    rows = [{key: row[key] for key in ("source", "target")} for row in bitext[:4]]
    assert loss(batch_of(loss, rows))["word-contrast"] > 0
    assert make_loss("word-contrast").objectives["word-contrast"].words.columns == ("alignment",)
    assert not list(make_loss("word-contrast").heads.parameters())


def test_a_side_without_words_leaves_the_other_pairs_alone(make_loss, encodings_of, bitext):
    """The normaliser of a tokenizer can remove a whole side, which leaves nothing to attend to."""
    loss = make_loss("word-contrast", kind="soft", reduction="sum")
    objective = loss.objectives["word-contrast"]
    alone = objective(encodings_of(loss, bitext[3:4]))
    encodings = encodings_of(loss, [{**bitext[4], "target": "\u200b\u200b"}, bitext[3]])
    assert not encodings["words"].features["target_spans"][0].any()
    value = objective(encodings)
    torch.testing.assert_close(value * 2, alone)
    value.backward()
    for leaf in sides(encodings):
        assert leaf.grad[1].abs().max() > 0
        assert not leaf.grad[0].any()


def test_the_head_is_as_wide_as_the_encoder(make_loss, tiny_encoder):
    head = make_loss("word-contrast", kind="soft").heads.heads["word-contrast"]
    assert head.num_heads == tiny_encoder[0].auto_model.config.num_attention_heads == 2
    assert head.dropout == tiny_encoder[0].auto_model.config.attention_probs_dropout_prob


@pytest.mark.parametrize("kind", ["hard", "soft"])
class TestProperties:
    def test_padding_changes_nothing(self, make_loss, encodings_of, bitext, kind):
        loss = make_loss("word-contrast", kind=kind)
        objective, encodings = loss.objectives["word-contrast"], encodings_of(loss, bitext)
        value = objective(encodings)
        longer = {**encodings, "source": padded(encodings["source"], 2), "target": padded(encodings["target"], 5)}
        features = longer[objective.words.name].features
        wider = {
            name: F.pad(features[name], (0, 0, 0, 3), value=-1 if name == "links" else 0)
            for name in features.keys() & {"source_spans", "target_spans", "links"}
        }
        longer[objective.words.name] = replace(longer[objective.words.name], features={**features, **wider})
        torch.testing.assert_close(objective(longer), value)
        value.backward()
        for side in ("source", "target"):
            grad, mask = encodings[side].tokens_blh.grad, encodings[side].mask_bl
            assert grad[mask].abs().max() > 0
            assert not grad[~mask].any()
            assert not grad[:, 0].any()  # a special token

    def test_the_order_of_the_batch_changes_nothing(self, make_loss, encodings_of, bitext, kind):
        loss = make_loss("word-contrast", kind=kind)
        objective = loss.objectives["word-contrast"]
        values = [objective(encodings_of(loss, rows)) for rows in (bitext, bitext[::-1])]
        torch.testing.assert_close(*values)

    def test_cut_words_are_excluded(self, make_loss, encodings_of, bitext, tokenizer, kind):
        loss = make_loss("word-contrast", kind=kind, max_length=8)
        encodings = encodings_of(loss, bitext[19:20])
        spans = encodings[loss.objectives["word-contrast"].words.name].features["source_spans"][0]
        kept = spans[:, 1] > 0
        assert 1 < kept.sum() < len(kept)
        source = encodings["source"]
        loss.objectives["word-contrast"](encodings).backward()
        inside = torch.zeros(source.mask_bl.shape[1], dtype=torch.bool)
        for start, end in spans[kept].tolist():
            inside[start:end] = True
        assert source.tokens_blh.grad[0][inside].any(dim=-1).all()
        assert not source.tokens_blh.grad[0][~inside].any()

    def test_half_precision(self, make_loss, encodings_of, bitext, kind):
        loss = make_loss("word-contrast", kind=kind)
        encodings = encodings_of(loss, bitext)
        wanted = loss.objectives["word-contrast"](encodings)
        halved = {
            name: encoding
            if encoding.tokens_blh is None
            else replace(encoding, tokens_blh=encoding.tokens_blh.bfloat16())
            for name, encoding in encodings.items()
        }
        loss.bfloat16()
        value = loss.objectives["word-contrast"](halved)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted, rtol=0.05, atol=0.01)


def test_a_perfect_alignment_scores_below_a_shuffled_one():
    words = torch.eye(4).tolist()
    right, wrong = torch.tensor([[[n, n] for n in range(4)]]), torch.tensor([[[n, (n + 1) % 4] for n in range(4)]])
    good, bad = (hard_word_contrast(states(*words), states(*words), links) for links in (right, wrong))
    assert good < 1e-3 < 1 < bad


def test_first_pieces():
    tokens = torch.arange(6.0).reshape(1, 6, 1)
    spans = torch.tensor([[[1, 3], [3, 4], [0, 0]]])
    assert word_states(tokens, spans).words_bwh.flatten().tolist() == [1.5, 3.0, 0.0]
    first = word_states(tokens, spans, units="first")
    assert first.words_bwh.flatten().tolist() == [1.0, 3.0, 0.0]
    assert first.word_bw.tolist() == [[True, True, False]]
    assert first.piece_bl.tolist() == [[False, True, True, True, False, False]]


@pytest.mark.parametrize(("argument", "value"), [("kind", "medium"), ("units", "last"), ("reduction", "mean")])
def test_unknown_settings_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"but (is|are) '{value}'"):
        WordContrast(**{argument: value})
