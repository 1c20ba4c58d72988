"""Keeps access tokens, and the name of the home folder, out of what is written and printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Variables of the environment that hold tokens.
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")

_hidden: set[str] = set()


def hide(secret: str | None) -> None:
    """Have a token that stands in no variable of the environment taken out too, for as long as this process lives."""
    if secret:
        _hidden.add(secret)


def without_tokens(text: str) -> str:
    """`text` without access tokens: those of the environment, those that were hidden, and what looks like one of a Hub.

    >>> without_tokens("push with hf_0123456789abcdefghij")
    'push with hf_***'
    """
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, f"${name}")
    for secret in _hidden:
        text = text.replace(secret, "***")
    return re.sub(r"\bhf_[A-Za-z0-9]{16,}", "hf_***", text)


def redact(text: str) -> str:
    """`text` without access tokens and without the path of the home folder."""
    text, home = without_tokens(text), _home()
    return text if home is None else re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def _home() -> str | None:
    """The path of the home folder; None where there is none, or where it is not a folder of somebody's own."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return str(home) if home.is_absolute() and home != home.parent else None
