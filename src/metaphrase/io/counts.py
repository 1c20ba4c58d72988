"""Numbers and lists of things in messages."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 3


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "pair"), counted(2000, "pair")
    ('1 pair', '2,000 pairs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_names(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are.

    >>> first_names(["a", "b"]), first_names(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def format_duration(seconds: float) -> str:
    """Format a duration for humans.

    >>> format_duration(1.2), format_duration(600), format_duration(9000)
    ('1 second', '10 minutes', '2.5 hours')
    """
    if seconds < 90:
        return counted(round(seconds), "second")
    return counted(round(seconds / 60), "minute") if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def format_size(count: int) -> str:
    """Format a number of bytes for humans.

    >>> format_size(1_234_567)
    '1.2 MB'
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
