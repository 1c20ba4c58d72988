"""Codes of languages: ISO 639, with a script where it matters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache

import langcodes

from metaphrase.corpus.identification import NAMES
from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import split_list

#: Codes whose replacement in langcodes is not the usual name of corpora.
_KEPT = {"fil": "tl"}
#: Codes of ISO 639 for no language, or several.
_NO_LANGUAGE = {"mis", "mul", "und", "zxx"}


@cache
def standard_code(name: str) -> str | None:
    """The shortest code of a language, without region and without its usual script; None if `name` is not a code.

    >>> standard_code("eng_Latn"), standard_code("swh"), standard_code("pt-BR"), standard_code("zh_Hant"), standard_code("xx")
    ('en', 'sw', 'pt', 'zh-Hant', None)
    """
    try:
        given = langcodes.Language.get(name.strip())
        code = re.split("[-_]", name.strip().lower())[0]
        if given.language is None or code in _NO_LANGUAGE or not given.is_valid() or len(code) < 2:
            return None
        if len(code) > 2:  # codes of two letters are not replaced: tl would be fil
            code = given.language
        if len(code) > 2:
            code = str(langcodes.Language.get(langcodes.standardize_tag(code, macro=True)).language)
    except langcodes.LanguageTagError:
        return None
    code = _KEPT.get(code, code)
    usual = langcodes.Language.make(language=code).maximize().script
    return code if given.script in (None, usual) else f"{code}-{given.script}"


def bare_language(language: str) -> str:
    """The shortest code of a language without script and region; a name that is not a code is returned in lower case.

    >>> bare_language("zh_CN"), bare_language("zh-Hans"), bare_language("eus"), bare_language("xx")
    ('zh', 'zh', 'eu', 'xx')
    """
    return (standard_code(language) or language.strip().lower().replace("_", "-")).split("-")[0]


def language_code(name: str) -> str:
    """As :func:`standard_code`, for a language that a caller states. The `UsageError` for other names suggests a code."""
    code = standard_code(name)
    if code is None:
        names = {known.casefold(): (known, code) for code, known in NAMES.items()}
        near = difflib.get_close_matches(name.strip().casefold(), names, n=1, cutoff=0.8)
        hint = "{} is {!r}. ".format(*names[near[0]]) if near else ""
        raise UsageError(
            f"{name!r} is not the code of a language. {hint}Pass a code of ISO 639, with a script where it matters: "
            "sw, ckb, zh-Hant."
        )
    return code


def split_languages(items: Iterable[str]) -> list[str]:
    """Split codes of languages at commas and spaces, and check them with :func:`language_code`.

    >>> split_languages(["sw,tel", "ne"])
    ['sw', 'te', 'ne']
    """
    return [language_code(item) for item in split_list(items)]
