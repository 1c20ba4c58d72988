import math

import numpy as np
import pytest
import torch

from metaphrase.modeling.views import UNSCORED, Batch
from metaphrase.objectives.aligned_word_prediction import (
    AlignedWordPrediction,
    MaskedWords,
    aligned_word_prediction,
    best_partners,
)
from tests.oracles import aligned_word_prediction_loop

SIDES = ("source", "target")


def swap(row):
    links = " ".join("-".join(reversed(link.split("-"))) for link in row["alignment"].split())
    names = {"source": "target", "target": "source", "source_lang": "target_lang", "target_lang": "source_lang"}
    return {**row, **{name: row[other] for name, other in names.items()}, "alignment": links}


@pytest.fixture
def pieces_of(tokenizer):
    """Positions and ids of the pieces of each word of a text, tokenised word by word."""

    def pieces_of(text):
        words, at = [], 1
        for word in text.split():
            ids = tokenizer(word, add_special_tokens=False)["input_ids"]
            words.append((list(range(at, at + len(ids))), ids))
            at += len(ids)
        return words

    return pieces_of


@pytest.fixture
def masked_of(pieces_of):
    """Positions of each linked word of a side and pieces of its partner, from the text and one link per word."""

    def masked_of(row, side):
        own, other = (pieces_of(row[s]) for s in (SIDES if side == "source" else SIDES[::-1]))
        partner = {}
        for link in row["alignment"].split():
            x, y = map(int, link.split("-") if side == "source" else reversed(link.split("-")))
            partner[x] = min(y, partner.get(x, y))
        return [(own[x][0], other[y][1]) for x, y in partner.items()]

    return masked_of


def build(view, rows, tokenizer, seed=0):
    return view.build(Batch(rows, tokenizer), [np.random.default_rng(seed) for _ in rows])


