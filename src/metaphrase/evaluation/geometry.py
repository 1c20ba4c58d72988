"""Geometry of embeddings: their spread and isotropy, hubs, and how well a language can be read from them.

Shapes: ``n`` sentences, ``m`` pool rows, ``h`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import entropy, skew
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from metaphrase.mining.search import nearest_neighbours, unit_rows

#: Neighbours of a query whose occurrences are counted.
HUB_NEIGHBOURS = 10
#: Maximum number of sentences of each language of the probe.
PROBE_SENTENCES = 400


class Hubs(NamedTuple):
    """How often each row of a pool is among the nearest neighbours of queries.

    Attributes:
        skewness: Skewness of the counts: 0 without hubs, and above 1 if a few rows are near to many queries.
        count_m: The counts, shape ``(m,)``.
    """

    skewness: float
    count_m: NDArray[np.int64]


def hubs(query_nh: NDArray[np.float32], pool_mh: NDArray[np.float32], k: int = HUB_NEIGHBOURS) -> Hubs:
    """Count how often each row of a pool is one of the ``k`` nearest neighbours of the queries, by cosine.

    Reference: Radovanović et al. 2010, "Hubs in Space: Popular Nearest Neighbors in High-Dimensional Data".
    """
    k = min(k, len(pool_mh))
    row_nk = nearest_neighbours(unit_rows(query_nh), unit_rows(pool_mh), k).row_qk
    count_m = np.bincount(row_nk.ravel(), minlength=len(pool_mh))
    return Hubs(float(skew(count_m)) if count_m.std() else 0.0, count_m)


def isotropy(embedding_nh: NDArray[np.floating]) -> float:
    """Compute the isotropy of unit embeddings, between 0 (all point in one direction) and 1 (no direction is preferred).

    The ratio of the smallest to the largest of ``Z(c) = Σ exp(c · x)`` over the eigenvectors ``±c`` of ``XᵀX``.

    Reference: Mu and Viswanath 2018, "All-but-the-Top: Simple and Effective Postprocessing for Word Representations",
    equation 4.
    """
    x_nh = np.asarray(embedding_nh, dtype=np.float64)
    _, vector_hh = np.linalg.eigh(x_nh.T @ x_nh)
    dots_nh = x_nh @ vector_hh
    z_2h = np.exp(np.stack([dots_nh, -dots_nh])).sum(axis=1)
    return float(z_2h.min() / z_2h.max())


def geometry(embedding_nh: NDArray[np.float32]) -> dict[str, float]:
    """Geometry of embeddings.

    ``effective_rank``, the exponential of the entropy of the shares of variance, lies between 1 and ``dimensions``.

    Reference: Roy and Vetterli 2007, "The effective rank: A measure of effective dimensionality", definition 1, here of
    the spectrum of the covariance matrix.

    >>> geometry(np.eye(4, dtype=np.float32))["mean_cosine"]
    0.0
    """
    embedding_nh = embedding_nh.astype(np.float64)
    n, dimensions = embedding_nh.shape
    total_h = embedding_nh.sum(axis=0)
    mean_cosine = (total_h @ total_h - (embedding_nh**2).sum()) / (n * (n - 1)) if n > 1 else 1.0
    centred_nh = embedding_nh - total_h / n
    variance_h = np.linalg.eigvalsh(centred_nh.T @ centred_nh / n)[::-1].clip(min=0)
    if variance_h.sum() < 1e-12:
        variance_h = np.eye(1, dimensions)[0]
    share_h = variance_h / variance_h.sum()
    return {
        "mean_cosine": float(mean_cosine),
        "first_component": float(share_h[0]),
        "first_ten": float(share_h[:10].sum()),
        "effective_rank": float(np.exp(entropy(share_h))),
        "isotropy": isotropy(embedding_nh),
        "dimensions": float(dimensions),
    }


def language_identification(sentences: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Measure how well a linear probe identifies the language of a sentence; the lower, the better the languages are aligned.

    A logistic regression (scikit-learn's default settings) is trained on the even rows and measured on the odd ones, and the
    reverse, with the same number of rows in every language. Translations of a sentence must have the same number in all
    languages, so that the probe is not measured on content that it was trained on.

    Args:
        sentences: Embeddings per language, shape ``(n, hidden)`` each.

    Returns:
        ``accuracy`` in percent, ``chance`` in percent, and the number of ``languages`` and of ``sentences`` of each. Empty
        with fewer than two languages or fewer than two sentences of one.
    """
    n = min([PROBE_SENTENCES, *map(len, sentences.values())])
    if len(sentences) < 2 or n < 2:
        return {}
    x_nh = np.concatenate([rows_nh[:n] for rows_nh in sentences.values()])
    language_n, fold_n = np.repeat(np.arange(len(sentences)), n), np.tile(np.arange(n) % 2, len(sentences))
    probe, folds = LogisticRegression(max_iter=1_000), PredefinedSplit(fold_n)
    accuracy = float(np.mean(cross_val_predict(probe, x_nh, language_n, cv=folds) == language_n))
    return {"accuracy": 100 * accuracy, "chance": 100 / len(sentences), "languages": len(sentences), "sentences": n}
