"""Slow, obvious versions of the losses, written from the papers, one loop for each sum."""

from __future__ import annotations

import torch
from torch import Tensor


def cosine(u: Tensor, v: Tensor) -> Tensor:
    return (u * v).sum() / ((u * u).sum().sqrt() * (v * v).sum().sqrt())


def logsumexp(values: list[Tensor]) -> Tensor:
    largest = max(float(value.detach()) for value in values)
    return largest + sum((value - largest).exp() for value in values).log()


def translation_ranking_loop(
    source: Tensor, target: Tensor, *, temperature: float = 0.05, margin: float = 0.0, dot: bool = False
) -> Tensor:
    """Equation 5 of DAP, with LaBSE's margin: every source ranks all targets."""
    total = 0.0
    for i in range(len(source)):
        similarities = []
        for j in range(len(target)):
            similarity = (source[i] * target[j]).sum() if dot else cosine(source[i], target[j])
            similarities.append((similarity - (margin if i == j else 0.0)) / temperature)
        total = total + logsumexp(similarities) - similarities[i]
    return total / len(source)


def cross_entropy_loop(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """The mean over positions of minus the log-probability of the right piece."""
    total = 0.0
    for n in range(len(labels)):
        logits = [(hidden[n] * weight[v]).sum() + (0.0 if bias is None else bias[v]) for v in range(len(weight))]
        total = total + logsumexp(logits) - logits[int(labels[n])]
    return total / len(labels)


def representation_translation_loop(head, source, source_lengths, target_ids, target_lengths, table) -> Tensor:
    """Equation 6 of DAP, pair by pair: the first slots stand in the sequence and are masked, as in the released code.

    Position ``t`` of the target is ``offset + t``, ``offset`` being the head's; no pair is padded.
    """
    layers, total, count = head.layers, 0.0, 0
    attention = layers.config._attn_implementation
    layers.set_attn_implementation("eager")
    for i in range(len(source)):
        s, t = int(source_lengths[i]), int(target_lengths[i])
        rows = [source[i, k] for k in range(s)] + [head.mask_h for _ in range(t)]
        positions = [*range(s), *range(head.offset, head.offset + t)]
        mask = torch.ones(1, s + t, dtype=torch.long)
        mask[0, 0] = mask[0, s] = 0
        hidden = layers(
            inputs_embeds=torch.stack(rows)[None], position_ids=torch.tensor([positions]), attention_mask=mask
        ).last_hidden_state[0]
        for k in range(1, t):
            state = hidden[s + k]
            transform = head.vocabulary.transform
            state = transform["norm"](head.vocabulary.activation(transform["dense"](state)))
            label = target_ids[i, k : k + 1]
            total = total + cross_entropy_loop(state[None], table, label, head.vocabulary.bias_v)
            count += 1
    layers.set_attn_implementation(attention)
    return total / count
