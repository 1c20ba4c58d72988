import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.utils.checkpoint import checkpoint

from metaphrase.exceptions import MissingExtraError, UsageError
from metaphrase.modeling import functional
from metaphrase.modeling.functional import (
    accumulated_in_place,
    liger_kernel,
    translation_ranking,
    vocabulary_cross_entropy,
)
from metaphrase.modeling.precision import bfloat16
from metaphrase.objectives.momentum_contrast import momentum_contrast
from metaphrase.objectives.similarity_preservation import similarity_preservation
from tests.oracles import (
    cross_entropy_loop,
    several_positives_loop,
    soft_cross_entropy_loop,
    translation_ranking_loop,
)

COSINES = torch.tensor([[0.9, 0.7, 0.1], [0.6, 0.8, 0.2], [0.3, 0.5, 0.4]], dtype=torch.float64)


def pair(batch: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, hidden, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, tensors))


def from_cosines(cosines: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """TR of given similarities, which are the embeddings for dot products with the identity."""
    return translation_ranking(cosines, torch.eye(3, dtype=torch.float64), similarity="dot", **kwargs)


@pytest.mark.parametrize(("batch", "hidden"), [(1, 4), (2, 4), (7, 13)])
@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_ranking_matches_loop(batch, hidden, margin, similarity):
    source, target = pair(batch, hidden)
    fast = translation_ranking(source, target, margin=margin, similarity=similarity, temperature=0.5)
    slow = translation_ranking_loop(source, target, margin=margin, dot=similarity == "dot", temperature=0.5)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9, abs=1e-12)
    for got, wanted in zip(gradients(fast, source, target), gradients(slow, source, target), strict=True):
        assert batch == 1 or wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


