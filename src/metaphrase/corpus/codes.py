"""Codes of languages: ISO 639, with a script where it matters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache

import langcodes

from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import split_list

#: English names of languages, at least of those that the classifier of `metaphrase.corpus.identification` knows.
_NAMED = (
    "ace Acehnese/af Afrikaans/am Amharic/an Aragonese/ar Arabic/ary Moroccan Arabic/arz Egyptian Arabic/as Assamese/"
    "az Azerbaijani/ba Bashkir/bcl Central Bikol/be Belarusian/bg Bulgarian/bn Bengali/bo Tibetan/br Breton/bs Bosnian/"
    "ca Catalan/ceb Cebuano/crh Crimean Tatar/cs Czech/cy Welsh/da Danish/de German/dz Dzongkha/el Greek/en English/"
    "eo Esperanto/es Spanish/et Estonian/eu Basque/ext Extremaduran/fa Persian/fi Finnish/fo Faroese/fr French/"
    "fuv Fulfulde/fy West Frisian/ga Irish/gcf Guadeloupean Creole/gcr Guianese Creole/gd Scottish Gaelic/gl Galician/"
    "gom Konkani/grc Ancient Greek/gu Gujarati/gug Guarani/guw Gun/ha Hausa/hbo Biblical Hebrew/he Hebrew/hi Hindi/"
    "hr Croatian/ht Haitian Creole/hu Hungarian/hy Armenian/id Indonesian/ig Igbo/is Icelandic/it Italian/ja Japanese/"
    "jv Javanese/ka Georgian/kab Kabyle/kik Kikuyu/kk Kazakh/km Khmer/kn Kannada/ko Korean/ku Kurdish/ky Kyrgyz/"
    "la Latin/lb Luxembourgish/lg Ganda/lij Ligurian/ln Lingala/lo Lao/lt Lithuanian/ltg Latgalian/lv Latvian/"
    "mg Malagasy/mk Macedonian/ml Malayalam/mn Mongolian/mr Marathi/ms Malay/mt Maltese/my Burmese/ne Nepali/nl Dutch/"
    "nn Norwegian Nynorsk/no Norwegian/nso Northern Sotho/oc Occitan/om Oromo/or Odia/pa Punjabi/pcm Nigerian Pidgin/"
    "pl Polish/ps Pashto/pt Portuguese/qu Quechua/ro Romanian/ru Russian/rw Kinyarwanda/sa Sanskrit/"
    "sdh Central Kurdish/se Northern Sami/si Sinhala/sk Slovak/sl Slovenian/sn Shona/so Somali/sq Albanian/sr Serbian/"
    "st Southern Sotho/su Sundanese/sv Swedish/sw Swahili/ta Tamil/te Telugu/tg Tajik/th Thai/tk Turkmen/tl Tagalog/"
    "tr Turkish/tt Tatar/ug Uyghur/uk Ukrainian/ur Urdu/uz Uzbek/uzs Southern Uzbek/vec Venetian/vi Vietnamese/"
    "vo Volapük/wa Walloon/wo Wolof/wuu Wu Chinese/xh Xhosa/yo Yoruba/yue Cantonese/zh Chinese/zu Zulu"
)
NAMES = dict(name.split(" ", 1) for name in _NAMED.split("/"))
_CODES = {name.casefold(): code for code, name in NAMES.items()}

#: Codes whose replacement in langcodes is not the usual name of corpora.
_KEPT = {"fil": "tl"}
#: Codes of ISO 639 for no language, or several.
_NO_LANGUAGE = {"mis", "mul", "und", "zxx"}
#: Suffixes and columns with another meaning, some of which are also language codes: src (Sardinian), raw (Rawang).
NO_CODES = frozenset(["txt", "tsv", "csv", "raw", "src", "tgt", "trg", "tmp", "old", "log", "all"])


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
    """The shortest code of a language, given by a code or its English name, without script and region.

    Other names are returned in lower case.

    >>> bare_language("zh_CN"), bare_language("zh-Hans"), bare_language("eus"), bare_language("Swahili"), bare_language("xx")
    ('zh', 'zh', 'eu', 'sw', 'xx')
    """
    name = language.strip()
    return (standard_code(name) or _CODES.get(name.casefold()) or name.lower().replace("_", "-")).split("-")[0]


@cache
def script_of(language: str) -> str | None:
    """The script that a code states, or else the usual one of its language in its region; None if it is not a code.

    >>> script_of("zh_Hant"), script_of("zh-TW"), script_of("zh")
    ('Hant', 'Hant', 'Hans')
    """
    try:
        given = langcodes.Language.get(language.strip())
    except langcodes.LanguageTagError:
        return None
    usual = langcodes.Language.make(language=bare_language(language), territory=given.territory).maximize().script
    return given.script or usual


def is_in_script(language: str, chosen: Iterable[str]) -> bool:
    """Whether the script of a language is among those of the codes `chosen`; a code without a script stands for all scripts.

    True for a language that no chosen code names.

    >>> [is_in_script(code, ["zh-Hant", "sr"]) for code in ("zh-TW", "zh-Hans", "zh", "sr-Latn", "sw")]
    [True, False, False, True, True]
    """
    codes = [code.partition("-") for code in chosen]
    scripts = [script for bare, _, script in codes if bare == bare_language(language)]
    return not scripts or "" in scripts or script_of(language) in scripts


def find_languages(code: str, available: Iterable[str]) -> list[str]:
    """The names among `available` that a code denotes, in their order.

    That is the name with the same spelling. Otherwise, they are the names with the same :func:`standard_code`; of a code
    with a script or a region, those in the same script that state no other region.

    >>> [find_languages(code, ["pt_BR", "pt_PT"]) for code in ("pt-BR", "pt-AO", "pt")]
    [['pt_BR'], [], ['pt_BR', 'pt_PT']]
    >>> [find_languages(code, ["zh_CN", "zh_TW"]) for code in ("zh-Hant", "zh-Hans", "zho")]
    [['zh_TW'], ['zh_CN'], ['zh_CN', 'zh_TW']]
    """
    names = list(available)
    if spelled := [name for name in names if _spelling(name) == _spelling(code)]:
        return spelled
    if "-" not in _spelling(code):
        return [name for name in names if (standard_code(name) or name) == (standard_code(code) or code)]
    return [
        name
        for name in names
        if bare_language(name) == bare_language(code)
        and script_of(name) == script_of(code)
        and len({region_of(name), region_of(code)} - {None}) < 2
    ]


def _spelling(code: str) -> str:
    return code.strip().lower().replace("_", "-")


def region_of(language: str) -> str | None:
    """The region that a code states.

    >>> region_of("pt_BR"), region_of("pt")
    ('BR', None)
    """
    try:
        return langcodes.Language.get(language.strip()).territory
    except langcodes.LanguageTagError:
        return None


def is_plain(code: str) -> bool:
    """Whether a bare code has only letters and digits of ASCII, and can be a part of the name of a file."""
    return code.isascii() and code.isalnum()


def language_code(name: str) -> str:
    """As :func:`standard_code`, for a language that a caller states. The `UsageError` for other names suggests a code."""
    code = standard_code(name)
    if code is None:
        near = difflib.get_close_matches(name.strip().casefold(), _CODES, n=1, cutoff=0.8)
        hint = f"{NAMES[_CODES[near[0]]]} is {_CODES[near[0]]!r}. " if near else ""
        raise UsageError(
            f"{name!r} is not the code of a language. {hint}Pass a code of ISO 639, with a script where it matters: "
            "sw, ckb, zh-Hant."
        )
    return code


def code_with_script(name: str) -> str:
    """As :func:`language_code`, with the script if `name` states it, or a region with another script than the usual one.

    >>> code_with_script("zho_Hans"), code_with_script("zh_CN"), code_with_script("zh_TW"), code_with_script("swh_Latn")
    ('zh-Hans', 'zh', 'zh-Hant', 'sw-Latn')
    """
    code, script = language_code(name), langcodes.Language.get(name.strip()).script
    if (of_region := script_of(name)) != script_of(bare_language(code)):
        script = script or of_region
    return f"{bare_language(code)}-{script}" if script else code


def code_with_region(name: str) -> str:
    """As :func:`language_code`, or the code as it is spelled if it states a region.

    >>> code_with_region("zho_Hans"), code_with_region("pt_BR")
    ('zh', 'pt_BR')
    """
    code = language_code(name)
    return name if region_of(name) else code


def split_languages(items: Iterable[str], *, keep_scripts: bool = False) -> list[str]:
    """Split codes of languages at commas and spaces, and check them with :func:`language_code`; each counts once.

    Usual scripts are kept for a selection from corpora (see :func:`code_with_script`).

    >>> split_languages(["sw,tel", "ne swh"])
    ['sw', 'te', 'ne']
    """
    code = code_with_script if keep_scripts else language_code
    return list(dict.fromkeys(code(item) for item in split_list(items)))
