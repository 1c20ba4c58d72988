from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import encode_views
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe


@pytest.fixture
def make_loss(tiny_encoder):
    """Build a float64 loss of one term, without dropout, on the tiny encoder."""

    def make(objective: str, *, model: Any = None, max_length: int = 24, **args: Any) -> AlignmentLoss:
        kwargs = {key: args.pop(key) for key in ("english_ids", "languages") if key in args}
        recipe = Recipe.from_dict({"name": "one", "terms": [{"objective": objective, "args": args}]})
        encoder = copy.deepcopy(model or tiny_encoder).double()
        torch.manual_seed(1)
        return AlignmentLoss(encoder, recipe, max_length=max_length, **kwargs).double().eval()

    return make


@pytest.fixture
def batch_of(tokenizer):
    """Build the views of a loss for some rows."""

    def build(loss: AlignmentLoss, rows: list[dict[str, str]], *, seed: int = 42, epoch: int = 0) -> Any:
        collator = ParallelCollator(tokenizer, loss.views, seed=seed)
        collator.set_epoch(epoch)
        return collator(rows)

    return build


@pytest.fixture
def encodings_of(batch_of):
    """Compute the encodings of a loss for some rows, detached, so that every encoding is a leaf of the graph."""

    def build(loss: AlignmentLoss, rows: list[dict[str, str]]) -> Any:
        from dataclasses import replace

        encodings = encode_views(loss.model, batch_of(loss, rows))
        return {
            name: replace(
                encoding,
                tokens_blh=None if encoding.tokens_blh is None else encoding.tokens_blh.detach().requires_grad_(),
                sentence_bh=None if encoding.sentence_bh is None else encoding.sentence_bh.detach().requires_grad_(),
            )
            for name, encoding in encodings.items()
        }

    return build
