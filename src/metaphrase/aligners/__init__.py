"""Word aligners: words in, scored links out (see :class:`metaphrase.aligners.base.Aligner`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from metaphrase.aligners.base import Aligner

#: Aligners that are trained on the corpus that they align, one for each pair of languages.
STATISTICAL = ("fast_align", "hmm", "ibm1", "ibm2", "ibm3", "ibm4")


def _maker(module: str, name: str, *arguments: Any) -> Callable[..., Aligner]:
    def make(**settings: Any) -> Aligner:
        return getattr(import_module(f"metaphrase.aligners.{module}"), name)(*arguments, **settings)

    return make


#: Creates each aligner from its settings. The module of an aligner is imported on first use.
ALIGNERS: dict[str, Callable[..., Aligner]] = {
    **{model: _maker("statistical", "StatisticalAligner", model) for model in STATISTICAL},
    "embedding": _maker("embedding", "EmbeddingAligner"),
    "span": _maker("span", "SpanAligner"),
}
