"""RTL: representation translation learning, the token-level objective of DAP."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from metaphrase.encoders.pooler import remove_pooler
from metaphrase.encoders.positions import first_position, reads_positions
from metaphrase.exceptions import ModelError, UsageError
from metaphrase.io.arguments import Layers, Length, Share
from metaphrase.modeling.encoding import Encoding, has_decoder
from metaphrase.modeling.languages import LanguageEmbedding
from metaphrase.modeling.packing import ATTENTION, can_pack, token_states
from metaphrase.modeling.views import UNSCORED, Batch, Generators, View
from metaphrase.objectives.base import (
    Granularity,
    HeadSources,
    Objective,
    check_positions,
    corpus_languages,
    warn_unread_positions,
)
from metaphrase.objectives.translation_ranking import TranslationRanking
from metaphrase.objectives.vocabulary import Transform, Vocabulary, VocabularyHead


@dataclass(frozen=True)
class ReconstructedSlots(View):
    """Selection of the target slots to reconstruct, for a reconstruction ratio ρ below 1.

    Provides ``masked``, boolean, shape ``(batch, max_length)``, true at masked slots.
    """

    ratio: Share
    max_length: Length

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Draw each slot independently."""
        masked_bl = np.stack([rng.random(self.max_length) < self.ratio for rng in rngs])
        return {"masked": torch.from_numpy(masked_bl)}


