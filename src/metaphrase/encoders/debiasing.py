"""Removal of language identity: the directions in which languages differ are projected out of the embeddings.

The map is linear and the same for all languages. It is a stock module of sentence-transformers inside the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import functional as F

from metaphrase.encoders.adapters import shared_copy
from metaphrase.exceptions import NonFiniteError, UsageError
from metaphrase.io.arguments import Count, checked
from metaphrase.merging.projection import find_projection, project_out

#: A direction was removed before if its part that is orthogonal to the removed ones is shorter than this.
_SHORTEST_REMAINDER = 0.01


@checked
def language_directions(embeddings: Mapping[str, Tensor], count: Count) -> tuple[Tensor, float]:
    """Find the principal directions of language identity: those in which the mean embeddings of languages differ most.

    Args:
        embeddings: Sentence embeddings of each language, shape ``(sentences, hidden)``. They are normalised first. The texts
            of the languages should have the same content, such as translations of each other.
        count: Number of directions.

    Returns:
        Orthonormal directions, shape ``(count, hidden)``, float64, and their share of the variance of the means.

    Raises:
        UsageError: The means of so many languages do not span so many directions.
        NonFiniteError: An embedding is NaN or infinite.

    Reference: Yang et al. 2021, A Simple and Effective Method To Eliminate the Self Language Bias in Multilingual
    Representations, section 3, with means of languages instead of sentences; Xie et al. 2022, Discovering Low-rank Subspaces
    for Language-agnostic Multilingual Representations, section 3.

    >>> means = {"de": torch.tensor([[1.0, 0.5, 0.0]]), "sw": torch.tensor([[1.0, -0.5, 0.0]])}
    >>> directions, share = language_directions(means, 1)
    >>> directions.abs().round().tolist(), share
    ([[0.0, 1.0, 0.0]], 1.0)
    """
    means_lh = torch.stack([F.normalize(one_nh.double(), dim=-1).mean(dim=0) for one_nh in embeddings.values()])
    if not torch.isfinite(means_lh).all():
        raise NonFiniteError("An embedding is NaN or infinite, so no direction can be found. Use another checkpoint.")
    _, scale_k, direction_kh = torch.linalg.svd(means_lh - means_lh.mean(dim=0), full_matrices=False)
    rank = int((scale_k > 1e-6).sum())
    most = min(rank, means_lh.shape[1] - 1)
    if count > most:
        raise UsageError(
            f"The mean embeddings of {len(means_lh)} languages differ in {most} directions, but 'directions' is {count}. "
            "Lower it, or estimate the directions with more languages."
        )
    variance_k = scale_k.square()
    return direction_kh[:count], float(variance_k[:count].sum() / variance_k.sum())


def without_directions(model: SentenceTransformer, direction_kh: Tensor) -> SentenceTransformer:
    """Return a view of a model whose embeddings have no component along some directions; it shares the weights.

    See :func:`metaphrase.merging.projection.project_out`. The model itself does not change. If it projects directions out
    already, the new ones are made orthogonal to them.
    """
    model = shared_copy(model)
    if (removed := find_projection(model, len(model))) is not None:
        direction_kh = direction_kh.double().cpu() - direction_kh.double().cpu() @ removed[1].T @ removed[1]
        direction_kh = direction_kh[direction_kh.norm(dim=1) > _SHORTEST_REMAINDER]
        direction_kh = torch.linalg.qr(direction_kh.T).Q.T
    if len(direction_kh):
        project_out(model, direction_kh)
    return model.eval()
