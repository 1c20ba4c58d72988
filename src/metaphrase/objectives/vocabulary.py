"""The head of objectives that predict pieces: transform, vocabulary projection, cross-entropy."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from metaphrase.exceptions import ModelError, UsageError
from metaphrase.io.arguments import check_value
from metaphrase.modeling.functional import vocabulary_cross_entropy
from metaphrase.objectives.base import HeadSources

Vocabulary = Literal["tied", "untied", "english"]
#: For objectives that predict pieces of both sides.
FullVocabulary = Literal["tied", "untied"]
Transform = Literal["auto", "none"]
#: How a head is built: with the transform of the checkpoint, with a new one, or without.
TransformKind = Literal["pretrained", "fresh", "none"]


class VocabularyHead(nn.Module):
    """Predict pieces from states at labelled positions: ``softmax(W · LN(act(D h)) + b)``.

    ``act`` is the encoder's activation. The table ``W`` of a tied head is the encoder's input embeddings, which the head does
    not own. The transform before it is copied from the checkpoint's masked language modelling head, newly initialised if the
    checkpoint has none, or omitted (``"none"``).

    ``"untied"`` is a trainable copy of the table. ``"english"`` is a trainable copy of the rows of a subset, and other labels
    count as the unknown token: a softmax over fewer classes, and so a different loss.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        vocabulary: Vocabulary = "tied",
        transform: TransformKind = "fresh",
        rows: int = 0,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.vocabulary = vocabulary
        check_value(transform, TransformKind, "'transform' of VocabularyHead")
        self.transform_kind = transform
        self.transform: nn.Module = nn.Identity()
        if transform != "none":
            self.transform = nn.ModuleDict({"dense": nn.Linear(hidden, hidden), "norm": nn.LayerNorm(hidden)})
            self.transform["norm"].eps = getattr(config, "layer_norm_eps", 1e-12)
        self.activation = ACT2FN[getattr(config, "hidden_act", "gelu")]
        self.bias_v = nn.Parameter(torch.zeros(rows if rows else config.vocab_size))
        self.table_vh = nn.Parameter(torch.zeros(rows, hidden)) if rows else None
        if vocabulary == "english":
            self.register_buffer("ids_v", torch.zeros(rows, dtype=torch.int64))
            self.register_buffer("unknown", torch.zeros((), dtype=torch.int64))

    @staticmethod
    def settings(sources: HeadSources, vocabulary: Vocabulary, transform: Transform) -> dict[str, Any]:
        """Return the shape of the head for an encoder.

        Raises:
            ModelError: The encoder's word embeddings are narrower than its states, as in ALBERT.
            UsageError: The ids of an English vocabulary are missing.
        """
        embedded, hidden = sources.encoder.get_input_embeddings().embedding_dim, sources.encoder.config.hidden_size
        if embedded != hidden:
            raise ModelError(
                f"Pieces are predicted with the word embeddings of the encoder, which have {embedded} components, but its "
                f"states have {hidden}. Use an encoder of the BERT or XLM-R family, or remove the objectives that predict "
                "pieces."
            )
        rows = 0
        if vocabulary == "english":
            if sources.english_ids is None:
                raise UsageError(
                    "Vocabulary 'english' requires the ids of the pieces of the corpus's English side, but none were "
                    "given. Pass `english_ids` to AlignmentLoss (see `used_piece_ids`), or use 'tied'."
                )
            rows = len(sources.english_ids)
        elif vocabulary == "untied":
            rows = sources.encoder.config.vocab_size
        kind: str = transform
        if transform == "auto":
            kind = "fresh" if sources.mlm_head is None else "pretrained"
        return {"vocabulary": vocabulary, "transform": kind, "rows": rows}

    @torch.no_grad()
    def fill(self, sources: HeadSources) -> None:
        """Initialise the head: rows of the table, and transform and bias of the checkpoint's head."""
        pretrained = sources.mlm_head if isinstance(self.transform, nn.ModuleDict) else None
        if pretrained:
            for part in ("dense", "norm"):
                for kind in ("weight", "bias"):
                    getattr(self.transform[part], kind).copy_(pretrained[f"{part}.{kind}"])
        ids_v: Any = slice(None)
        if self.vocabulary == "english":
            assert sources.english_ids is not None
            ids_v = self.ids_v.copy_(sources.english_ids)
            unknown_id = torch.tensor(sources.tokenizer.unk_token_id)
            self.unknown.copy_(torch.searchsorted(ids_v, unknown_id))
        if self.table_vh is not None:
            self.table_vh.copy_(sources.encoder.get_input_embeddings().weight[ids_v])
        if pretrained:
            self.bias_v.copy_(pretrained["bias"][ids_v])

    def forward(
        self,
        hidden_nh: Tensor,
        labels_k: Tensor,
        table_vh: Tensor,
        *,
        rows_k: Tensor | None = None,
        weights_k: Tensor | None = None,
    ) -> Tensor:
        """Compute the cross-entropy over the scored positions: the mean, or the weighted sum if weights are given."""
        if isinstance(self.transform, nn.ModuleDict):
            hidden_nh = self.transform["norm"](self.activation(self.transform["dense"](hidden_nh)))
        if self.vocabulary == "english":
            labels_k = self.class_of(labels_k)
        weight_vh = table_vh if self.table_vh is None else self.table_vh
        return vocabulary_cross_entropy(
            hidden_nh, weight_vh, labels_k, bias_v=self.bias_v, rows_k=rows_k, weights_k=weights_k
        )

    def class_of(self, ids_n: Tensor) -> Tensor:
        """Return the row of the subset for each piece id, the row of the unknown token for other pieces."""
        row_n = torch.searchsorted(self.ids_v, ids_n).clamp(max=len(self.ids_v) - 1)
        return torch.where(self.ids_v[row_n] == ids_n, row_n, self.unknown)
