"""Remove access tokens, the path of the home folder and control characters from text that is written or printed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

#: Environment variables that contain tokens.
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")

#: Control characters except tabs and line breaks, marks that change the direction of text, and lone surrogates.
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_hidden: set[str] = set()


def hide(secret: str | None) -> None:
    """Register a token that is not in an environment variable, for the lifetime of this process."""
    if secret:
        _hidden.add(secret)


def without_tokens(text: str) -> str:
    """Remove access tokens from text: from the environment, registered ones, and strings that look like Hub tokens.

    >>> without_tokens("push with hf_0123456789abcdefghij")
    'push with hf_***'
    """
    for name in SECRETS:
        if secret := os.environ.get(name, "").strip():
            text = text.replace(secret, f"${name}")
    for secret in _hidden:
        text = text.replace(secret, "***")
    return re.sub(r"\bhf_[A-Za-z0-9]{16,}", "hf_***", text)


def redact(text: str) -> str:
    """Remove access tokens and the path of the home folder from text."""
    text, home = without_tokens(text), _home()
    return text if home is None else re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def visible(text: str) -> str:
    r"""Escape characters that change how a terminal shows the rest of the text.

    >>> visible("\x1b[2Jname")
    '\\x1b[2Jname'
    """
    return _INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text)


def _home() -> str | None:
    """Return the path of the home folder; None if it is unknown, or the root folder."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return str(home) if home.is_absolute() and home != home.parent else None


def excerpt(value: Any) -> str:
    """The start of a value from a file, for a message: one line without control characters."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    text = "".join(character if character.isprintable() else "�" for character in text)
    return text if len(text) <= 200 else f"{text[:200]}…"
