"""Tensor functions shared by several objectives.

The suffix of a tensor's name lists its axes: ``b`` batch, ``p`` the pool that a batch is ranked against, ``s`` source tokens,
``t`` target tokens, ``l`` tokens of any sequence, ``w`` words, ``x`` source words, ``y`` target words, ``n`` scored positions
or word links, ``r`` anchors, ``c`` candidates, ``k`` labels or directions, ``h`` hidden, ``e`` attention heads, ``v``
vocabulary, ``q`` queue. Masks are boolean and true at the values to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from sentence_transformers.util import all_gather_with_grad, get_world_size
from torch import Tensor

from metaphrase.exceptions import MissingExtraError, NonFiniteError
from metaphrase.io.arguments import check_value
from metaphrase.io.environment import install_command

Direction = Literal["source_to_target", "target_to_source", "symmetric"]
Similarity = Literal["cosine", "dot"]

#: Maximum rows of the vocabulary to project at a time. A block of logits has shape ``(n, VOCABULARY_BLOCK)``.
VOCABULARY_BLOCK = 16_384

#: Maximum number of logits of a block if many positions are scored: 512 MB in float32.
BLOCK_LOGITS = 2**27


def translation_ranking(  # noqa: PLR0913 - options of one equation, by keyword
    source_bh: Tensor,
    target_ph: Tensor,
    *,
    temperature: float = 0.05,
    margin: float = 0.0,
    direction: Direction = "source_to_target",
    similarity: Similarity = "cosine",
    duplicate_bp: Tensor | None = None,
    positive_bp: Tensor | None = None,
    offset: int = 0,
    soft_bp: Tensor | None = None,
    soft_weight: float = 1.0,
) -> Tensor:
    """In-batch translation ranking: each sentence must identify its translation in the batch.

    ``-log exp(φ(x_i, y_i) / τ) / Σ_j exp(φ(x_i, y_j) / τ)``, averaged over ``i``. The computation is in float32 or wider,
    regardless of the type of the embeddings.

    Args:
        source_bh: Embeddings of the source sentences, shape ``(batch, hidden)``.
        target_ph: Embeddings of the target sentences, shape ``(pool, hidden)``. Row ``offset + i`` translates source row
            ``i``; the pool is larger than the batch if the targets of other processes were gathered.
        temperature: Softmax temperature τ.
        margin: Additive margin in units of the similarity (LaBSE: 0.3), subtracted from the similarity of the translation
            before the division by τ.
        direction: ``"source_to_target"`` ranks the targets for each source (DAP), ``"target_to_source"`` the sources for
            each target, ``"symmetric"`` is the mean of both.
        similarity: ``"cosine"`` (released DAP code) or ``"dot"`` (equation 5 as printed).
        duplicate_bp: Boolean ``(batch, pool)``, true where target ``j`` is another copy of the translation of ``i``, or is
            too similar to it; such false negatives are removed from the denominator.
        positive_bp: Boolean ``(batch, pool)``, true where target ``j`` translates ``i`` too, in addition to its own
            translation. They stay in the denominator and have the margin. The loss of ``i`` is the mean over its
            translations ``P(i)`` of the equation above, ``-1/|P(i)| Σ_{p ∈ P(i)} log exp(φ(x_i, y_p) / τ) /
            Σ_j exp(φ(x_i, y_j) / τ)``.
        offset: Position in the pool of the translation of the first source.
        soft_bp: Logits of soft targets, shape ``(batch, pool)``: instead of the translation alone, each sentence identifies
            the distribution ``softmax_j(soft_ij)`` over the sentences of the denominator.
        soft_weight: Share of the soft targets; the rest is the translation's.

    Returns:
        Scalar loss.

    Raises:
        ValueError: The direction is not ``"source_to_target"``, and the two pools differ in size, or the direction or the
            similarity is unknown.

    Reference: Li et al. 2023 (DAP), section 3.2, equation 5; Feng et al. 2022 (LaBSE), additive margin; Khosla et al. 2020
    (supervised contrastive learning), equation 2, for several translations.

    >>> translation_ranking(torch.eye(3), torch.eye(3)).item() < 1e-6
    True
    """
    check_value(direction, Direction, "'direction' of translation_ranking")
    check_value(similarity, Similarity, "'similarity' of translation_ranking")
    if direction != "source_to_target" and len(source_bh) != len(target_ph):
        raise ValueError(
            f"Direction {direction!r} ranks sources for each target and requires as many sources as targets, but got "
            f"{len(source_bh)} and {len(target_ph)}. Gather both sides, or rank 'source_to_target'."
        )
    source_bh, target_ph = at_least_float32(source_bh), at_least_float32(target_ph)
    if similarity == "cosine":
        source_bh, target_ph = F.normalize(source_bh, dim=-1), F.normalize(target_ph, dim=-1)
    with torch.autocast(source_bh.device.type, enabled=False):
        logits_bp = source_bh @ target_ph.T
    labels_b = torch.arange(len(source_bh), device=source_bh.device) + offset
    right_bp = F.one_hot(labels_b, logits_bp.shape[1]).bool()
    if positive_bp is not None:
        right_bp = right_bp | positive_bp
    if margin:
        logits_bp = logits_bp - right_bp.to(logits_bp.dtype) * margin
    logits_bp = logits_bp / temperature
    if duplicate_bp is not None:
        logits_bp = logits_bp.masked_fill(duplicate_bp & ~right_bp, -torch.inf)
    losses = []
    several_bp = None if positive_bp is None else right_bp
    if direction != "target_to_source":
        losses.append(_cross_entropy(logits_bp, labels_b, several_bp, soft_bp, soft_weight))
    if direction != "source_to_target":
        several_pb, soft_pb = (None if one is None else one.T for one in (several_bp, soft_bp))
        losses.append(_cross_entropy(logits_bp.T, labels_b, several_pb, soft_pb, soft_weight))
    return torch.stack(losses).mean()


def _cross_entropy(
    logits_bp: Tensor, labels_b: Tensor, right_bp: Tensor | None, soft_bp: Tensor | None, soft_weight: float
) -> Tensor:
    """Cross-entropy with labels, or with the mean over several, mixed with soft targets.

    Candidates with a logit of -inf have no share of the soft targets.
    """
    if right_bp is None:
        hard = F.cross_entropy(logits_bp, labels_b)
    else:
        right_logp_bp = logits_bp.log_softmax(dim=1).masked_fill(~right_bp, 0.0)
        hard = -(right_logp_bp.sum(dim=1) / right_bp.sum(dim=1)).mean()
    if soft_bp is None or soft_weight == 0:
        return hard
    excluded_bp = logits_bp == -torch.inf
    share_bp = soft_bp.masked_fill(excluded_bp, -torch.inf).softmax(dim=1)
    soft = -(share_bp * logits_bp.log_softmax(dim=1).masked_fill(excluded_bp, 0.0)).sum(dim=1).mean()
    return (1 - soft_weight) * hard + soft_weight * soft


def vocabulary_cross_entropy(
    hidden_nh: Tensor,
    weight_vh: Tensor,
    labels_k: Tensor,
    *,
    bias_v: Tensor | None = None,
    rows_k: Tensor | None = None,
    weights_k: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of a vocabulary projection without materialising its logits.

    Equal to ``F.cross_entropy(F.linear(hidden_nh, weight_vh, bias_v), labels_k)``. The vocabulary is processed in blocks of
    at most ``VOCABULARY_BLOCK`` rows: a running log-sum-exp in the forward pass, the softmax of one block at a time in the
    backward pass. Besides the gradients of its arguments, it allocates one block of logits instead of ``n × v``; inside
    :func:`accumulated_in_place` the gradient of the table is not allocated either. Products use the type of the table, or
    that of autocast; the log-sum-exp and all sums are in float32 or wider.

    A position may have several weighted labels, for the prediction of a distribution:
    ``-Σ_k weights_k log softmax(F.linear(hidden_nh[rows_k], weight_vh, bias_v))[labels_k]``. Each position is projected once,
    regardless of its number of labels.

    Args:
        hidden_nh: States at the scored positions, shape ``(n, hidden)``.
        weight_vh: Output embeddings, shape ``(vocabulary, hidden)``; the encoder's table if the head is tied.
        labels_k: Correct rows of ``weight_vh``, shape ``(k,)``, int64. No label is ignored: drop positions without one first.
        bias_v: Output bias, shape ``(vocabulary,)``.
        rows_k: Position of each label, shape ``(k,)``, int64. None assigns label ``i`` to position ``i``.
        weights_k: Non-negative weight of each label, shape ``(k,)``, not differentiated. None is ``1 / k`` for each.

    Returns:
        Scalar weighted sum over the labels; without labels, a zero with a graph. NaN if a label is not a row of the table.

    >>> hidden, table = torch.randn(3, 4), torch.randn(7, 4)
    >>> labels = torch.tensor([1, 0, 6])
    >>> torch.allclose(vocabulary_cross_entropy(hidden, table, labels), F.cross_entropy(hidden @ table.T, labels))
    True
    """
    if not len(labels_k):
        return hidden_nh.sum() * 0.0
    hidden_nh = hidden_nh.to(_product_dtype(weight_vh))
    with torch.autocast(hidden_nh.device.type, enabled=False):
        if _liger is not None and hidden_nh.is_cuda and rows_k is None and weights_k is None:
            bias_v = None if bias_v is None else bias_v.to(hidden_nh.dtype)
            table_vh = weight_vh.to(hidden_nh.dtype)
            return _liger(hidden_nh, table_vh, labels_k, bias_v, accum_dtype=torch.float32)
        return _VocabularyCrossEntropy.apply(hidden_nh, weight_vh, labels_k, bias_v, rows_k, weights_k)


