"""MEXMA: unmask the pieces of a sentence given the embedding of its translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, PreTrainedConfig
from transformers.models.bert.modeling_bert import BertEncoder

from metaphrase.exceptions import ModelError
from metaphrase.io.arguments import Count, Layers, Share, Weight
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import at_least_float32, normalized
from metaphrase.modeling.packing import ATTENTION, Packing
from metaphrase.modeling.views import SIDES, UNSCORED, View, masked_sentence
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_embedding_size
from metaphrase.objectives.vocabulary import FullVocabulary, VocabularyHead

UnmaskingGradient = Literal["both", "tokens", "sentence"]

#: Settings of the head's layers that are copied from the encoder.
SHARED = (
    "hidden_size",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "layer_norm_eps",
)


class UnmaskingHead(nn.Module):
    """New transformer layers over a masked sentence whose first state is the embedding of its translation.

    The layers add no position embeddings; the encoder's states contain positions already.
    """

    def __init__(self, config: PreTrainedConfig, *, layers: int, heads: int, vocabulary: Mapping[str, Any]) -> None:
        super().__init__()
        shared = {key: getattr(config, key) for key in SHARED if hasattr(config, key)}
        shape = BertConfig(
            num_hidden_layers=layers, num_attention_heads=heads, attn_implementation=ATTENTION, **shared
        )
        self.layers = BertEncoder(shape)
        self.vocabulary = VocabularyHead(config, **vocabulary)

    def fill(self, sources: HeadSources) -> None:
        """Initialise the table of an untied head; the layers keep their random initialisation."""
        self.vocabulary.fill(sources)

    def forward(self, tokens_blh: Tensor, mask_bl: Tensor, sentence_bh: Tensor) -> Tensor:
        """Compute the states from which masked pieces are predicted.

        The first state of each masked sentence is replaced by ``sentence_bh``. Returns shape ``(batch, length, hidden)``,
        zero at padding.
        """
        inputs_blh = torch.cat([sentence_bh[:, None], tokens_blh[:, 1:]], dim=1)
        packing = Packing.of(mask_bl)
        flat_nh = self.layers(packing.flatten(inputs_blh)[None], packing=packing).last_hidden_state[0]
        return packing.pad(flat_nh)


class Masked(NamedTuple):
    """Masked sentences of one side, and the embeddings of their translations.

    Attributes:
        tokens_blh: States of the masked sentences, shape ``(batch, length, hidden)``.
        mask_bl: True at tokens, false at padding.
        labels_bl: The masked pieces, ``UNSCORED`` elsewhere.
        sentence_bh: Embeddings of the unmasked translations, shape ``(batch, hidden)``.
    """

    tokens_blh: Tensor
    mask_bl: Tensor
    labels_bl: Tensor
    sentence_bh: Tensor


def cross_unmasking(head: UnmaskingHead, sides: Sequence[Masked], table_vh: Tensor) -> Tensor:
    """Predict the masked pieces of each side from the rest of the sentence and the embedding of its translation.

    Args:
        head: The layers and the vocabulary projection.
        sides: The masked sentences of each side.
        table_vh: The encoder's input embeddings, for tied heads.

    Returns:
        Mean over the sides of the mean cross-entropy of the masked pieces of a side, 0 for a side without masked pieces;
        a zero with a graph if no side has any.

    Reference: Janeiro et al. 2025 (MEXMA), cross-unmasking; the released code's ``head_forward`` and ``mlm_loss``.
    """
    states, labels, weights = [], [], []
    for side in sides:
        scored_bl = side.labels_bl != UNSCORED
        states.append(head(side.tokens_blh, side.mask_bl, side.sentence_bh)[scored_bl])
        labels.append(side.labels_bl[scored_bl])
        weights.append(at_least_float32(table_vh.new_ones(len(labels[-1]))) / (len(sides) * max(len(labels[-1]), 1)))
    return head.vocabulary(torch.cat(states), torch.cat(labels), table_vh, weights_k=torch.cat(weights))


def koleo(embeddings_bh: Tensor) -> Tensor:
    """Kozachenko-Leonenko regulariser: increase the distance of each embedding to its nearest neighbour in the batch.

    ``-mean_i log(min_{j≠i} ‖x_i - x_j‖ + ε)`` of the normalised embeddings, as in DINOv2, without the constants of the
    entropy estimate such as the batch size. ε = 1e-8 keeps the logarithm finite for equal embeddings, whose gradient is 0.
    Computed in float32 or wider.

    Args:
        embeddings_bh: Shape ``(batch, hidden)``.

    Returns:
        Scalar; a zero with a graph for a batch of one.

    Reference: Sablayrolles et al. 2019 (Spreading vectors for similarity search); Oquab et al. 2024 (DINOv2), section 4.

    >>> round(koleo(torch.eye(3)).item(), 4)  # -log √2
    -0.3466
    """
    if len(embeddings_bh) < 2:
        return embeddings_bh.sum() * 0.0
    with torch.autocast(embeddings_bh.device.type, enabled=False):
        unit_bh = normalized(embeddings_bh)
        with torch.no_grad():
            nearest_b = (unit_bh @ unit_bh.T).fill_diagonal_(-torch.inf).argmax(dim=1)
        distance_b = torch.linalg.vector_norm(unit_bh - unit_bh[nearest_b], dim=-1)
    return -(distance_b + 1e-8).log().mean()


@dataclass(eq=False, repr=False, kw_only=True)
class CrossUnmasking(Objective):
    """Unmask each sentence given the embedding of its translation, and minimise the distance of the two embeddings.

    ``MSE(s_x, s_y) + ½ (MLM(x̃, s_y) + MLM(ỹ, s_x)) + 0.01 · ½ (KoLeo(s_x) + KoLeo(s_y))``, where ``s`` is the embedding of
    an unmasked sentence and ``x̃`` a masked sentence. The gradient of the unmasking reaches the encoder through the
    embeddings and through the states of all pieces. There are no negatives.

    Args:
        mask_rate: Share of the pieces to predict.
        layers: Transformer layers of the head.
        heads: Attention heads per layer.
        alignment_weight: Weight of the distance between the embeddings of a pair.
        unmasking_weight: Weight of the unmasking.
        koleo_weight: Weight of the regulariser; 0 disables it.
        unmasking_gradient: Where the gradient of the unmasking enters the encoder: ``"both"``, only at the ``"tokens"`` of
            the masked sentence, or only at the ``"sentence"`` embedding of its translation.
        vocabulary: ``"tied"`` or ``"untied"`` (see :class:`VocabularyHead`).

    Inputs: the columns ``source`` and ``target``.

    Relations: :class:`RepresentationTranslation` reads the states of the other sentence but not its embedding;
    :class:`TranslationLanguageModeling` reads the pieces of both sentences. Unmasked and masked sentences share one encoder
    call of four sentences per pair.

    Reference: Janeiro et al. 2025 (MEXMA); weights, means and the form of KoLeo follow the released code.
    """

    name: ClassVar[str] = "mexma"
    granularity: ClassVar[Granularity] = "token"
    citation: ClassVar[str] = """\
