"""What every objective is, and what it may take from the encoder when it is made."""

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
    """One training signal: reads encodings, returns a scalar.

    A subclass stands in a file of its own with its pure loss function, its head, its view where it needs one, and its
    citation. Its constructor takes ``max_length`` (the recipe's) and the arguments of its term.

    Attributes:
        name: The paper's abbreviation; key in recipes, logs and cards.
        granularity: What is aligned.
        citation: BibTeX, joins the model card.
        in_batch_negatives: Whether the other pairs of a batch are all that a pair is ranked against.
        gather: Whether those of the other processes' batches are too.
        reads_words: Whether it asks which pieces a word became, which fast tokenizers alone can tell.
        head: The parameters of the objective, None where it has none. They are saved beside every checkpoint.
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity]
    citation: ClassVar[str]
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
        """The loss of a batch, scalar; a zero with a graph where the batch has nothing to learn."""

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module | None:
        """The head's modules for an encoder of this configuration, not yet filled with the encoder's weights.

        Args:
            config: The encoder's configuration.
            **settings: What :meth:`head_settings` said when the head was first made.
        """
        return None

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Facts about the encoder and the corpus that shape the head; kept in the heads' configuration."""
        return {}

    def fill_head(self, sources: HeadSources) -> None:
        """Copy into a new head the weights that it starts from."""

    def after_step(self, encoder: PreTrainedModel) -> None:
        """Called after every optimiser step, for objectives that follow the encoder (momentum)."""


@dataclass
class HeadSources:
    """What a new head may start from.

    Attributes:
        encoder: The encoder that is being trained.
        tokenizer: Its tokenizer.
        name: Hub id or folder that the encoder came from; its masked language modelling head is looked up there.
        english_ids: Ids of the pieces of the English subset vocabulary, sorted, where one was asked for.
        languages: Languages of the corpus, sorted.
        pooling: How the model pools token states, e.g. ``"cls"`` or ``"mean"``.
    """

    encoder: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str | None = None
    english_ids: Tensor | None = None
    languages: tuple[str, ...] = ()
    pooling: str = "cls"

    @cached_property
    def mlm_head(self) -> dict[str, Tensor] | None:
        """Weights of the checkpoint's own masked language modelling head, None where it has none.

        Keys: ``dense.weight``, ``dense.bias``, ``norm.weight``, ``norm.bias`` and ``bias`` (of the vocabulary).
        """
        from metaphrase.encoders.loading import pretrained_mlm_head

        return pretrained_mlm_head(self.name) if self.name else None


def check_positions(sources: HeadSources, positions: int, name: str) -> None:
    """Refuse sequences that the encoder has no positions for.

    Args:
        sources: The encoder.
        positions: How many positions the longest sequence takes.
        name: Objective or recipe that makes it, for the message.

    Raises:
        ValueError: They are more than the encoder has.
    """
    encoder = sources.encoder
    held = getattr(encoder.config, "max_position_embeddings", None)
    if held is not None and positions > held - first_position(encoder):
        raise ValueError(
            f"{name!r} makes sequences of up to {positions} positions, but the encoder has "
            f"{held - first_position(encoder)}. Keep fewer pieces of a sentence: lower max_length."
        )


def pair_length(sources: HeadSources, max_length: int) -> int:
    """Length of the longest pair in the encoder's own form, each sentence kept to ``max_length`` with its specials."""
    alone, both = (sources.tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    return 2 * (max_length - alone) + both