def _product_dtype(weight_vh: Tensor) -> torch.dtype:
    """The type of autocast on the table's device, else the table's."""
    device = weight_vh.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_vh.dtype


_liger: Any = None


@contextmanager
def liger_kernel(*, enabled: bool = True) -> Iterator[None]:
    """Make :func:`vocabulary_cross_entropy` use the fused kernel of Liger on CUDA inside this block.

    Liger (Hsu et al. 2025) processes the positions in chunks instead of the vocabulary in blocks. It computes the gradients
    together with the loss and overwrites them in the backward pass, so a graph supports one backward pass. It supports one
    label per position; weighted labels use the default implementation.
    """
    global _liger
    before = _liger
    if enabled:
        try:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
        except ImportError as error:
            raise MissingExtraError(
                f"use_liger_kernel requires liger-kernel, which is not installed: {install_command('liger')}."
            ) from error
        _liger = liger_fused_linear_cross_entropy
    try:
        yield
    finally:
        _liger = before


_accumulate_in_place = False


@contextmanager
def accumulated_in_place(*, enabled: bool = True) -> Iterator[None]:
    """Make backward passes inside this block add the gradient of the vocabulary table to its ``.grad`` block by block.

    By default, :func:`vocabulary_cross_entropy` returns a gradient of the size of the table (768 MB for XLM-R base), which
    autograd then adds to that of the embedding layer. Use this with ``backward()`` only: ``torch.autograd.grad`` and the
    hooks of distributed training do not see gradients that are accumulated in place. For a table with hooks, or one that is
    not a leaf, the gradient is returned as usual.
    """
    global _accumulate_in_place
    before, _accumulate_in_place = _accumulate_in_place, enabled
    try:
        yield
    finally:
        _accumulate_in_place = before


