"""Matryoshka representations: sentence embeddings whose first components are embeddings as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import normalized

CITATION = """\
@inproceedings{kusupati-etal-2022-matryoshka,
    title = "Matryoshka Representation Learning",
    author = "Kusupati, Aditya and Bhatt, Gantavya and Rege, Aniket and Wallingford, Matthew and Sinha, Aditya and
        Ramanujan, Vivek and Howard-Snyder, William and Chen, Kaifeng and Kakade, Sham and Jain, Prateek and Farhadi, Ali",
    booktitle = "Advances in Neural Information Processing Systems",
    year = "2022",
}"""


def truncated(encodings: Mapping[str, Encoding], size: int) -> dict[str, Encoding]:
    """Return encodings whose sentence embeddings are the normalised first components of the given ones.

    Args:
        encodings: The encodings of a batch.
        size: Number of components that are kept.

    Returns:
        The encodings with embeddings of shape ``(batch, size)``; everything else of them is shared.
    """
    return {
        name: encoding
        if encoding.sentence_bh is None
        else replace(encoding, sentence_bh=normalized(encoding.sentence_bh[:, :size]))
        for name, encoding in encodings.items()
    }
