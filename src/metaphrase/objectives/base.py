"""The base class of objectives, and the sources of their heads."""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from textwrap import dedent
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.encoders.loading import own_temperature, pretrained_mlm_head
from metaphrase.encoders.positions import max_positions
from metaphrase.exceptions import ModelError, ModelFileError, UsageError
from metaphrase.io.arguments import Length, Temperature, check_values, checked, hints_of, is_of_type
from metaphrase.io.digests import json_digest
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.frozen import FrozenEncoder
from metaphrase.modeling.functional import gather_with_gradient
from metaphrase.modeling.views import View, source_view, target_view

logger = logging.getLogger(__name__)

Granularity = Literal["sentence", "word", "span", "token"]


@dataclass(eq=False, repr=False, kw_only=True)
class Objective(nn.Module, ABC):
    """One training signal: reads encodings and returns a scalar loss.

    Each subclass has its own module, with its pure loss function, its head and view if it needs them, and its citation. Its
    fields, or the arguments of its constructor, are ``max_length`` (of the recipe) and the arguments of its term; they are
    checked against their annotations (see :mod:`metaphrase.io.arguments`).

    Attributes:
        name: Key in recipes, logs and model cards.
        granularity: What is aligned.
        citation: BibTeX for the model card.
        in_batch_negatives: Whether it compares the pairs of a batch with each other, so that batches of a single pair are
            refused or dropped.
        gather: Whether the negatives include the batches of other processes.
        shares_targets: Whether the pairs of a batch with the same target are positives of each other.
        reads_words: Whether it needs the pieces of words, which only fast tokenizers provide.
        reads_original: Whether it compares the encoder with the original one.
        any_tokenizer: Whether it also supports tokenizers without a mask token, or without special tokens before and after
            every text, such as those of decoders.
        max_length: Maximum pieces per sentence, including special tokens.
        truncatable: Whether it reads nothing but sentence embeddings, of any size: its term may have ``matryoshka``.
        original: The model to compare with: the encoder before training, or a teacher; None if it reads neither.
        head: The parameters of the objective, or None. They are saved with every checkpoint.
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity]
    citation: ClassVar[str] = ""
    in_batch_negatives: ClassVar[bool] = False
    gather = False
    shares_targets = False
    reads_words: ClassVar[bool] = False
    reads_original = False
    any_tokenizer: ClassVar[bool] = False
    truncatable = False
    max_length: Length = 32

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            checked(cls)

    def __post_init__(self) -> None:
        super().__init__()
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        check_values(hints_of(type(self)), given, type(self).__qualname__)
        self.head: Any = None
        self.original: Any = None

    def attach(self, sources: HeadSources) -> None:
        """Set what depends on the encoder: ``original``, and a temperature ``"auto"``. Called before :meth:`make_head`."""
        if self.reads_original:
            self.original = sources.original
        own: Any = self
        if getattr(own, "temperature", None) == "auto":
            known = own_temperature(sources.name, sources.prompts)
            own.temperature = default_of(self, "temperature") if known is None else known
            if not is_of_type(own.temperature, Temperature):
                raise UsageError(
                    f"'temperature' of {self.name!r} is 'auto', but the one that {sources.name or 'the encoder'} was trained "
                    "with is unknown, and there is no default. Set it to a number."
                )

    def views(self) -> tuple[View, ...]:
        """Return the views that the objective reads: by default both sides."""
        return source_view(self.max_length), target_view(self.max_length)

    @abstractmethod
    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the scalar loss of a batch; a zero with a graph if the batch has nothing to learn from."""

    def gathered(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, with gradient, if ``gather`` is true."""
        return gather_with_gradient(tensor) if self.gather else tensor

    def offset(self, batch: int, pool: int) -> int:
        """Position of this process's first row in a pool of :meth:`gathered` rows."""
        return dist.get_rank() * batch if pool > batch else 0

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module | None:
        """Build the head for an encoder of this configuration, before :meth:`fill_head` initialises it.

        Args:
            config: The encoder's configuration.
            **settings: Result of :meth:`head_settings` for the new head.

        Returns:
            The head, or None if the objective has no parameters.
        """
        return None

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Derive the shape of the head from encoder and corpus; saved in the configuration of the heads."""
        return {}

    def fill_head(self, sources: HeadSources) -> None:
        """Initialise a new head: by default with its method ``fill``."""
        if fill := getattr(self.head, "fill", None):
            fill(sources)

    def digests(self) -> dict[str, str]:
        """Digests of what the objective reads and no checkpoint contains; a run resumes only if they are the same."""
        return {} if self.original is None else {"original_encoder": self.original.digest}

    def after_step(self, encoder: PreTrainedModel) -> None:
        """Update state after an optimiser step, for objectives with a momentum encoder."""


@dataclass
class HeadSources:
    """What an objective may read when it is attached to an encoder.

    Attributes:
        encoder: The encoder to train.
        tokenizer: Its tokenizer.
        name: Hub id or folder of the encoder, which may contain a masked language modelling head.
        english_ids: Sorted ids of the pieces of the English subset vocabulary, if requested.
        languages: Sorted languages of the corpus.
        pooling: Pooling mode of the model, e.g. ``"cls"`` or ``"mean"``.
        modules: The modules of the model after the Transformer.
        prompts: The prompts that the model stores.
        embedding_size: Components of a sentence embedding, or None if it is unknown.
    """

    encoder: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str | None = None
    english_ids: Tensor | None = None
    languages: tuple[str, ...] = ()
    pooling: str = "cls"
    modules: tuple[nn.Module, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    embedding_size: int | None = None

    @cached_property
    def original(self) -> FrozenEncoder:
        """A frozen copy of the model, which all objectives share."""
        return FrozenEncoder.copy_of(self.encoder, self.modules)

    @cached_property
    def mlm_head(self) -> dict[str, Tensor] | None:
        """Weights of the checkpoint's masked language modelling head, or None if it has none.

        Keys: ``dense.weight``, ``dense.bias``, ``norm.weight``, ``norm.bias`` and ``bias`` (of the vocabulary).

        Raises:
            ModelFileError: A weight does not fit the encoder, or is NaN or infinite.
        """
        head = pretrained_mlm_head(self.name) if self.name else None
        hidden, pieces = self.encoder.config.hidden_size, self.encoder.config.vocab_size
        shapes = {"dense.weight": [hidden, hidden], "bias": [pieces]}
        for key, weight in (head or {}).items():
            expected = shapes.get(key, [hidden])
            if list(weight.shape) != expected or not torch.isfinite(weight).all():
                raise ModelFileError(
                    f"The masked language modelling head of {self.name} does not fit its encoder: {key} has the shape "
                    f"{list(weight.shape)} instead of {expected}, or NaN or infinite values. Repair the checkpoint, or omit "
                    "the head with --transform none. If you have trimmed the vocabulary, save the encoder and load it again."
                )
        return head


def default_of(objective: Objective, name: str) -> Any:
    """Default of an argument of an objective; None if it has none."""
    parameter = inspect.signature(type(objective)).parameters.get(name)
    return None if parameter is None else parameter.default


def code_digest(cls: type[Objective]) -> str | None:
    """Digest of the code of an objective, without comments; None for one of metaphrase, and for one without a source.

    It covers the modules that define the class and its bases; of a script that is run, only these classes.
    """
    own = [
        base for base in cls.__mro__ if issubclass(base, Objective) and not base.__module__.startswith("metaphrase.")
    ]
    codes: list[Any] = [base if base.__module__ == "__main__" else sys.modules.get(base.__module__) for base in own]
    try:
        sources = [ast.unparse(ast.parse(dedent(inspect.getsource(code)))) for code in dict.fromkeys(codes)]
    except (OSError, TypeError, SyntaxError):  # of an interactive session, or edited meanwhile
        return None
    return json_digest(sources)[:16] if sources else None


def check_unused(objective: Objective, names: Iterable[str], needed: str) -> None:
    """Refuse arguments that have an effect only with another one, unless they have their default.

    Raises:
        UsageError: One of them has another value.
    """
    for name in names:
        if (value := getattr(objective, name)) != default_of(objective, name):
            raise UsageError(
                f"{name!r} of {objective.name!r} is {value!r}, but has an effect only with '{needed}'. Omit it, or set the "
                "other."
            )


def check_positions(sources: HeadSources, positions: int, name: str) -> None:
    """Check that the encoder has enough positions for the longest sequence."""
    held = max_positions(sources.encoder)
    if held is not None and positions > held:
        raise ModelError(
            f"{name!r} builds sequences of up to {positions} positions, but the encoder has {held}. Lower max_length."
        )


@cache
def warn_unread_positions(encoder: str, effect: str) -> None:
    """Log once per process what follows if encoders of a class read no position ids."""
    logger.warning("%s reads no position ids, so %s", encoder, effect)


def check_embedding_size(sources: HeadSources, name: str) -> None:
    """Check that sentence embeddings are as wide as the states of the encoder."""
    hidden = sources.encoder.config.hidden_size
    if sources.embedding_size not in (None, hidden):
        raise ModelError(
            f"The head of {name!r} reads sentence embeddings of {hidden} components, the size of the encoder's states, but "
            f"those of this model have {sources.embedding_size}. Use a model with one pooling mode and no Dense module "
            "that changes the size."
        )


def corpus_languages(sources: HeadSources, name: str) -> list[str]:
    """The languages of the corpus, for language embeddings."""
    if not sources.languages:
        raise ModelError(
            f"The language embeddings of {name!r} require the languages of the corpus, which are unknown. Pass `languages` "
            "to AlignmentLoss, or set language_embeddings to false."
        )
    return list(sources.languages)


def pair_length(sources: HeadSources, max_length: int) -> int:
    """Length of the longest pair in the encoder's pair format, with sentences of ``max_length`` including special tokens."""
    alone, both = (sources.tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    return 2 * (max_length - alone) + both
