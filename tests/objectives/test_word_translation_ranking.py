import math

import pytest
import torch

from metaphrase.modeling.collator import ParallelCollator
from metaphrase.objectives.word_translation_ranking import (
    WordTranslationRanking,
    word_similarity,
    word_translation_ranking,
)
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from tests.objectives.test_aligned_word_prediction import swap
from tests.oracles import assert_same_loss, word_places, word_translation_ranking_loop


def links_of(row):
    return [tuple(map(int, link.split("-"))) for link in row["alignment"].split()]


@pytest.mark.parametrize("similarity", ["pairwise", "pooled", "max"])
@pytest.mark.parametrize("mask_positives", [False, True])
@pytest.mark.parametrize("reduction", ["link_mean", "sum"])
def test_matches_loop(make_loss, encodings_of, bitext, tokenizer, similarity, mask_positives, reduction):
    loss = make_loss("wtr", similarity=similarity, mask_positives=mask_positives, reduction=reduction, temperature=0.2)
    rows = [bitext[i] for i in (6, 15, 22, 18)]
    encodings = encodings_of(loss, rows)
    leaves = [encodings[side].tokens_blh for side in ("source", "target")]
    words = [
        [
            [list(states[at]) for at in word_places(row, side, tokenizer)]
            for states, row in zip(leaf, rows, strict=True)
        ]
        for leaf, side in zip(leaves, ("source", "target"), strict=True)
    ]
    slow = word_translation_ranking_loop(
        *words,
        [links_of(row) for row in rows],
        temperature=0.2,
        kind=similarity,
        mask_positives=mask_positives,
        summed=reduction == "sum",
    )
    assert_same_loss(loss.objectives["wtr"](encodings), slow, leaves)


class TestRanking:
    similarity = torch.tensor([[[0.8, 0.1, 0.3], [0.2, 0.6, 0.0]]], dtype=torch.float64)
    links = torch.tensor([[[0, 0], [1, 1], [-1, -1]]])

    def ranked(self, similarity, links=links, **settings):
        words = (torch.ones(1, n, dtype=torch.bool) for n in similarity.shape[1:])
        return word_translation_ranking(similarity, links, *words, **settings)

    def test_numbers_of_a_small_matrix(self):
        warm = self.ranked(self.similarity, temperature=1.0)
        assert warm[0].tolist() == pytest.approx([0.743420, 0.797116], abs=1e-6)
        assert warm[1].tolist() == pytest.approx([math.log1p(math.exp(-0.6)), math.log1p(math.exp(-0.5))])
        assert self.ranked(self.similarity)[0].tolist() == pytest.approx([4.6e-5, 3.42e-4], rel=2e-2)

    def test_one_candidate_costs_nothing(self):
        losses = self.ranked(self.similarity[:, :, :1], torch.tensor([[[1, 0]]]), temperature=1.0)
        assert losses[0].item() == 0
        assert losses[1].item() > 0

    def test_equal_similarities_cost_the_log_of_the_words(self):
        losses = self.ranked(torch.full((1, 2, 3), 0.4, dtype=torch.float64))
        assert losses[0].tolist() == pytest.approx([math.log(3)] * 2)
        assert losses[1].tolist() == pytest.approx([math.log(2)] * 2)

    def test_masked_words_are_not_candidates(self):
        there = torch.tensor([[True, True, False]])
        cut = word_translation_ranking(self.similarity, self.links, torch.ones(1, 2, dtype=torch.bool), there)
        torch.testing.assert_close(cut, self.ranked(self.similarity[:, :, :2]))

    def test_other_positives_may_leave_the_denominator(self):
        links = torch.tensor([[[0, 0], [0, 1]]])
        printed = self.ranked(self.similarity, links, temperature=1.0)
        masked = self.ranked(self.similarity, links, temperature=1.0, mask_positives=True)
        assert masked[0, 0].item() == pytest.approx(math.log1p(math.exp(0.3 - 0.8)))
        assert (masked[0] < printed[0]).all()
        torch.testing.assert_close(masked[1], printed[1])

    def test_a_right_alignment_costs_less_than_a_wrong_one(self):
        wrong = torch.tensor([[[0, 1], [1, 0]]])
        assert self.ranked(self.similarity).max() < self.ranked(self.similarity, wrong).min()


@pytest.mark.parametrize("similarity", ["pairwise", "pooled", "max"])
@pytest.mark.parametrize("reduction", ["link_mean", "sum"])
def test_no_links_is_a_zero_with_a_graph(make_loss, encodings_of, bitext, similarity, reduction):
    loss = make_loss("wtr", similarity=similarity, reduction=reduction)
    encodings = encodings_of(loss, [{**row, "alignment": ""} for row in bitext[:3]])
    value = loss.objectives["wtr"](encodings)
    assert value.item() == 0
    value.backward()
    assert all((encodings[side].tokens_blh.grad == 0).all() for side in ("source", "target"))


