"""Positional arguments of the command line."""

from __future__ import annotations

from collections.abc import Sequence


def leading_values(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the values before the first flag from the other arguments.

    >>> leading_values(["a.txt", "b.txt", "-o", "out.tsv"])
    (['a.txt', 'b.txt'], ['-o', 'out.tsv'])
    """
    flags = (at for at, token in enumerate(argv) if token.startswith("-"))
    end = next(flags, len(argv))
    return list(argv[:end]), list(argv[end:])