POSITIVES = torch.tensor([[0, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_several_positives_match_loop(margin, offset):
    """A candidate that is both a positive and excluded is a positive."""
    (source, _), (target, _) = pair(3, 4), pair(5, 4, seed=1)
    excluded = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    settings = {"margin": margin, "temperature": 0.5}
    fast = translation_ranking(source, target, positive_bp=POSITIVES, duplicate_bp=excluded, offset=offset, **settings)
    positives = [{i + offset, *row.nonzero().flatten().tolist()} for i, row in enumerate(POSITIVES)]
    left_out = [set(row.nonzero().flatten().tolist()) for row in excluded]
    slow = several_positives_loop(source, target, positives, left_out, **settings)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    for got, wanted in zip(gradients(fast, source, target), gradients(slow, source, target), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_both_directions_of_several_positives_are_the_mean_of_each():
    source, target = pair(3, 4)
    both = POSITIVES[:, :3] | POSITIVES[:, :3].T
    forward, backward = (
        translation_ranking(one, other, positive_bp=both) for one, other in ((source, target), (target, source))
    )
    symmetric = translation_ranking(source, target, positive_bp=both, direction="symmetric")
    torch.testing.assert_close(symmetric, (forward + backward) / 2)


def test_equal_positives_share_the_probability():
    """Of two positives that are equal, each can have half of the probability: the loss is log 2."""
    source = torch.eye(3, dtype=torch.float64)[[0, 0, 2]]
    both = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    loss = translation_ranking(source, source, positive_bp=both, temperature=0.01)
    assert loss.item() == pytest.approx(2 / 3 * math.log(2), abs=1e-9)


@pytest.mark.parametrize(("batch", "loss"), [(4, 1.386294), (128, 4.852030), (1024, 6.931472)])
def test_ranking_of_equal_similarities_is_log_batch(batch, loss):
    same = torch.ones(batch, 3, dtype=torch.float64)
    assert translation_ranking(same, same).item() == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(("batch", "loss"), [(2, 2.061154e-9), (1024, 2.108558e-6)])
def test_ranking_of_orthonormal_embeddings(batch, loss):
    eye = torch.eye(batch, dtype=torch.float64)
    assert translation_ranking(eye, eye).item() == pytest.approx(loss, rel=1e-6)


def test_ranking_of_known_similarities():
    assert from_cosines(COSINES).item() == pytest.approx(0.726413, abs=1e-6)
    assert from_cosines(COSINES, direction="target_to_source").item() == pytest.approx(0.050724, abs=1e-6)
    assert from_cosines(COSINES, direction="symmetric").item() == pytest.approx(0.388568, abs=1e-6)
    assert from_cosines(COSINES, margin=0.3).item() == pytest.approx(4.090879, abs=1e-6)


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(2, 8), st.integers(0, 1000), st.floats(0.1, 50))
def test_ranking_properties(batch, hidden, seed, scale):
    source, target = pair(batch, hidden, seed)
    forward = translation_ranking(source, target)
    symmetric = translation_ranking(source, target, direction="symmetric")
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(translation_ranking(target, source, direction="symmetric"), symmetric)
    torch.testing.assert_close(translation_ranking(target, source, direction="target_to_source"), forward)
    torch.testing.assert_close(translation_ranking(source[order], target[order]), forward)
    torch.testing.assert_close(translation_ranking(source * scale, target), forward)


def test_temperature_limits():
    assert translation_ranking(
        COSINES[:2], torch.eye(3, dtype=torch.float64), similarity="dot", temperature=1e-4
    ).item() == pytest.approx(0, abs=1e-9)
    assert from_cosines(COSINES, temperature=1e-4).item() > 100  # row 2 prefers a wrong column
    assert from_cosines(COSINES, temperature=1e6).item() == pytest.approx(math.log(3), abs=1e-5)


def test_ranking_in_bfloat16_is_finite_and_computed_in_float32():
    source, target = (tensor.detach().bfloat16() for tensor in pair(16, 8))
    loss = translation_ranking(source, target, temperature=0.01)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, translation_ranking(source.float(), target.float(), temperature=0.01))


def test_ranking_equals_multiple_negatives_ranking_loss():
    source, target = (tensor.detach().float() for tensor in pair(9, 5))
    upstream = MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=20.0, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    ).compute_loss_from_embeddings([source, target], None)
    torch.testing.assert_close(translation_ranking(source, target, direction="symmetric"), upstream)


def test_duplicates_leave_the_denominator():
    source, target = pair(3, 5)
    with torch.no_grad():
        target[2] = target[0]
    duplicate = torch.zeros(3, 3, dtype=torch.bool)
    duplicate[0, 2] = duplicate[2, 0] = True
    masked = translation_ranking(source[:1], target, duplicate_bp=duplicate[:1])
    torch.testing.assert_close(masked, translation_ranking_loop(source[:1], target[:2]), rtol=1e-9, atol=1e-12)
    assert masked < translation_ranking(source[:1], target)
    own = duplicate | torch.eye(3, dtype=torch.bool)  # a pair is not a duplicate of itself
    torch.testing.assert_close(
        translation_ranking(source, target, duplicate_bp=own),
        translation_ranking(source, target, duplicate_bp=duplicate),
    )


def test_soft_targets_of_the_other_direction_are_transposed():
    source, target, soft = torch.randn(5, 6), torch.randn(5, 6), torch.randn(5, 5)
    backward = translation_ranking(source, target, soft_bp=soft, direction="target_to_source")
    torch.testing.assert_close(backward, translation_ranking(target, source, soft_bp=soft.T))
    both = translation_ranking(source, target, soft_bp=soft, direction="symmetric")
    torch.testing.assert_close(both, (translation_ranking(source, target, soft_bp=soft) + backward) / 2)


def test_directions_need_equal_pools():
    source, target = pair(3, 5)
    with pytest.raises(ValueError, match="as many sources as targets, but got 2 and 3"):
        translation_ranking(source[:2], target, direction="symmetric")


def test_offset_ranks_a_share_of_the_batch():
    source, target = pair(6, 5)
    whole = translation_ranking(source, target)
    shares = [translation_ranking(source[at : at + 2], target, offset=at) for at in (0, 2, 4)]
    torch.testing.assert_close(torch.stack(shares).mean(), whole)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(functional, "VOCABULARY_BLOCK", 4)


def vocabulary_case(n: int = 5, hidden: int = 3, vocabulary: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((n, hidden), (vocabulary, hidden), (vocabulary,))
    ]
    return *leaves, torch.randint(0, vocabulary, (n,), generator=generator)


@pytest.mark.parametrize(("n", "vocabulary"), [(1, 1), (1, 5), (5, 11), (3, 8)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_vocabulary_matches_loop(small_blocks, n, vocabulary, with_bias):
    hidden, weight, bias, labels = vocabulary_case(n, 3, vocabulary)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    fast = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias if with_bias else None)
    slow = cross_entropy_loop(hidden, weight, labels, bias if with_bias else None)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)
    for got, wanted in zip(gradients(fast * 3, *leaves), gradients(slow * 3, *leaves), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("label", [-100, -1, 9])
def test_vocabulary_with_a_label_that_is_not_a_row_is_nan(small_blocks, label):
    loss = vocabulary_cross_entropy(torch.randn(3, 4), torch.randn(9, 4), torch.tensor([1, label, 8]))
    assert loss.isnan()


def test_vocabulary_gradcheck(small_blocks):
    hidden, weight, bias, labels = vocabulary_case()
    assert torch.autograd.gradcheck(
        lambda h, w, b: vocabulary_cross_entropy(h, w, labels, bias_v=b), (hidden, weight, bias)
    )


def test_vocabulary_of_a_frozen_table(small_blocks):
    hidden, weight, bias, labels = vocabulary_case()
    wanted = gradients(vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias), hidden)[0]
    frozen = vocabulary_cross_entropy(hidden, weight.detach(), labels, bias_v=bias.detach())
    torch.testing.assert_close(gradients(frozen, hidden)[0], wanted)


def test_vocabulary_gradients_accumulate_and_reach_hooks(small_blocks):
    hidden, weight, bias, labels = vocabulary_case()
    seen = []
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    loss = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once)
    assert len(seen) == 2


