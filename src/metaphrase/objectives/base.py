"""The base class of objectives, and the sources that their heads are initialised from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.packing import first_position
from metaphrase.modeling.views import View

Granularity = Literal["sentence", "word", "span", "token"]


class Objective(nn.Module, ABC):
    """One training signal: reads encodings and returns a scalar.

    Each subclass has its own file with its loss function, its head, its view if it needs one, and its citation. The
    constructor takes ``max_length`` of the recipe and the arguments of the term, all of them keyword arguments.

    Attributes:
        name: Key in recipes, logs and cards; usually the paper's abbreviation.
        granularity: Level of alignment.
        citation: BibTeX entry for the model card.
        in_batch_negatives: Whether a pair is ranked against the other pairs of its batch only.
        gather: Whether the batches of other processes are ranked against, too.
        reads_words: Whether it needs the pieces of each word, which requires a fast tokenizer.
        head: The parameters of the objective, or None. They are saved with every checkpoint.
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity]
    citation: ClassVar[str] = ""
    in_batch_negatives: ClassVar[bool] = False
    gather: bool = False
    reads_words: ClassVar[bool] = False

    def __init__(self, *, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.head: Any = None

    @abstractmethod
    def views(self) -> tuple[View, ...]:
        """The views that the objective reads."""

    @abstractmethod
    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Scalar loss of a batch; a zero with a graph if the batch has nothing to learn from."""

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module | None:
        """Create the modules of the head, without the initial weights from the encoder.

        Args:
            config: The encoder's configuration.
            **settings: The result of :meth:`head_settings` when the head was first created.
        """
        return None

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Settings of the head that follow from encoder and corpus; stored in the heads' configuration."""
        return {}

    def fill_head(self, sources: HeadSources) -> None:
        """Copy the initial weights into a new head."""

    def after_step(self, encoder: PreTrainedModel) -> None:
        """Follow the encoder (momentum); called after every optimiser step."""


@dataclass
class HeadSources:
    """Sources of the initial weights of a head.

    Attributes:
        encoder: The encoder to train.
        tokenizer: Its tokenizer.
        name: Hub id or folder of the encoder, where its masked language modelling head is looked up.
        english_ids: Sorted piece ids of the English subset vocabulary, if one is requested.
        languages: Sorted languages of the corpus.
        pooling: Pooling of the model, e.g. ``"cls"`` or ``"mean"``.
    """

    encoder: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str | None = None
    english_ids: Tensor | None = None
    languages: tuple[str, ...] = ()
    pooling: str = "cls"

    @cached_property
    def mlm_head(self) -> dict[str, Tensor] | None:
        """Weights of the checkpoint's masked language modelling head, or None.

        Keys: ``dense.weight``, ``dense.bias``, ``norm.weight``, ``norm.bias`` and ``bias`` (of the vocabulary).
        """
        from metaphrase.encoders.loading import pretrained_mlm_head

        return pretrained_mlm_head(self.name) if self.name else None


def check_positions(sources: HeadSources, positions: int, name: str) -> None:
    """Refuse sequences that are longer than the encoder's positions.

    Args:
        sources: The encoder.
        positions: Number of positions of the longest sequence.
        name: Objective or recipe that builds the sequence, for the message.

    Raises:
        ValueError: The encoder has fewer positions.
    """
    encoder = sources.encoder
    held = getattr(encoder.config, "max_position_embeddings", None)
    if held is not None and positions > held - first_position(encoder):
        raise ValueError(
            f"{name!r} builds sequences of up to {positions} positions, but the encoder has "
            f"{held - first_position(encoder)}. Lower max_length."
        )


def pair_length(sources: HeadSources, max_length: int) -> int:
    """Length of the longest pair in the encoder's format, each sentence of ``max_length`` pieces with special tokens."""
    alone, both = (sources.tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    return 2 * (max_length - alone) + both