class ReconstructionHead(nn.Module):
    """K layers over ``[source states ; masks]`` that translate the states into the pieces of the other sentence.

    The layers, position embeddings and embedding norm are copies of the encoder's. The first slot of each side is not part of
    the sequence: it is neither visible to attention nor predicted.

    Positions ``"single"`` add one position embedding: ``0, 1, …`` to the states, ``offset, offset + 1, …`` to the slots.
    ``"double"`` follows the released code: masks pass through the embedding layer at positions ``0, 1, …``, then states and
    slots pass through it together (see :meth:`fill_slots`). The offset is fixed so that padding does not change the loss.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        layers: int,
        positions: Literal["single", "double"],
        offset: int,
        languages: Sequence[str],
        vocabulary: Mapping[str, Any],
    ) -> None:
        super().__init__()
        settings = {**config.to_dict(), "num_hidden_layers": layers, "vocab_size": (config.pad_token_id or 0) + 1}
        settings |= {"bos_token_id": None, "eos_token_id": None}  # ids beyond the reduced vocabulary
        settings.pop("model_type", None)
        if settings.get("layer_types"):  # one entry per layer; all are equal
            settings["layer_types"] = settings["layer_types"][-layers:]
        shape = AutoConfig.for_model(config.model_type, **settings)
        self.layers: PreTrainedModel = remove_pooler(AutoModel.from_config(shape))
        self.layers.get_input_embeddings().weight.requires_grad_(False)  # unused: the inputs are embeddings
        if can_pack(self.layers):
            self.layers.set_attn_implementation(ATTENTION)
        self.positions = positions
        self.offset = offset
        self.mask_h = nn.Parameter(torch.zeros(config.hidden_size))
        self.vocabulary = VocabularyHead(config, **vocabulary)
        self.languages = LanguageEmbedding(languages, config.hidden_size) if languages else None

    @torch.no_grad()
    def fill(self, sources: HeadSources) -> None:
        """Copy the encoder's last layers, its embedding layer and its mask embedding."""
        words = self.layers.get_input_embeddings().weight
        theirs = sources.encoder.state_dict()
        skipped = sources.encoder.config.num_hidden_layers - self.layers.config.num_hidden_layers
        for name, value in self.layers.named_parameters():
            if value is words:
                continue
            origin = re.sub(r"(layers?\.)(\d+)(\.)", lambda m: f"{m[1]}{int(m[2]) + skipped}{m[3]}", name, count=1)
            if origin not in theirs:
                raise ModelError(
                    f"The head of RTL starts from layers of the encoder, but {type(sources.encoder).__name__} has no "
                    f"{origin}. Use an encoder of the BERT or XLM-R family, or a recipe without RTL."
                )
            value.copy_(theirs[origin])
        self.mask_h.copy_(sources.encoder.get_input_embeddings().weight[sources.tokenizer.mask_token_id])
        self.vocabulary.fill(sources)

    def fill_slots(
        self, shape: tuple[int, int], masked_bt: Tensor | None, target_bth: Tensor | None, language_b: Tensor | None
    ) -> Tensor:
        """Fill the target slots with mask embeddings, or with states where a slot is not masked.

        With positions ``"single"``, the language vector is added to the masks. With ``"double"``, the masks pass through
        the embedding layer, the states do not, and the language vector is added to all slots after this pass.

        ``masked_bt`` is true at masked slots; None masks all. The other slots hold ``target_bth``.
        """
        slots_bth = self.mask_h.expand(*shape, -1)
        language_b1h: Any = 0.0
        if self.languages is not None:
            assert language_b is not None
            language_b1h = self.languages(language_b)[:, None]
        if self.positions == "double":
            position_t = first_position(self.layers) + torch.arange(shape[1], device=slots_bth.device)
            slots_bth = self.layers.embeddings(input_ids=None, inputs_embeds=slots_bth, position_ids=position_t[None])
        else:
            slots_bth = slots_bth + language_b1h
        if masked_bt is not None:
            assert target_bth is not None
            slots_bth = torch.where(masked_bt[..., None], slots_bth, target_bth)
        return slots_bth + language_b1h if self.positions == "double" else slots_bth

    def forward(
        self,
        source_bsh: Tensor,
        source_mask_bs: Tensor,
        slots_bth: Tensor,
        slot_mask_bt: Tensor,
        labels_bt: Tensor,
        *,
        slots_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute the states and labels of the scored target slots.

        If ``slots_first``, positions of the slots are numbered from 0 and those of the states from ``offset``. Returns
        ``hidden_nh`` of shape ``(scored, hidden)`` and ``labels_n``.
        """
        source, target = source_bsh.shape[1], slots_bth.shape[1]
        starts = (self.offset, 0) if slots_first else (0, self.offset)
        positions = [
            torch.arange(start + 1, start + length, device=source_bsh.device)
            for start, length in zip(starts, (source, target), strict=True)
        ]
        position_l = first_position(self.layers) + torch.cat(positions)
        inputs_blh = torch.cat([source_bsh[:, 1:], slots_bth[:, 1:]], dim=1)
        mask_bl = torch.cat([source_mask_bs[:, 1:], slot_mask_bt[:, 1:]], dim=1)
        unscored_bs = labels_bt.new_full((len(labels_bt), source - 1), UNSCORED)
        labels_bl = torch.cat([unscored_bs, labels_bt[:, 1:]], dim=1).masked_fill(~mask_bl, UNSCORED)
        position_bl = position_l.expand(len(mask_bl), -1)
        hidden_blh = token_states(self.layers, mask_bl, inputs_embeds=inputs_blh, position_ids=position_bl)
        scored_bl = labels_bl != UNSCORED
        return hidden_blh[scored_bl], labels_bl[scored_bl]


def representation_translation(
    head: ReconstructionHead,
    source_bsh: Tensor,
    source_mask_bs: Tensor,
    target_ids_bt: Tensor,
    target_mask_bt: Tensor,
    table_vh: Tensor,
    *,
    masked_bt: Tensor | None = None,
    target_bth: Tensor | None = None,
    language_b: Tensor | None = None,
    slots_first: bool = False,
) -> Tensor:
    """Reconstruct the pieces of one sentence from the states of its translation.

    Every target slot holds a mask embedding. The head attends to the source states and the masks, but not to the first token
    of either sentence. Each piece except the first, including the closing separator, is predicted at its slot. The loss is
    the mean over all predicted pieces of the batch.

    Args:
        head: The K layers and the vocabulary projection.
        source_bsh: States of the sentences to read, shape ``(batch, source, hidden)``.
        source_mask_bs: True at tokens, false at padding.
        target_ids_bt: Pieces of the sentences to reconstruct, shape ``(batch, target)``.
        target_mask_bt: True at tokens, false at padding.
        table_vh: The encoder's input embeddings, for tied heads.
        masked_bt: True at slots to mask and predict (reconstruction ratio ρ < 1); the other slots hold ``target_bth``. None
            masks all slots.
        target_bth: Encoder states of the sentences to reconstruct, required with ``masked_bt``.
        language_b: Id of the language of each reconstructed sentence (see :func:`language_id`), required if the head has
            language embeddings.
        slots_first: Number the positions of the slots from 0 and those of the source states from the head's ``offset``.

    Returns:
        Scalar; a zero with a graph if nothing is predicted.

    Reference: Li et al. 2023 (DAP), section 3.3, equation 6. Slots, labels and blocked positions, which the paper does not
    specify, follow the released code.
    """
    batch, length = target_ids_bt.shape
    slots_bth = head.fill_slots((batch, length), masked_bt, target_bth, language_b)
    labels_bt = target_ids_bt if masked_bt is None else target_ids_bt.masked_fill(~masked_bt, UNSCORED)
    hidden_nh, labels_n = head(
        source_bsh, source_mask_bs, slots_bth, target_mask_bt, labels_bt, slots_first=slots_first
    )
    return head.vocabulary(hidden_nh, labels_n, table_vh)


@dataclass(eq=False, repr=False, kw_only=True)
class RepresentationTranslation(Objective):
    """Translate the token states of one sentence into the pieces of the other.

    Args:
        max_length: Maximum pieces per sentence, and position of the first target slot.
        layers: K, the number of layers of the head, copied from the last layers of the encoder.
        direction: ``"source_to_target"`` reconstructs the target (xx→en, DAP), ``"target_to_source"`` the source, and
            ``"both"`` the source in the first half of the batch and the target in the second; of a single pair, the target.
        ratio: Reconstruction ratio ρ. Below 1, slots that are not masked hold the states of the same sentence.
        positions: ``"single"``, or ``"double"`` for the two passes of the released code (see :class:`ReconstructionHead`).
            With encoders that read no position ids, such as mDeBERTa, ``"double"`` adds no positions, with a warning.
        vocabulary: ``"tied"``, ``"untied"`` or ``"english"`` (see :class:`VocabularyHead`).
        transform: ``"auto"`` (pretrained, or new if the checkpoint has none) or ``"none"``.
        language_embeddings: Add an embedding of the reconstructed sentence's language to its slots.

    Inputs: the columns ``source`` and ``target``; with language embeddings also ``source_lang`` and ``target_lang``.

    Relations: :class:`TranslationLanguageModeling` predicts pieces from both sentences together and requires another pass of
    the encoder; RTL reads the states that the ranking computes.

    Reference: Li et al. 2023 (DAP), sections 3.3 and 5.1.
    """

    name: ClassVar[str] = "rtl"
    granularity: ClassVar[Granularity] = "token"
    citation: ClassVar[str] = TranslationRanking.citation

    layers: Layers = 2
    direction: Literal["source_to_target", "target_to_source", "both"] = "source_to_target"
    ratio: Share = 1.0
    positions: Literal["single", "double"] = "single"
    vocabulary: Vocabulary = "tied"
    transform: Transform = "auto"
    language_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary == "english" and self.direction != "source_to_target":
            raise UsageError(
                f"RTL's vocabulary 'english' holds the target side's pieces only, but direction {self.direction!r} also "
                "predicts those of the source. Use 'tied' or 'untied'."
            )

    def attach(self, sources: HeadSources) -> None:
        """Warn if the two passes cannot add positions."""
        super().attach(sources)
        if self.positions == "double" and not reads_positions(sources.encoder):
            effect = "`positions: double` of 'rtl' adds no positions; slots and states have only relative ones."
            warn_unread_positions(type(sources.encoder).__name__, effect)

    def views(self) -> tuple[View, ...]:
        """Return both sides, and the masked slots if ρ < 1."""
        slots = (ReconstructedSlots("reconstructed-slots", self.ratio, self.max_length),) if self.ratio < 1 else ()
        return super().views() + slots

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Return the shape of the vocabulary head and the languages of the corpus.

        Raises:
            ModelError: The encoder has a decoder, or too few layers or positions for the head, or embeddings that it cannot
                use, or the languages are unknown.
            UsageError: The vocabulary is ``"english"``, and its ids are unknown.
        """
        config = sources.encoder.config
        if self.layers > config.num_hidden_layers:
            raise ModelError(f"RTL copies {self.layers} layers, but the encoder has {config.num_hidden_layers}.")
        if has_decoder(sources.encoder):
            raise ModelError(
                f"The head of RTL copies the last layers of the encoder and runs them on states, but those of "
                f"{type(sources.encoder).__name__} belong to a decoder, which also reads piece ids. Use an encoder of the "
                "BERT or XLM-R family, or a recipe without RTL."
            )
        if len(set(getattr(config, "layer_types", None) or ())) > 1:
            raise ModelError(
                f"The head of RTL copies layers of the encoder, but those of {type(sources.encoder).__name__} differ in "
                "their attention. Use an encoder of the BERT or XLM-R family, or a recipe without RTL."
            )
        check_positions(sources, 2 * self.max_length, self.name)
        embeds = inspect.signature(getattr(sources.encoder, "embeddings", nn.Identity()).forward).parameters
        if self.positions == "double" and not {"inputs_embeds", "position_ids"} <= embeds.keys():
            raise ModelError(
                f"Positions 'double' of RTL pass states through the embedding layer, but the layer of "
                f"{type(sources.encoder).__name__} accepts none. Use positions 'single', or an encoder of the BERT or XLM-R "
                "family."
            )
        return {
            "languages": corpus_languages(sources, self.name) if self.language_embeddings else [],
            "vocabulary": VocabularyHead.settings(sources, self.vocabulary, self.transform),
        }

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module:
        """Build the K layers, the mask embedding and the vocabulary projection."""
        return ReconstructionHead(
            config, layers=self.layers, positions=self.positions, offset=self.max_length, **settings
        )

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the reconstruction loss."""
        source, target = encodings["source"], encodings["target"]
        masked_bl = encodings["reconstructed-slots"].features["masked"] if self.ratio < 1 else None
        slots_first = self.positions == "double"  # the released code concatenates source and target in this order
        half = len(source.ids_bl) // 2
        if self.direction == "source_to_target" or (self.direction == "both" and not half):
            return self._reconstruct(target, source, masked_bl, slice(None))
        if self.direction == "target_to_source":
            return self._reconstruct(source, target, masked_bl, slice(None), slots_first=slots_first)
        first = self._reconstruct(source, target, masked_bl, slice(0, half), slots_first=slots_first)
        second = self._reconstruct(target, source, masked_bl, slice(half, None))
        return (first + second) / 2

    def _reconstruct(
        self, wanted: Encoding, read: Encoding, masked_bl: Tensor | None, rows: slice, *, slots_first: bool = False
    ) -> Tensor:
        length = wanted.ids_bl.shape[1]
        return representation_translation(
            self.head,
            read.tokens_blh[rows],
            read.mask_bl[rows],
            wanted.ids_bl[rows],
            wanted.mask_bl[rows],
            read.table_vh,
            masked_bt=None if masked_bl is None else masked_bl[rows, :length],
            target_bth=wanted.tokens_blh[rows],
            language_b=wanted.features["language"][rows],
            slots_first=slots_first,
        )
