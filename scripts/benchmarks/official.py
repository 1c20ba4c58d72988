"""Training steps of the released code of Li et al. 2023 (DAP) in plain torch, as a baseline for speed.

Every batch is padded to 32 pieces. Source and target are encoded one after the other, similarities are a broadcast cosine,
and the head, a copy of the encoder's last two layers with untied embeddings, projects all positions of
``[source ; target]`` onto the vocabulary, although only the target's positions are scored. Translation language modelling
also projects every position of the concatenation.
"""

from __future__ import annotations

from typing import Any

import torch
from settings import MAX_LENGTH
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

UNSCORED = -100
#: Share of the pieces that translation language modelling predicts.
MASK_RATE = 0.2


class OfficialStep(nn.Module):
    """Translation ranking, optionally with representation translation or translation language modelling.

    The objective is ``"tr"``, ``"dap"`` or ``"tr-tlm"``. The vocabulary of the head has some ``rows``, or all of them.
    """

    def __init__(self, encoder: PreTrainedModel, objective: str, rows: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.objective = objective
        config = encoder.config
        settings = {**config.to_dict(), "num_hidden_layers": 2, "tie_word_embeddings": rows is None}
        settings.pop("model_type")
        self.head: Any = None
        if objective != "tr":
            self.head = AutoModelForMaskedLM.from_config(AutoConfig.for_model(config.model_type, **settings))
        if rows is not None:
            self.head.set_output_embeddings(nn.Linear(config.hidden_size, rows))
        if objective == "tr-tlm":
            self.head.base_model.encoder.layer = nn.ModuleList()  # the encoder itself precedes the projection
        self.rows = rows or config.vocab_size

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Return the sum of the losses.

        Args:
            source_ids: Pieces of the sources, padded with 1, shape ``(batch, length)``.
            target_ids: Pieces of their translations.
        """
        source_ids, target_ids = _padded(source_ids), _padded(target_ids)
        source_mask, target_mask = (source_ids != 1).long(), (target_ids != 1).long()
        source_bsh = self.encoder(source_ids, source_mask).last_hidden_state
        target_bth = self.encoder(target_ids, target_mask).last_hidden_state
        similarity_bb = F.cosine_similarity(source_bsh[:, None, 0], target_bth[None, :, 0], dim=-1)
        labels_b = torch.arange(len(similarity_bb), device=similarity_bb.device)
        loss = F.cross_entropy(similarity_bb / 0.05, labels_b)
        if self.objective == "dap":
            return loss + self._translation(source_bsh, source_mask, target_ids, target_mask)
        if self.objective == "tr-tlm":
            return loss + self._masked(
                torch.cat([source_ids, target_ids], 1), torch.cat([source_mask, target_mask], 1)
            )
        return loss

    def _translation(self, source_bsh: Tensor, source_mask: Tensor, target_ids: Tensor, target_mask: Tensor) -> Tensor:
        masks = torch.where(target_mask.bool(), target_ids.new_tensor(self.encoder.config.vocab_size - 1), 1)
        slots_bth = self.head.base_model.embeddings(masks)
        mask_bl = torch.cat([source_mask, target_mask], dim=1)
        mask_bl[:, [0, MAX_LENGTH]] = 0
        labels_bt = target_ids.masked_fill(target_mask == 0, UNSCORED)
        labels_bt[:, 0] = UNSCORED
        unscored_bs = torch.full_like(labels_bt, UNSCORED)
        inputs = {"inputs_embeds": torch.cat([source_bsh, slots_bth], dim=1), "attention_mask": mask_bl}
        return self._cross_entropy(self.head(**inputs).logits, torch.cat([unscored_bs, labels_bt], dim=1))

    def _masked(self, ids_bl: Tensor, mask_bl: Tensor) -> Tensor:
        own_t = torch.arange(MAX_LENGTH, device=ids_bl.device)
        positions = (own_t + (2 if self.encoder.config.model_type == "xlm-roberta" else 0)).repeat(2)[None]
        chosen_bl = (torch.rand(ids_bl.shape, device=ids_bl.device) < MASK_RATE) & mask_bl.bool()
        inputs_bl = ids_bl.masked_fill(chosen_bl, self.encoder.config.vocab_size - 1)
        states_blh = self.encoder(inputs_bl, mask_bl, position_ids=positions).last_hidden_state
        head = getattr(self.head, "lm_head", None) or self.head.cls
        return self._cross_entropy(head(states_blh), ids_bl.masked_fill(~chosen_bl, UNSCORED))

    def _cross_entropy(self, logits_blv: Tensor, labels_bl: Tensor) -> Tensor:
        labels_bl = labels_bl.clamp(max=self.rows - 1)
        return F.cross_entropy(logits_blv.flatten(0, 1), labels_bl.flatten(), ignore_index=UNSCORED)


def _padded(ids_bl: Tensor) -> Tensor:
    return F.pad(ids_bl, (0, MAX_LENGTH - ids_bl.shape[1]), value=1)
