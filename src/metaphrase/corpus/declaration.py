"""The packaged Universal Declaration of Human Rights, in two parts without a common article.

Settings are chosen or estimated on one part, and measured on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.corpus.text import open_text
from metaphrase.io.files import UDHR

#: Articles with odd numbers; articles with even numbers and the preamble.
Articles = Literal["odd", "even"]


def articles_of(sets: Mapping[str, ParallelSet], articles: Articles) -> dict[str, ParallelSet]:
    """The pairs of some articles; sets of other data are returned unchanged."""
    return {language: _part(one, articles) for language, one in sets.items()}


def _part(one: ParallelSet, articles: Articles) -> ParallelSet:
    if one.path is None or one.path.parent.resolve() != UDHR.resolve():
        return one
    with open_text(one.path) as file:
        sections = [line.rstrip("\n").split("\t")[2] for line in file][1:]
    numbers = [0 if section == "preamble" else int(section.rpartition("-")[2]) for section in sections]
    return one.rows(at for at, number in enumerate(numbers) if (number % 2 == 1) == (articles == "odd"))