def _takes_gradient_in_place(weight_vh: Tensor) -> bool:
    hooks = weight_vh._backward_hooks or weight_vh._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no public reader
    return _accumulate_in_place and weight_vh.is_leaf and not hooks


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Blocked cross-entropy: the logits of a block are recomputed in the backward pass instead of stored."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nh: Tensor,
        weight_vh: Tensor,
        labels_k: Tensor,
        bias_v: Tensor | None,
        rows_k: Tensor | None,
        weights_k: Tensor | None,
    ) -> Tensor:
        normaliser_n = hidden_nh.new_full((len(hidden_nh),), -torch.inf, dtype=_wide(hidden_nh))
        label_logit_k = normaliser_n.new_full((len(labels_k),), torch.nan)
        at_k = torch.arange(len(labels_k), device=labels_k.device) if rows_k is None else rows_k
        for block, logits_nv, inside_k in _blocks_of_logits(hidden_nh, weight_vh, bias_v, labels_k):
            label_logit_k[inside_k] = logits_nv[at_k[inside_k], labels_k[inside_k] - block.start]
            highest_n = logits_nv.amax(dim=1)
            highest_n.masked_fill_(highest_n.isinf(), 0)
            total_n = logits_nv.sub_(highest_n[:, None]).exp_().sum(dim=1)  # in place: memory traffic dominates
            normaliser_n = torch.logaddexp(normaliser_n, total_n.log_().add_(highest_n))
        ctx.save_for_backward(hidden_nh, weight_vh, labels_k, bias_v, rows_k, weights_k, normaliser_n)
        ctx.table = weight_vh  # saved tensors are copies under offloading and recomputation
        loss_k = normaliser_n[at_k] - label_logit_k
        return loss_k.mean() if weights_k is None else (loss_k * weights_k.to(loss_k.dtype)).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_nh, weight_vh, labels_k, bias_v, rows_k, weights_k, normaliser_n = ctx.saved_tensors
        wants_hidden, wants_weight, _, wants_bias, _, _ = ctx.needs_input_grad
        hidden_grad = torch.zeros_like(hidden_nh, dtype=_wide(hidden_nh)) if wants_hidden else None
        in_place = wants_weight and _takes_gradient_in_place(ctx.table)
        if in_place and ctx.table.grad is None:
            ctx.table.grad = torch.zeros_like(weight_vh)
        weight_grad = ctx.table.grad if in_place else torch.empty_like(weight_vh) if wants_weight else None
        bias_grad = torch.empty_like(bias_v) if wants_bias and bias_v is not None else None
        unit = grads[0] / len(labels_k) if weights_k is None else grads[0]
        rows_k = torch.arange(len(labels_k), device=labels_k.device) if rows_k is None else rows_k
        weights_k = normaliser_n.new_ones(len(labels_k)) if weights_k is None else weights_k.to(normaliser_n.dtype)
        mass_n = torch.zeros_like(normaliser_n).index_add_(0, rows_k, weights_k)
        share_k = weights_k / mass_n[rows_k].clamp(min=torch.finfo(mass_n.dtype).tiny)
        scale_n1 = (unit * mass_n)[:, None]
        scaled_nh = (hidden_nh * scale_n1).to(hidden_nh.dtype)  # row scaling commutes with the products
        for block, probability_nv, inside_k in _blocks_of_logits(hidden_nh, weight_vh, bias_v, labels_k):
            probability_nv.sub_(normaliser_n[:, None]).exp_()
            places = (rows_k[inside_k], labels_k[inside_k] - block.start)
            probability_nv.index_put_(places, -share_k[inside_k], accumulate=True)
            if bias_grad is not None:
                bias_grad[block] = scale_n1[:, 0] @ probability_nv
            unscaled_grad_nv = probability_nv.to(hidden_nh.dtype)
            if hidden_grad is not None:
                _add_product(hidden_grad, unscaled_grad_nv, weight_vh[block].to(hidden_nh.dtype))
            if weight_grad is not None:
                _add_product(weight_grad[block], unscaled_grad_nv.T, scaled_nh, keep=in_place)
        hidden_grad = None if hidden_grad is None else hidden_grad.mul_(scale_n1).to(hidden_nh.dtype)
        return hidden_grad, None if in_place else weight_grad, None, bias_grad, None, None


