"""Projection of directions out of a model's embeddings, by a module before the final `Normalize`."""

from __future__ import annotations

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from torch import Tensor, nn

#: Largest error of a map that counts as a projection; rounding to bfloat16 causes errors of 0.002.
_TOLERANCE = 5e-3


def project_out(model: SentenceTransformer, direction_kh: Tensor) -> None:
    """Add the projection ``I − VᵀV`` as a bias-free ``Dense`` module with identity activation, before a final `Normalize`.

    The directions are subtracted one by one, so that the result is bit for bit the same on every machine.

    Args:
        model: The model, which is changed.
        direction_kh: Orthonormal directions, the rows of V, shape ``(directions, hidden)``.
    """
    size = direction_kh.shape[1]
    weight_hh = torch.eye(size, dtype=torch.float64)
    for direction_h in direction_kh.double().cpu():
        weight_hh -= torch.outer(direction_h, direction_h)
    dense = Dense(size, size, bias=False, activation_function=None, init_weight=weight_hh.to(model.dtype))
    model.insert(len(model) - isinstance(model[-1], Normalize), dense.to(model.device))


def find_projection(model: nn.Module) -> tuple[int, Tensor] | None:
    """The number of the module that projects directions out, and the directions, shape ``(directions, hidden)``; or None.

    It is recognised by its form, also in a model that was saved and loaded: a bias-free ``Dense`` module with identity
    activation whose matrix is symmetric and equal to its square.
    """
    modules = list(model.children()) if isinstance(model, SentenceTransformer) else []
    at = len(modules) - 1 - bool(modules and isinstance(modules[-1], Normalize))
    dense: nn.Module | None = modules[at] if at > 0 else None
    if not isinstance(dense, Dense) or dense.linear.bias is not None:
        return None
    weight_hh = dense.linear.weight.detach().double().cpu()
    if not isinstance(dense.activation_function, nn.Identity) or weight_hh.shape[0] != weight_hh.shape[1]:
        return None
    errors = weight_hh - weight_hh.T, weight_hh @ weight_hh - weight_hh
    if any(float(error.abs().max()) > _TOLERANCE for error in errors):
        return None
    value_h, vector_hh = torch.linalg.eigh((weight_hh + weight_hh.T) / 2)
    direction_kh = vector_hh[:, value_h < 0.5].T
    return (at, direction_kh) if len(direction_kh) else None