@pytest.mark.parametrize("objective", ["wtr", "word-contrast"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_link_given_twice_counts_once(make_loss, encodings_of, bitext, objective, reduction):
    means = {"wtr": "link_mean", "word-contrast": "anchor_mean"}
    loss = make_loss(objective, reduction=means[objective] if reduction == "mean" else "sum")
    values = [
        loss.objectives[objective](encodings_of(loss, [{**bitext[6], "alignment": links}]))
        for links in ("0-0 1-1", "0-0 0-0 1-1")
    ]
    assert values[0] > 0
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


def test_a_pair_of_one_word_each_has_nothing_to_rank(make_loss, encodings_of, bitext):
    loss = make_loss("wtr")
    encodings = encodings_of(loss, [bitext[22]])
    value = loss.objectives["wtr"](encodings)
    assert value.item() == 0
    value.backward()


@pytest.mark.parametrize("similarity", ["pairwise", "pooled", "max"])
def test_padding_order_and_sides_change_nothing(make_loss, encodings_of, bitext, similarity):
    loss = make_loss("wtr", reduction="sum", similarity=similarity)
    rows = [bitext[i] for i in (22, 6, 23)]
    value = loss.objectives["wtr"](encodings_of(loss, rows))
    assert value > 0.1
    alone = sum(loss.objectives["wtr"](encodings_of(loss, [row])) for row in rows) / 3
    for other in (rows[::-1], [swap(row) for row in rows]):
        torch.testing.assert_close(loss.objectives["wtr"](encodings_of(loss, other)), value, rtol=1e-9, atol=0)
    torch.testing.assert_close(alone, value, rtol=1e-9, atol=0)


@pytest.mark.parametrize("similarity", ["pairwise", "pooled", "max"])
def test_only_words_get_a_gradient(make_loss, encodings_of, bitext, similarity):
    loss = make_loss("wtr", similarity=similarity)
    encodings = encodings_of(loss, bitext)
    loss.objectives["wtr"](encodings).backward()
    for side in ("source", "target"):
        grad, mask = encodings[side].tokens_blh.grad, encodings[side].mask_bl
        assert torch.isfinite(grad).all()
        assert grad[:, 1].abs().max() > 0
        assert (grad[~mask] == 0).all()
        assert (grad[:, 0] == 0).all()


def test_words_that_truncation_cut_are_neither_ranked_nor_candidates(make_loss, encodings_of, bitext):
    row = bitext[4]  # ein Mann liest ein Buch - a man reads a book: the last words are cut at 9 pieces
    shorter = {side: row[side].rsplit(" ", 1)[0] for side in ("source", "target")}
    whole = {**row, **shorter, "alignment": "0-0 1-1 2-2 3-3"}
    cut = make_loss("wtr", max_length=9)
    torch.manual_seed(0)
    encodings = encodings_of(cut, [row])
    assert encodings["links"].features["links"].shape == (1, 4, 2)
    spans = encodings_of(make_loss("wtr", max_length=24), [whole])["links"].features
    features = encodings["links"].features
    keep = {"source_spans": 4, "target_spans": 4, "links": 4}
    assert all(torch.equal(features[key][:, :n], spans[key]) for key, n in keep.items())
    before = cut.objectives["wtr"](encodings)
    with torch.no_grad():
        encodings["source"].tokens_blh[:, 7:] += 1.0
    torch.testing.assert_close(cut.objectives["wtr"](encodings), before)


@pytest.mark.parametrize("similarity", ["pairwise", "pooled", "max"])
def test_states_are_compared_in_float32(similarity):
    states = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    spans = torch.tensor([[[1, 3], [3, 4]]] * 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = word_similarity(states, states.flip(0), spans, spans, similarity=similarity)
    assert low.dtype == torch.float32
    high = word_similarity(states.double(), states.flip(0).double(), spans, spans, similarity=similarity)
    torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-6)


def test_length_of_states_does_not_matter(make_loss, encodings_of, bitext):
    loss = make_loss("wtr")
    encodings = encodings_of(loss, bitext)
    value = loss.objectives["wtr"](encodings)
    with torch.no_grad():
        encodings["source"].tokens_blh.mul_(3)
    torch.testing.assert_close(loss.objectives["wtr"](encodings), value)


def test_words_share_the_pass_of_sentences(tiny_encoder, tokenizer, bitext):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("wacse"), max_length=24)
    calls = []
    tiny_encoder[0].auto_model.encoder.register_forward_hook(lambda *args: calls.append(1))
    values = loss(ParallelCollator(tokenizer, loss.views)(bitext[:5]))
    assert values.keys() == {"tr", "awp", "wtr"}
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [({"similarity": "cosine"}, "'pairwise', 'pooled', 'max', but is 'cosine'"), ({"reduction": "mean"}, "'sum'")],
)
def test_wrong_arguments_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        WordTranslationRanking(**args)


def test_every_term_of_the_recipe_learns(tiny_encoder, tokenizer, bitext):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("wacse"), max_length=24).eval()
    batch = ParallelCollator(tokenizer, loss.views)(bitext[:8])
    optimizer = torch.optim.AdamW(loss.parameters(), lr=2e-3)
    first = {name: value.item() for name, value in loss(batch).items()}
    for _ in range(40):
        optimizer.zero_grad()
        sum(loss(batch).values()).backward()
        optimizer.step()
    last = {name: value.item() for name, value in loss(batch).items()}
    assert last["tr"] < first["tr"] / 2
    assert last["wtr"] < first["wtr"] / 2
    assert last["awp"] < 0.85 * first["awp"]  # fully masked sentences differ in length only


def test_the_largest_cosine_of_two_words_can_be_negative():
    source, target = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[-1.0, 0.0], [-0.6, -0.8]]])
    spans = torch.tensor([[[0, 1], [1, 2]]])
    torch.testing.assert_close(word_similarity(source, target, spans, spans, similarity="max"), source @ target.mT)
