"""Prompts: the text before each sentence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args

logger = logging.getLogger(__name__)

#: MTEB's name for tasks that compare sentences of two languages, and the name of the prompt that a model stores for them.
BITEXT = "BitextMining"


#: What a text is used for.
Use = Literal["sentence", "question", "passage"]
USES: tuple[Use, ...] = get_args(Use)


def resolve_prompt(model: Any, prompt: str | None, use: Use = "sentence") -> str:
    """Text before each text: None uses no prompt, ``"auto"`` the prompt that the model stores for a use, if any.

    Questions have the prompt ``query``, and passages ``passage`` or ``document``. Sentences that are compared with each other
    have the prompt ``BitextMining``, MTEB's name of that task, or else ``query``, as the E5 models do. The name of a stored
    prompt is used as text, with a warning.
    """
    stored: Mapping[str, str] = getattr(model, "prompts", {})
    if prompt != "auto":
        if prompt and stored.get(prompt, prompt) != prompt:
            _warn_of_name(prompt, stored[prompt])
        return prompt or ""
    if use == "passage":
        return stored.get("passage") or stored.get("document") or ""
    query = stored.get("query") or ""
    return stored.get(BITEXT, query) if use == "sentence" else query


@cache
def _warn_of_name(prompt: str, text: str) -> None:
    logger.warning(
        "The prompt %r is used as text, but it is the name of a stored prompt. Pass the text %r to use that prompt.",
        prompt,
        text,
    )


def search_prompts(stored: Mapping[str, str]) -> dict[str, str]:
    """Prompts of an encoder that was trained without prompts but stays close to an original encoder with ``prompts``.

    Questions and passages keep their prompts. Sentences that are compared with each other have none.

    >>> search_prompts({"query": "query: ", "document": "", "passage": "passage: "})
    {'query': 'query: ', 'document': 'passage: ', 'passage': 'passage: ', 'BitextMining': '', 'STS': ''}
    >>> search_prompts({})
    {}
    """
    passage = stored.get("passage") or stored.get("document") or ""
    if not (passage or stored.get("query")):
        return {}
    further = {"passage": passage} if "passage" in stored else {}  # MTEB warns of names that it does not know
    return {"query": stored.get("query", ""), "document": passage, **further, BITEXT: "", "STS": ""}
