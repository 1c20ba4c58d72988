import logging

import pytest
import torch
import torch.distributed as dist

from metaphrase.modeling.functional import mean_pooled
from metaphrase.objectives.sentence_alignment import sentence_alignment
from tests.oracles import sentence_alignment_loop


def rows_of(encoding, *, specials):
    """States of each sentence without padding and, on request, without its first and last token."""
    lengths = encoding.mask_bl.sum(1).tolist()
    inside = slice(None) if specials else slice(1, -1)
    return [states[:length][inside] for states, length in zip(encoding.tokens_blh, lengths, strict=True)]


@pytest.mark.parametrize("candidates", ["targets", "both"])
@pytest.mark.parametrize("exclude_specials", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_matches_loop(make_loss, encodings_of, bitext, candidates, exclude_specials, batch):
    loss = make_loss("sa", candidates=candidates, exclude_specials=exclude_specials)
    encodings = encodings_of(loss, bitext[:batch])
    states = [encodings[side].tokens_blh for side in ("source", "target")]
    fast = loss.objectives["sa"](encodings)
    source, target = (rows_of(encodings[side], specials=not exclude_specials) for side in ("source", "target"))
    slow = sentence_alignment_loop(source, target, both=candidates == "both")
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9, abs=1e-12)
    got, wanted = (torch.autograd.grad(value, states) for value in (fast, slow))
    assert batch == 1 or min(grad.abs().max() for grad in wanted) > 0
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_worked_example():
    products = torch.tensor([[12, 10, 9], [8, 11, 10.5], [9, 9.5, 13]], dtype=torch.float64)
    assert sentence_alignment(torch.eye(3).double(), products.T).item() == pytest.approx(0.240605, abs=5e-7)


def test_it_is_not_invariant_to_scale():
    source, target = torch.randn(5, 4), torch.randn(5, 4)
    assert not torch.isclose(sentence_alignment(source, target), sentence_alignment(2 * source, 2 * target))


def test_large_products_stay_finite_in_half_precision():
    states = (torch.eye(4) * 30).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = sentence_alignment(states, states.flip(0))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(900.0)


def test_the_mean_is_taken_in_float32():
    states = torch.full((1, 300, 2), 1.0, dtype=torch.bfloat16)
    assert torch.equal(mean_pooled(states, torch.ones(1, 300, dtype=torch.bool)), torch.ones(1, 2))


def test_a_sentence_without_tokens_is_a_zero_with_a_graph():
    states = torch.randn(1, 3, 2, requires_grad=True)
    mean = mean_pooled(states, torch.zeros(1, 3, dtype=torch.bool))
    assert torch.equal(mean, torch.zeros(1, 2))
    mean.sum().backward()
    assert torch.equal(states.grad, torch.zeros(1, 3, 2))


def test_padding_has_no_gradient_and_no_effect(make_loss, encodings_of, bitext):
    loss = make_loss("sa")
    encodings = encodings_of(loss, sorted(bitext, key=lambda row: len(row["source"])))
    value = loss.objectives["sa"](encodings)
    for side in ("source", "target"):
        (grad,) = torch.autograd.grad(value, encodings[side].tokens_blh, retain_graph=True)
        padding = ~encodings[side].mask_bl
        assert padding.any()
        assert (grad[padding] == 0).all()
        assert grad[~padding].abs().max() > 0
        with torch.no_grad():
            encodings[side].tokens_blh[padding] = torch.nan
    assert torch.equal(loss.objectives["sa"](encodings), value)


@pytest.mark.parametrize("candidates", ["targets", "both"])
def test_the_order_of_the_batch_does_not_matter(make_loss, encodings_of, bitext, candidates):
    loss = make_loss("sa", candidates=candidates)
    rows = bitext[:6]
    values = [loss.objectives["sa"](encodings_of(loss, some)) for some in (rows, rows[::-1])]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


def test_sources_as_candidates_make_it_harder(make_loss, encodings_of, bitext):
    values = []
    for candidates in ("targets", "both"):
        loss = make_loss("sa", candidates=candidates)
        values.append(loss.objectives["sa"](encodings_of(loss, bitext[:6])).item())
    assert values[0] < values[1]


@pytest.mark.parametrize("candidates", ["targets", "both"])
def test_ranks_together_see_the_whole_batch(make_loss, encodings_of, bitext, candidates, monkeypatch):
    """The mean over two processes of the loss against the gathered pools is the loss of the whole batch."""
    loss = make_loss("sa", candidates=candidates)
    whole = loss.objectives["sa"](encodings_of(loss, bitext[:8]))
    halves = [encodings_of(loss, bitext[:4]), encodings_of(loss, bitext[4:8])]
    means = {
        side: torch.cat([mean_pooled(half[side].tokens_blh, half[side].mask_bl) for half in halves])
        for side in ("source", "target")
    }
    values = []
    for rank, half in enumerate(halves):
        own = {id(half[side].tokens_blh): side for side in ("source", "target")}
        assert len(own) == 2
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)

        def gather(tensor_bh, rank=rank):
            side = "source" if torch.equal(tensor_bh, means["source"][4 * rank : 4 * rank + 4]) else "target"
            return means[side]

        monkeypatch.setattr(loss.objectives["sa"], "gathered", gather)
        values.append(loss.objectives["sa"](half))
    torch.testing.assert_close(sum(values) / 2, whole, rtol=1e-9, atol=0)
    alone = make_loss("sa", candidates=candidates, gather=False)
    assert alone.objectives["sa"](halves[0]) < values[0]


def test_a_model_with_other_pooling_logs_a_warning(make_loss, tiny_xlmr, caplog):
    with caplog.at_level(logging.WARNING, "metaphrase"):
        make_loss("sa", model=tiny_xlmr)
        assert not caplog.messages
        make_loss("sa")
    assert "this model uses 'cls' pooling" in caplog.text


def test_unknown_candidates_are_refused(make_loss):
    with pytest.raises(ValueError, match="'targets', 'both', but is 'sources'"):
        make_loss("sa", candidates="sources")
