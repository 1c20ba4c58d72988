"""Remove access tokens and the path of the home folder from text that is written or printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Environment variables that contain tokens.
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")

_hidden: set[str] = set()


def hide(secret: str | None) -> None:
    """Register a token that is not in an environment variable, for the lifetime of this process."""
    if secret:
        _hidden.add(secret)


def without_tokens(text: str) -> str:
    """Remove access tokens from text: those of the environment, those registered, and strings that look like Hub tokens.

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
    """Remove access tokens and the path of the home folder from text."""
    text, home = without_tokens(text), _home()
    return text if home is None else re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def _home() -> str | None:
    """Return the path of the home folder; None if it is unknown, or the root folder."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return str(home) if home.is_absolute() and home != home.parent else None