@pytest.mark.long
@pytest.mark.parametrize("reduction", ["token_mean", "sum"])
def test_matches_loop(make_loss, encodings_of, bitext, masked_of, reduction):
    loss = make_loss("awp", reduction=reduction)
    rows = [bitext[i] for i in (6, 10, 18, 22)]
    objective = loss.objectives["awp"]
    encodings = encodings_of(loss, rows)
    sides = [encodings[view.name] for view in objective.sides]
    states = [side.tokens_blh[i] for side in sides for i in range(len(rows))]
    words = [masked_of(row, name) for name in SIDES for row in rows]
    table = sides[0].table_vh
    slow = aligned_word_prediction_loop(objective.head, states, words, table, summed=reduction == "sum")
    fast = objective(encodings)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    leaves = [*(side.tokens_blh for side in sides), table, *objective.head.parameters()]
    got, wanted = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    for ours, theirs in zip(got, wanted, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_linked_words_are_masked_and_labelled_with_their_partners(bitext, tokenizer, masked_of, side):
    features = build(MaskedWords("w", side, 32), bitext, tokenizer)
    for at, row in enumerate(bitext):
        ids = tokenizer(row[side])["input_ids"]
        labels = [UNSCORED] * len(ids)
        for places, pieces in masked_of(row, side):
            for place in places:
                ids[place] = tokenizer.mask_token_id
            for place, piece in zip(places, pieces, strict=False):
                labels[place] = piece
        assert features["input_ids"][at, : len(ids)].tolist() == ids
        assert features["labels"][at, : len(ids)].tolist() == labels
        assert (features["labels"][at, len(ids) :] == UNSCORED).all()
        assert features["attention_mask"][at].sum() == len(ids)
    more_pieces = [len(places) > len(pieces) for row in bitext for places, pieces in masked_of(row, side)]
    assert any(more_pieces)
    assert not all(more_pieces)


def test_unlinked_words_stay(bitext, tokenizer):
    row = {**bitext[0], "alignment": "1-1"}
    features = build(MaskedWords("w", "source", 32), [row], tokenizer)
    ids = tokenizer(row["source"])["input_ids"]
    assert features["input_ids"][0].tolist() == [*ids[:2], *[tokenizer.mask_token_id] * 2, *ids[4:]]
    assert features["language"].tolist() == [int.from_bytes(b"de")]


def test_the_surest_link_counts_and_the_first_of_equals(tokenizer, bitext, pieces_of):
    assert best_partners([(0, 2), (0, 1), (1, 1)], [0.5, 0.5, 0.1]) == {0: 1, 1: 1}
    assert best_partners([], []) == {}
    row = {**bitext[6], "alignment": "3-3 3-4", "alignment_scores": "0.2 0.9"}  # im - in the
    features = build(MaskedWords("w", "source", 32), [row], tokenizer)
    the = pieces_of(row["target"])[4][1]
    assert features["labels"][features["labels"] != UNSCORED].tolist() == the


def test_a_pair_across_the_cut_is_dropped(tokenizer, bitext):
    row = bitext[4]  # ein Mann liest ein Buch: 1, 2, 2, 1, 3 pieces; the last word is cut
    features = build(MaskedWords("w", "source", 10), [row], tokenizer)
    assert features["input_ids"].shape == (1, 10)
    masked = (features["input_ids"] == tokenizer.mask_token_id)[0].nonzero().flatten().tolist()
    assert masked == [1, 2, 3, 4, 5, 6]
    assert features["input_ids"][0, -1] == tokenizer.sep_token_id
    short = {**row, "target": row["target"].rsplit(" ", 1)[0] + " zeitung" * 9}
    assert (build(MaskedWords("w", "target", 10), [short], tokenizer)["labels"][0, 7:] == UNSCORED).all()


def test_a_cap_leaves_context(tokenizer, bitext):
    def share(ratio, seed=0):
        features = build(MaskedWords("w", "source", 32, ratio), bitext, tokenizer, seed)
        masked = (features["input_ids"] == tokenizer.mask_token_id).sum(dim=1)
        return masked / (features["attention_mask"].sum(dim=1) - 2)

    assert (share(1.0) == 1).all()
    assert (share(0.4) <= 0.4).all()
    assert share(0.4).mean() > 0.2
    assert torch.equal(share(0.4), share(0.4))
    assert not torch.equal(share(0.4), share(0.4, seed=1))


def test_the_sides_draw_words_independently(make_loss, batch_of, tokenizer):
    text = "der " * 20
    row = {"source": text, "target": text, "alignment": " ".join(f"{i}-{i}" for i in range(20))}
    loss = make_loss("awp", max_mask_ratio=0.3)
    source, target = (one["input_ids"] == tokenizer.mask_token_id for one in batch_of(loss, [row] * 4).values())
    assert (source.sum(1) == target.sum(1)).all()
    assert not (source == target).all(1).any()


def test_a_word_without_room_is_skipped_and_others_are_tried(tokenizer, pieces_of):
    """Whatever the order of the draw, the room is filled with words of one piece around a word of many."""
    source = "der der der der schläftnichtgutschläftnichtgut der der"
    row = {"source": source, "target": source, "alignment": " ".join(f"{i}-{i}" for i in range(7))}
    assert [len(places) for places, _ in pieces_of(source)][4] > 3
    view = MaskedWords("w", "source", 32, 0.15)
    masked = [
        (build(view, [row], tokenizer, seed)["input_ids"] == tokenizer.mask_token_id).sum().item()
        for seed in range(100)
    ]
    pieces = sum(len(places) for places, _ in pieces_of(source))
    assert set(masked) == {int(0.15 * pieces)}


def test_the_room_of_a_cap_is_used_up(bitext, tokenizer, pieces_of, masked_of):
    """No unmasked linked word would fit into the remaining room."""
    for ratio in (0.15, 0.3, 0.5):
        for seed in range(5):
            features = build(MaskedWords("w", "source", 32, ratio), bitext, tokenizer, seed)
            for at, row in enumerate(bitext):
                is_masked = features["input_ids"][at] == tokenizer.mask_token_id
                room = ratio * sum(len(places) for places, _ in pieces_of(row["source"])) - is_masked.sum().item()
                left = [len(places) for places, _ in masked_of(row, "source") if not is_masked[places[0]]]
                assert room >= 0
                assert not left or min(left) > room


def test_a_link_given_twice_counts_once(make_loss, encodings_of, bitext):
    loss = make_loss("awp", reduction="sum")
    values = [
        loss.objectives["awp"](encodings_of(loss, [{**bitext[6], "alignment": links}]))
        for links in ("0-0 1-1", "0-0 0-0 1-1 1-1 1-1")
    ]
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_sides_can_be_swapped(make_loss, encodings_of, bitext):
    loss = make_loss("awp")
    values = [loss.objectives["awp"](encodings_of(loss, rows)) for rows in (bitext, [swap(row) for row in bitext])]
    torch.testing.assert_close(*values)
    assert values[0] > 1


def test_padding_and_order_change_nothing(make_loss, encodings_of, bitext):
    loss = make_loss("awp", reduction="sum")
    rows = [bitext[i] for i in (22, 6, 23)]  # one word, seven words, nine words
    alone = sum(loss.objectives["awp"](encodings_of(loss, [row])) for row in rows) / 3
    together = loss.objectives["awp"](encodings_of(loss, rows))
    turned = loss.objectives["awp"](encodings_of(loss, rows[::-1]))
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=0)
    torch.testing.assert_close(turned, together, rtol=1e-9, atol=0)


