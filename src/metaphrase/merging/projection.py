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


def find_projection(model: nn.Module, most: int = 1) -> tuple[list[int], Tensor] | None:
    """Find up to ``most`` modules that project directions out: their positions, and the directions, shape ``(k, hidden)``.

    They are the last modules before a final `Normalize`, and are recognised by their form, also in a model that was saved
    and loaded: a bias-free ``Dense`` module with identity activation whose matrix is symmetric and equal to its square.
    Directions of several modules, as of a model that was debiased twice, are orthogonal to each other. None if there is none.
    """
    modules = list(model.children()) if isinstance(model, SentenceTransformer) else []
    places: list[int] = []
    direction_kh = torch.empty(0, 0)
    for at in range(len(modules) - 1 - bool(modules and isinstance(modules[-1], Normalize)), 0, -1):
        found_kh = _directions(modules[at]) if len(places) < most else None
        if found_kh is None or (places and not _are_orthogonal(found_kh, direction_kh)):
            break
        direction_kh = torch.cat([found_kh, direction_kh]) if places else found_kh
        places.insert(0, at)
    return (places, direction_kh) if places else None


def freeze_projections(model: SentenceTransformer) -> None:
    """Freeze the modules that project directions out, because training would let the directions return."""
    for place in (find_projection(model, len(model)) or ([],))[0]:
        model[place].requires_grad_(False)


def _directions(dense: nn.Module) -> Tensor | None:
    """The directions that a module projects out; None if it is not a projection."""
    if not isinstance(dense, Dense) or dense.linear.bias is not None:
        return None
    weight_hh = dense.linear.weight.detach().double().cpu()
    if not isinstance(dense.activation_function, nn.Identity) or weight_hh.shape[0] != weight_hh.shape[1]:
        return None
    errors = weight_hh - weight_hh.T, weight_hh @ weight_hh - weight_hh
    if not all(float(error.abs().max()) <= _TOLERANCE for error in errors):  # also if it is not finite
        return None
    value_h, vector_hh = torch.linalg.eigh((weight_hh + weight_hh.T) / 2)
    direction_kh = vector_hh[:, value_h < 0.5].T
    return direction_kh if len(direction_kh) else None


def _are_orthogonal(one_kh: Tensor, other_kh: Tensor) -> bool:
    return one_kh.shape[1] == other_kh.shape[1] and float((one_kh @ other_kh.T).abs().max()) <= _TOLERANCE