def test_vocabulary_of_no_positions_is_a_zero_with_a_graph():
    hidden, weight, _, labels = vocabulary_case()
    loss = vocabulary_cross_entropy(hidden[:0], weight, labels[:0])
    assert loss.item() == 0
    assert loss.requires_grad


def test_vocabulary_under_autocast_rounds_products_and_sums_in_float32(small_blocks):
    hidden, weight, bias, labels = (tensor.detach() for tensor in vocabulary_case(64, 16, 50))
    hidden, weight, bias = hidden.float().requires_grad_(), weight.float(), bias.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias)
    rounded_hidden, rounded_weight = hidden.bfloat16().float(), weight.bfloat16().float()
    wanted = F.cross_entropy(F.linear(rounded_hidden, rounded_weight, bias), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=2e-3, atol=0)
    (gradient,) = gradients(loss, hidden)
    torch.testing.assert_close(gradient, gradients(wanted, hidden)[0], rtol=2e-2, atol=1e-3)


def test_logits_are_never_whole(monkeypatch):
    monkeypatch.setattr(functional, "VOCABULARY_BLOCK", 16)
    hidden, weight, bias, labels = vocabulary_case(6, 3, 100)
    widths = []
    original = functional._block_logits

    def spy(*args):
        logits = original(*args)
        widths.append(logits.shape[1])
        return logits

    monkeypatch.setattr(functional, "_block_logits", spy)
    vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias).backward()
    assert max(widths) == 16
    assert sum(widths) == 2 * 100


