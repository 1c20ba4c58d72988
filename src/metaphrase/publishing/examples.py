"""Example sentences of a language, for the snippets of cards and reports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.readers import read_parallel
from metaphrase.io.files import UDHR

_FEWEST, _MOST = 25, 110


def example_pairs(languages: Iterable[str], default: str = "sw") -> tuple[str, list[tuple[str, str]]]:
    """Three short sentences of the Declaration of Human Rights with their English translations.

    They are in the first of the languages, other than English, that the packaged texts have, or else in the default.

    Returns:
        The language, and pairs of a sentence and its translation.

    >>> example_pairs(["en", "eu"])[0], example_pairs(["xx"])[0]
    ('eu', 'sw')
    """
    codes = [code for code in map(bare_language, languages) if code != "en"]
    language = next((code for code in codes if re.fullmatch("[a-z]+", code) and _path(code).is_file()), default)
    return language, _shortest(language)


def quoted(sentences: Iterable[str]) -> str:
    """A list of sentences as Python.

    >>> quoted(["Tous les êtres humains"])
    '["Tous les êtres humains"]'
    """
    return json.dumps(list(sentences), ensure_ascii=False)


def _path(language: str) -> Path:
    return UDHR / f"{language}-en.tsv.gz"


@cache
def _shortest(language: str) -> list[tuple[str, str]]:
    distinct = {pair[0]: pair for pair in reversed(read_parallel(_path(language)))}
    pairs = sorted(distinct.values(), key=lambda pair: len(pair[0]) + len(pair[1]))
    long = [pair for pair in pairs if min(map(len, pair)) >= _FEWEST]
    return [pair for pair in long if max(map(len, pair)) <= _MOST][:3] or long[:3]