def test_padding_gets_no_gradient(make_loss, encodings_of, bitext):
    loss = make_loss("awp")
    encodings = encodings_of(loss, bitext)
    loss.objectives["awp"](encodings).backward()
    for view in loss.objectives["awp"].sides:
        grad, mask = encodings[view.name].tokens_blh.grad, encodings[view.name].mask_bl
        assert grad[mask].abs().max() > 0
        assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("reduction", ["token_mean", "sum"])
def test_no_links_is_a_zero_with_a_graph(make_loss, encodings_of, bitext, reduction):
    loss = make_loss("awp", reduction=reduction)
    encodings = encodings_of(loss, [{**row, "alignment": ""} for row in bitext[:3]])
    value = loss.objectives["awp"](encodings)
    assert value.item() == 0
    value.backward()
    assert all((encodings[view.name].tokens_blh.grad == 0).all() for view in loss.objectives["awp"].sides)


def test_a_blank_table_scores_log_vocabulary(make_loss, encodings_of, bitext, tokenizer):
    loss = make_loss("awp", vocabulary="untied")
    with torch.no_grad():
        loss.heads.heads["awp"].table_vh.zero_()
    assert loss.objectives["awp"](encodings_of(loss, bitext)).item() == pytest.approx(math.log(len(tokenizer)))


def test_the_printed_sum_grows_with_the_links(make_loss, encodings_of, bitext):
    mean, total = (make_loss("awp", reduction=reduction) for reduction in ("token_mean", "sum"))
    encodings = encodings_of(mean, bitext[:2])
    labels = sum(
        int((encodings[view.name].features["labels"] != UNSCORED).sum()) for view in mean.objectives["awp"].sides
    )
    expected = mean.objectives["awp"](encodings).item() * labels / 4
    assert total.objectives["awp"](encodings).item() == pytest.approx(expected)


def test_states_of_the_other_side_are_not_seen(make_loss, tokenizer):
    loss = make_loss("awp", transform="none")
    states, nothing = torch.randn(1, 3, 32, dtype=torch.float64), torch.full((1, 3), UNSCORED)
    labels = torch.tensor([[UNSCORED, 7, UNSCORED]])
    table = torch.randn(len(tokenizer), 32, dtype=torch.float64)
    head = loss.objectives["awp"].head
    one = aligned_word_prediction(head, states, states + 1, labels, nothing, table)
    other = aligned_word_prediction(head, states, states - 1, labels, nothing, table)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"vocabulary": "english"}, "'tied', 'untied', but is 'english'"),
        ({"reduction": "mean"}, "'token_mean', 'sum', but is 'mean'"),
        ({"max_mask_ratio": 0}, "above 0"),
    ],
)
def test_wrong_arguments_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        AlignedWordPrediction(**args)
