"""Show doctests as code blocks in the API reference."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put every doctest, up to the next empty line, into a code fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