def _add_product(into: Tensor, left: Tensor, right: Tensor, *, keep: bool = True) -> None:
    """``into += left @ right``, or ``into = left @ right``, for any combination of types."""
    if into.dtype == left.dtype:
        into.addmm_(left, right, beta=1 if keep else 0)
    elif keep:
        into.add_(left @ right)
    else:
        into.copy_(left @ right)


def _blocks_of_logits(
    hidden_nh: Tensor, weight_vh: Tensor, bias_v: Tensor | None, labels_k: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Iterate over the blocks of the vocabulary, their logits (in reused memory), and where ``labels_k`` has their labels."""
    blocks = _blocks(len(weight_vh), len(hidden_nh))
    memory = hidden_nh.new_empty(len(hidden_nh) * (blocks[0].stop if blocks else 0))
    for block, inside_k in zip(blocks, _labels_of_blocks(labels_k, blocks), strict=True):
        yield block, _block_logits(hidden_nh, weight_vh, bias_v, block, memory), inside_k


def _block_logits(hidden_nh: Tensor, weight_vh: Tensor, bias_v: Tensor | None, block: slice, memory: Tensor) -> Tensor:
    """Logits of a block, in float32 or wider."""
    shape = len(hidden_nh), block.stop - block.start
    logits_nv = memory[: shape[0] * shape[1]].view(shape)
    torch.mm(hidden_nh, weight_vh[block].to(hidden_nh.dtype).T, out=logits_nv)
    logits_nv = logits_nv.to(_wide(hidden_nh))
    return logits_nv if bias_v is None else logits_nv.add_(bias_v[block])


def _blocks(vocabulary: int, positions: int) -> list[slice]:
    """Blocks of the vocabulary, smaller if many positions are scored."""
    size = min(VOCABULARY_BLOCK, max(VOCABULARY_BLOCK // 16, BLOCK_LOGITS // max(positions, 1)))
    return [slice(at, min(at + size, vocabulary)) for at in range(0, vocabulary, size)]


def _labels_of_blocks(labels_k: Tensor, blocks: Sequence[slice]) -> list[Tensor]:
    """The places in ``labels_k`` of the labels in each block. This waits for a GPU once, not once per block.

    >>> [places_k.tolist() for places_k in _labels_of_blocks(torch.tensor([5, 0, 3, 9]), [slice(0, 4), slice(4, 8)])]
    [[1, 2], [0]]
    """
    sorted_k, order_k = labels_k.sort(stable=True)
    edges = labels_k.new_tensor([0, *(block.stop for block in blocks)])
    return [order_k[start:stop] for start, stop in pairwise(torch.searchsorted(sorted_k, edges).tolist())]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def check_finite_rows(rows_nh: Any) -> None:
    """Refuse embeddings that are NaN or infinite.

    Args:
        rows_nh: Embeddings, states or logits: a tensor or an array with one row for each text or piece.

    Raises:
        NonFiniteError: The message has the number of such rows.
    """
    finite_n = torch.isfinite(torch.as_tensor(rows_nh)).all(dim=-1)
    if not finite_n.all():
        raise NonFiniteError(
            f"{int((~finite_n).sum())} of {finite_n.numel()} embeddings are NaN or infinite. The model has diverged, or "
            "overflows in half precision."
        )


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return tensor.to(_wide(tensor))


def normalized(vectors: Tensor) -> Tensor:
    """Scale vectors, the last axis, to length 1, in float32 or wider; a zero vector remains zero."""
    return F.normalize(at_least_float32(vectors), dim=-1)


def inside_spans(spans_bw2: Tensor, length: int) -> Tensor:
    """Mask of the positions that each span covers.

    Spans have a start and an exclusive end. Returns a boolean tensor, shape ``(batch, words, length)``.
    """
    place_l = torch.arange(length, device=spans_bw2.device)
    return (place_l >= spans_bw2[..., :1]) & (place_l < spans_bw2[..., 1:])


def pooled_spans(tokens_blh: Tensor, spans_bw2: Tensor) -> Tensor:
    """Mean state of each span, such as the pieces of a word or of a phrase.

    Args:
        tokens_blh: Shape ``(batch, length, hidden)``.
        spans_bw2: Start and exclusive end of each span, shape ``(batch, words, 2)``.

    Returns:
        Shape ``(batch, words, hidden)``; zero for an empty span.

    >>> pooled_spans(torch.tensor([[[1.0], [3.0], [5.0]]]), torch.tensor([[[0, 2], [2, 3], [0, 0]]])).flatten().tolist()
    [2.0, 5.0, 0.0]
    """
    inside_bwl = inside_spans(spans_bw2, tokens_blh.shape[1])
    size_bw = inside_bwl.sum(dim=-1, keepdim=True).clamp(min=1)
    return inside_bwl.to(tokens_blh.dtype) @ tokens_blh / size_bw


def mean_pooled(tokens_blh: Tensor, mask_bl: Tensor) -> Tensor:
    """Mean over the unmasked token states of each sequence, in float32 or wider.

    Args:
        tokens_blh: Shape ``(batch, length, hidden)``.
        mask_bl: True at the tokens to average, shape ``(batch, length)``.

    Returns:
        Shape ``(batch, hidden)``; zero for a sequence without unmasked tokens.
    """
    kept_blh = at_least_float32(tokens_blh).masked_fill(~mask_bl[..., None], 0.0)
    return kept_blh.sum(dim=1) / mask_bl.sum(dim=1, keepdim=True).clamp(min=1)


def cosines(anchors_rh: Tensor, candidates_ch: Tensor) -> Tensor:
    """Cosine of every anchor with every candidate, or with those of the same batch row, in float32 or wider.

    Args:
        anchors_rh: Shape ``(anchors, hidden)`` or ``(batch, anchors, hidden)``.
        candidates_ch: Shape ``(candidates, hidden)`` or ``(batch, candidates, hidden)``.

    Returns:
        Shape ``(anchors, candidates)`` or ``(batch, anchors, candidates)``; 0 for zero vectors.
    """
    anchors_rh, candidates_ch = normalized(anchors_rh), normalized(candidates_ch)
    with torch.autocast(anchors_rh.device.type, enabled=False):
        return anchors_rh @ candidates_ch.mT


def info_nce(similarity_brc: Tensor, positive_br: Tensor, candidate_brc: Tensor, *, temperature: float) -> Tensor:
    """InfoNCE: each anchor must identify its positive among the candidates of its own matrix.

    Args:
        similarity_brc: Similarity of each anchor to each candidate, shape ``(…, anchors, candidates)``.
        positive_br: Index of the positive of each anchor, shape ``(…, anchors)``, int64. It is always a candidate.
        candidate_brc: True at the candidates of the denominator; broadcasts to the shape of the similarities.
        temperature: Softmax temperature τ.

    Returns:
        ``-log softmax`` at the positive of each anchor, shape ``(…, anchors)``. For an anchor without other candidates,
        value and gradient are exactly 0.

    >>> similarity = torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64)
    >>> round(info_nce(similarity, torch.tensor([[0]]), torch.tensor(True), temperature=0.1).item(), 9)
    4.5401e-05
    """
    own_brc = positive_br[..., None] == torch.arange(similarity_brc.shape[-1], device=positive_br.device)
    logits_brc = (similarity_brc / temperature).masked_fill(~(candidate_brc | own_brc), -torch.inf)
    return -logits_brc.log_softmax(dim=-1).gather(-1, positive_br[..., None]).squeeze(-1)


def gather_with_gradient(tensor_bh: Tensor) -> Tensor:
    """Concatenate a tensor of equal shape over all processes, in the order of their ranks.

    The gradient of every process's loss flows back to the process that the rows come from. Without distributed training,
    the tensor is returned unchanged.
    """
    return all_gather_with_grad(tensor_bh) if get_world_size() > 1 else tensor_bh
