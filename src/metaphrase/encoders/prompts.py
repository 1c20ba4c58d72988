"""Prompts: the text before each sentence."""

from __future__ import annotations

from typing import Any


def resolve_prompt(model: Any, prompt: str | None) -> str:
    """Text before each sentence: ``"auto"`` is the query prompt that the model stores, None uses no prompt."""
    if prompt == "auto":
        return getattr(model, "prompts", {}).get("query") or ""
    return prompt or ""