@inproceedings{janeiro-etal-2025-mexma,
    title = "{MEXMA}: Token-level objectives improve sentence representations",
    author = "Janeiro, Jo{\\~a}o Maria and Piwowarski, Benjamin and Gallinari, Patrick and Barrault, Loic",
    booktitle = "Proceedings of ACL 2025",
    year = "2025",
}"""

    mask_rate: Share = 0.4
    layers: Layers = 6
    heads: Count = 8
    alignment_weight: Weight = 1.0
    unmasking_weight: Weight = 1.0
    koleo_weight: Weight = 0.01
    unmasking_gradient: UnmaskingGradient = "both"
    vocabulary: FullVocabulary = "tied"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.masked_views = tuple(masked_sentence(side, self.max_length, self.mask_rate) for side in SIDES)

    def views(self) -> tuple[View, ...]:
        """Return both sides, unmasked and masked."""
        return *super().views(), *self.masked_views

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Return the shape of the vocabulary projection, which has no transform.

        Raises:
            ModelError: The encoder's hidden size differs from the sentence embeddings', or is not a multiple of the number of
                attention heads.
        """
        check_embedding_size(sources, self.name)
        hidden = sources.encoder.config.hidden_size
        if hidden % self.heads:
            raise ModelError(
                f"The hidden size {hidden} is not a multiple of the {self.heads} attention heads of MEXMA's head. Set "
                "`heads` to a divisor."
            )
        return {"vocabulary": VocabularyHead.settings(sources, self.vocabulary, "none")}

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module:
        """Build the layers and the vocabulary projection."""
        return UnmaskingHead(config, layers=self.layers, heads=self.heads, **settings)

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the weighted sum of distance, unmasking and regulariser."""
        source_bh, target_bh = (encodings[side].sentence_bh for side in SIDES)
        sides = [
            self._masked(encodings[view.name], other_bh)
            for view, other_bh in zip(self.masked_views, (target_bh, source_bh), strict=True)
        ]
        loss = self.alignment_weight * F.mse_loss(at_least_float32(source_bh), at_least_float32(target_bh))
        loss = loss + self.unmasking_weight * cross_unmasking(self.head, sides, encodings["source"].table_vh)
        if self.koleo_weight:
            loss = loss + self.koleo_weight * (koleo(source_bh) + koleo(target_bh)) / 2
        return loss

    def _masked(self, encoding: Encoding, sentence_bh: Tensor) -> Masked:
        tokens_blh = encoding.tokens_blh
        if self.unmasking_gradient == "tokens":
            sentence_bh = sentence_bh.detach()
        elif self.unmasking_gradient == "sentence":
            tokens_blh = tokens_blh.detach()
        return Masked(tokens_blh, encoding.mask_bl, encoding.features["labels"], sentence_bh)