def soft_case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Distributions over 11 pieces for 5 positions: one piece, several (one of them listed twice), none, all."""
    hidden, weight, bias, _ = (tensor.detach() for tensor in vocabulary_case())
    rows = torch.tensor([1, 0, 1, 1, 4, *[3] * 11, 1])
    labels = torch.tensor([10, 2, 3, 4, 7, *range(11), 3])
    weights = torch.linspace(0.1, 1.3, len(rows), dtype=dtype)
    weights[4] = 0.0
    return *(leaf.to(dtype).requires_grad_() for leaf in (hidden, weight, bias)), labels, rows, weights


@pytest.mark.parametrize("with_bias", [True, False])
def test_soft_labels_match_loop(small_blocks, with_bias):
    hidden, weight, bias, labels, rows, weights = soft_case()
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    targets = [{} for _ in hidden]
    for row, label, share in zip(rows.tolist(), labels.tolist(), weights.tolist(), strict=True):
        targets[row][label] = targets[row].get(label, 0.0) + share
    bias_v = bias if with_bias else None
    fast = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias_v, rows_k=rows, weights_k=weights)
    slow = soft_cross_entropy_loop(hidden, weight, targets, bias_v)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)
    for got, wanted in zip(gradients(fast * 3, *leaves), gradients(slow * 3, *leaves), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("block", [4, 7, 11, 100])
def test_soft_labels_equal_cross_entropy_of_probabilities(monkeypatch, block):
    monkeypatch.setattr(functional, "VOCABULARY_BLOCK", block)
    hidden, weight, bias, *_ = vocabulary_case()
    probability = torch.rand(5, 11, dtype=torch.float64) * (torch.rand(5, 11) < 0.4)
    probability[torch.arange(5), torch.arange(5)] += 0.1
    probability /= probability.sum(1, keepdim=True)
    rows, labels = probability.nonzero(as_tuple=True)
    fast = vocabulary_cross_entropy(
        hidden, weight, labels, bias_v=bias, rows_k=rows, weights_k=probability[rows, labels] / 5
    )
    slow = F.cross_entropy(F.linear(hidden, weight, bias), probability)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    leaves = (hidden, weight, bias)
    for got, wanted in zip(gradients(fast, *leaves), gradients(slow, *leaves), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_soft_labels_gradcheck(small_blocks):
    hidden, weight, bias, labels, rows, weights = soft_case()
    assert torch.autograd.gradcheck(
        lambda h, w, b: vocabulary_cross_entropy(h, w, labels, bias_v=b, rows_k=rows, weights_k=weights),
        (hidden, weight, bias),
    )


def test_weights_and_rows_each_have_a_default(small_blocks):
    hidden, weight, bias, labels = vocabulary_case()
    leaves = (hidden, weight, bias)
    plain = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias)
    wanted = gradients(plain, *leaves)
    weighted = vocabulary_cross_entropy(
        hidden, weight, labels, bias_v=bias, weights_k=torch.full((5,), 0.2, dtype=torch.float64)
    )
    order = torch.tensor([4, 2, 0, 1, 3])
    listed = vocabulary_cross_entropy(hidden, weight, labels[order], bias_v=bias, rows_k=order)
    for other in (weighted, listed):
        torch.testing.assert_close(other, plain, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(gradients(other, *leaves), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_soft_labels_do_not_repeat_rows(monkeypatch, small_blocks):
    shapes = []
    original = functional._block_logits
    monkeypatch.setattr(functional, "_block_logits", lambda *args: shapes.append(len(args[0])) or original(*args))
    hidden, weight, bias, labels, rows, weights = soft_case()
    vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias, rows_k=rows, weights_k=weights).backward()
    assert shapes == [5] * 6


def test_soft_labels_under_autocast_sum_in_float32(small_blocks):
    hidden, weight, bias, labels, rows, weights = soft_case(torch.float32)
    wanted = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias, rows_k=rows, weights_k=weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias, rows_k=rows, weights_k=weights.double())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-2, atol=0)
    torch.testing.assert_close(gradients(loss, hidden)[0], gradients(wanted, hidden)[0], rtol=5e-2, atol=1e-2)


class TestGradientInPlace:
    """The gradient of the table is either added to ``.grad`` block by block or returned; both are equal."""

    @pytest.fixture
    def parts(self, monkeypatch):
        monkeypatch.setattr(functional, "VOCABULARY_BLOCK", 5)
        hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        table = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
        return hidden, table, torch.randint(13, (7,))

    def grads(self, hidden, table, labels, *, in_place, times=1):
        hidden.grad = table.grad = None
        with accumulated_in_place(enabled=in_place):
            used = F.embedding(labels, table).sum()  # a tied table also receives another gradient
            loss = vocabulary_cross_entropy(hidden * 2, table, labels) + used
            for _ in range(times):
                loss.backward(retain_graph=True)
        return hidden.grad.clone(), table.grad.clone()

    @pytest.mark.parametrize("times", [1, 3])
    def test_equals_what_is_returned(self, parts, times):
        returned = self.grads(*parts, in_place=False, times=times)
        added = self.grads(*parts, in_place=True, times=times)
        assert returned[1].abs().sum() > 0
        for one, other in zip(returned, added, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)

    def test_adds_to_an_existing_gradient(self, parts):
        hidden, table, labels = parts
        once = self.grads(hidden, table, labels, in_place=True)[1]
        with accumulated_in_place():
            (vocabulary_cross_entropy(hidden * 2, table, labels) + F.embedding(labels, table).sum()).backward()
        torch.testing.assert_close(table.grad, 2 * once, rtol=1e-12, atol=1e-14)

    def test_hooks_see_the_whole_gradient(self, parts):
        hidden, table, labels = parts
        expected = self.grads(hidden, table, labels, in_place=False)[1]
        seen = []
        handle = table.register_hook(seen.append)
        self.grads(hidden, table, labels, in_place=True)
        handle.remove()
        torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-14)
        after = []
        handle = table.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
        self.grads(hidden, table, labels, in_place=True)
        handle.remove()
        torch.testing.assert_close(after[-1], expected, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("way", ["offloaded", "checkpointed"])
    def test_a_copy_that_is_handed_to_the_backward_pass_does_not_take_the_gradient(self, parts, way):
        hidden, table, labels = parts
        expected = self.grads(hidden, table, labels, in_place=False)[1]
        table.grad = None

        def loss():
            return vocabulary_cross_entropy(hidden * 2, table, labels) + F.embedding(labels, table).sum()

        with accumulated_in_place():
            if way == "offloaded":
                with torch.autograd.graph.save_on_cpu():
                    total = loss()
            else:
                total = checkpoint(loss, use_reentrant=False)
            total.backward()
        torch.testing.assert_close(table.grad, expected, rtol=1e-12, atol=1e-14)

    def test_the_gradient_of_a_non_leaf_table_is_returned(self, parts):
        hidden, base, labels = parts
        with accumulated_in_place():
            vocabulary_cross_entropy(hidden, base * 3, labels).backward()
        inside = base.grad.clone()
        base.grad = None
        vocabulary_cross_entropy(hidden, base * 3, labels).backward()
        torch.testing.assert_close(inside, base.grad)

    def test_a_frozen_table_gets_none(self, parts):
        hidden, table, labels = parts
        table.requires_grad_(False)
        with accumulated_in_place():
            vocabulary_cross_entropy(hidden, table, labels).backward()
        assert table.grad is None
        assert hidden.grad.abs().sum() > 0


def test_narrow_products_are_summed_in_float32(monkeypatch):
    hidden = torch.randn(6, 16, requires_grad=True)
    table = (0.1 * torch.randn(50, 16)).requires_grad_()
    labels = torch.randint(50, (6,))
    exact = vocabulary_cross_entropy(hidden, table, labels)
    exact.backward()
    wide = hidden.grad, table.grad
    hidden.grad = table.grad = None
    monkeypatch.setattr(functional, "_product_dtype", lambda weight: torch.bfloat16)
    loss = vocabulary_cross_entropy(hidden, table, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss != exact
    torch.testing.assert_close(loss, exact, rtol=5e-3, atol=5e-3)
    for grad, expected in zip((hidden.grad, table.grad), wide, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected, rtol=0.05, atol=2e-3)


def test_a_peaked_loss_in_bfloat16_is_not_below_zero(monkeypatch):
    monkeypatch.setattr(functional, "_product_dtype", lambda weight: torch.bfloat16)
    table = torch.eye(8) + 1e-3 * torch.randn(8, 8)
    assert vocabulary_cross_entropy(30 * table, table, torch.arange(8)) >= 0


@pytest.mark.parametrize(("positions", "blocks"), [(1024, 16), (32_768, 62), (10**9, 245)])
def test_many_positions_take_smaller_blocks(positions, blocks):
    found = functional._blocks(250_002, positions)
    assert len(found) == blocks
    assert (found[0].start, found[-1].stop) == (0, 250_002)
    assert positions > 10**8 or positions * (found[0].stop - found[0].start) <= functional.BLOCK_LOGITS


def test_missing_liger_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    with pytest.raises(MissingExtraError, match=r"\[liger\]"), liger_kernel():
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_gives_the_same(dtype, monkeypatch):
    pytest.importorskip("liger_kernel", reason="an extra that only Linux with CUDA uses; `make install` omits it")
    monkeypatch.setattr(functional, "_product_dtype", lambda weight: dtype)
    hidden = torch.randn(300, 64, device="cuda", requires_grad=True)
    table = (0.1 * torch.randn(5000, 64, device="cuda")).requires_grad_()
    bias = torch.randn(5000, device="cuda", requires_grad=True)
    labels = torch.randint(5000, (300,), device="cuda")

    def measured(enabled):
        with liger_kernel(enabled=enabled):
            loss = vocabulary_cross_entropy(hidden, table, labels, bias_v=bias)
        return [loss, *torch.autograd.grad(loss, (hidden, table, bias))]

    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other in zip(measured(True), measured(False), strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: translation_ranking(x, x, similarity="cos"),
        lambda x: translation_ranking(x, x, direction="forward"),
        lambda x: momentum_contrast(x, x, x, denominator="both"),
        lambda x: similarity_preservation(x, x, ~torch.eye(3, dtype=torch.bool), divergence="mse"),
    ],
)
def test_unknown_choices_are_refused(call):
    with pytest.raises(UsageError, match="must be"):
        call(torch.eye(3))


def test_a_float16_encoder_is_not_computed_in_bfloat16_on_a_cpu():
    with pytest.raises(UsageError, match="stored in float16"):
        bfloat16(torch.nn.Linear(2, 2).half())


def test_a_block_of_excluded_pieces_has_no_part(small_blocks):
    """A bias of minus infinity excludes a piece, also where it does so in a whole block."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 3, generator=generator, dtype=torch.float64, requires_grad=True) for n in (5, 11))
    labels, bias = torch.tensor([4, 10, 7, 8, 5]), torch.zeros(11, dtype=torch.float64)
    bias[:4] = -torch.inf
    fast = vocabulary_cross_entropy(hidden, weight, labels, bias_v=bias)
    slow = F.cross_entropy(F.linear(hidden, weight[4:]), labels - 4)
    torch.testing.assert_close(fast, slow)
    leaves = (hidden, weight)
    for got, wanted in zip(torch.autograd.grad(fast, leaves), torch.autograd.grad(slow, leaves), strict=True):
        torch.testing.assert_close(got, wanted)
