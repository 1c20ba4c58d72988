"""Weight decay of an encoder toward its weights at the start of training, instead of toward zero."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.adapters import has_adapter
from metaphrase.exceptions import UsageError
from metaphrase.io.digests import tensors_digest
from metaphrase.training.arguments import AlignmentTrainingArguments


class DecayTowardStart:
    """Decoupled weight decay toward the weights at the start of training.

    Before each step of the optimiser, a weight ``w`` of the encoder becomes ``w − ηλ (w − w₀)``, where ``η`` is its learning
    rate, ``λ`` its weight decay, and ``w₀`` its value at the start. With ``w₀ = 0``, this is the weight decay of AdamW.
    Other weights of the optimiser, those of heads, decay toward zero in the same way. As usual, biases, weights of
    normalisation layers, and weights without a gradient in a step do not decay.

    It holds one copy of the trained weights of the encoder, on their device. A resumed run starts from the same encoder, so
    that ``w₀`` is the same; `digest` identifies it.

    Args:
        model: The encoder, before any step and before a checkpoint is loaded.

    Reference: Li et al. 2018 (L2-SP); decoupled as in Loshchilov and Hutter 2019 (AdamW), algorithm 2.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._start = {name: weight.detach().clone() for name, weight in trained.items()}
        self._start_of = {weight: self._start[name] for name, weight in trained.items()}
        self._model = model
        self._decays: list[float] = []
        self._attached: Any = None

    @cached_property
    def digest(self) -> str:
        """Digest of the weights at the start."""
        return tensors_digest(self._start)

    def attach(self, optimizer: Any) -> None:
        """Replace the weight decay of an optimiser, whatever its class, in all of its steps.

        Raises:
            UsageError: A weight is trained that was frozen at the start.
        """
        for name, weight in self._model.named_parameters():
            if weight.requires_grad and weight not in self._start_of:
                raise UsageError(
                    f"weight_decay_toward 'start' pulls toward the weights when the trainer was made, but {name} was frozen "
                    "then, so it was not copied. Set requires_grad before you make the trainer, or omit weight_decay_toward."
                )
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
        if optimizer is not self._attached:
            optimizer.register_step_pre_hook(self._decay)
            optimizer.register_step_post_hook(self._restore)
            self._attached = optimizer

    @torch.no_grad()
    def _decay(self, optimizer: Any, *_: Any) -> None:
        """Decay the weights, and set the weight decay of the optimiser to zero for the step."""
        # A fused optimiser skips the step that a gradient scaler rejects.
        skipped = getattr(optimizer, "found_inf", None)
        applies = skipped is None or not float(skipped)
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            rate = float(group["lr"]) * group["weight_decay"]
            for weight in group["params"] if rate and applies else ():
                if weight.grad is None:
                    continue
                if (start := self._start_of.get(weight)) is None:
                    weight.mul_(1 - rate)
                else:
                    weight.lerp_(start.to(weight), rate)
            group["weight_decay"] = 0.0

    def _restore(self, optimizer: Any, *_: Any) -> None:
        """Restore the weight decay of the optimiser, which checkpoints and schedules read."""
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            group["weight_decay"] = decay


def decay_toward_start(model: SentenceTransformer, args: AlignmentTrainingArguments) -> DecayTowardStart | None:
    """The weight decay of ``weight_decay_toward: start``; None for the optimiser's own, toward zero.

    Raises:
        UsageError: The model has an adapter, or there is no weight decay.
    """
    if args.weight_decay_toward == "zero":
        return None
    if has_adapter(model):
        raise UsageError(
            "An adapter starts as a difference of zero from the encoder, so weight decay toward zero already pulls the "
            "encoder toward its start. Omit weight_decay_toward."
        )
    if not args.weight_decay:
        raise UsageError(
            "weight_decay_toward 'start' has no effect without weight decay. Set weight_decay above 0, or omit "
            "weight_decay_toward."
        )
    return DecayTowardStart(model)
