"""What is done to a trained encoder before its release: the merge with its start, and the removal of language identity."""

from __future__ import annotations

import copy
from typing import Any

from sentence_transformers import SentenceTransformer

from metaphrase.encoders.adapters import shared_copy
from metaphrase.encoders.loading import load_encoder
from metaphrase.io.files import UDHR
from metaphrase.merging import interpolate
from metaphrase.publishing.debiasing import debias, parallel_texts
from metaphrase.training.configuration import RunConfig


def finish(
    model: SentenceTransformer, config: RunConfig, *, pooling: str, show_progress: bool = False
) -> tuple[SentenceTransformer, dict[str, Any]]:
    """Merge a trained encoder with its start, and project language identity out of it, as the configuration says.

    Args:
        model: The trained encoder. It does not change.
        config: The configuration of its run.
        pooling: Pooling of a start that has none.
        show_progress: Show a progress bar.

    Returns:
        The encoder to release, and the facts ``merge`` and ``debias`` for its card.

    Raises:
        UsageError: The languages of the packaged texts do not differ in so many directions.
    """
    facts: dict[str, Any] = {}
    if config.merge is not None:
        start = load_encoder(config.model, pooling=config.pooling, default_pooling=pooling, device=str(model.device))
        start.max_seq_length = model.max_seq_length
        merged = interpolate(start, shared_copy(model), config.merge)
        merged.model_card_data = copy.copy(model.model_card_data)
        model, facts["merge"] = merged.eval(), {"alpha": config.merge}
    if config.debias:
        texts = parallel_texts()
        model, _ = debias(model, texts, config.debias, prompt="auto", show_progress=show_progress)
        facts["debias"] = {"directions": config.debias, "languages": len(texts), "data": UDHR.name}
    return model, facts
