"""Markdown and YAML for model cards, from data that may come from somebody else."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from metaphrase.corpus.codes import standard_code
from metaphrase.io.redaction import redact, visible

#: Not printable according to Unicode, but part of the spelling of Persian, Malayalam, Sinhala and other languages.
JOINERS = "\u200c\u200d"


def cell(value: Any) -> str:
    r"""`value` as text of a table cell, list or heading: on one line, without Markdown or HTML syntax.

    >>> cell("a|b\n<script> `x`")
    'a\\|b &lt;script&gt; \\`x\\`'
    >>> cell(None), cell(1234), cell(0.25)
    ('', '1,234', '0.25')
    """
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join("".join(c if c.isprintable() or c in JOINERS else " " for c in redact(str(value))).split())
    # An underscore between letters or digits never starts emphasis: `learning_rate` stays readable.
    escaped = re.sub(r"([\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text)
    return html.escape(escaped, quote=False)


def code(text: str) -> str:
    """`text` on one line in a code span, whose marks are longer than any run of backticks in it.

    >>> code("query: "), code("a`b")
    ('`query: `', '`` a`b ``')
    """
    text = re.sub(r"\s", " ", visible(redact(text)))
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def fence(text: str | None, language: str = "") -> str:
    """`text` as a code block whose fence is longer than any run of backticks in it; empty if there is no text."""
    if not text:
        return ""
    text = redact(re.sub(r"\r\n?", "\n", text)).encode("utf-8", "replace").decode()
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    lines = text.rstrip("\n")
    return f"{ticks}{language}\n{lines}\n{ticks}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of `rows`, with columns in order of first occurrence; numbers are right-aligned."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {column for column in columns if all(isinstance(row.get(column, 0), int | float) for row in rows)}
    lines = [[cell(column) for column in columns], ["--:" if column in numeric else ":--" for column in columns]]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def hub_languages(codes: Iterable[str]) -> dict[str, list[str]]:
    """Metadata of languages. The Hub's `language` has no scripts: codes with one are in `language_bcp47`, too.

    >>> hub_languages(["sw", "zh-Hant"])
    {'language': ['sw', 'zh'], 'language_bcp47': ['zh-Hant']}
    """
    standard = {code: standard_code(code) or "" for code in codes}
    bare = dict.fromkeys(one.split("-")[0] or code for code, one in standard.items())
    return {"language": list(bare), "language_bcp47": [code for code in standard.values() if "-" in code]}


def dump_yaml(value: Mapping[str, Any], **options: Any) -> str:
    """Data as YAML of plain types, without secrets."""
    return yaml.safe_dump(_plain(value), sort_keys=False, allow_unicode=True, **options)


def _plain(value: Any) -> Any:
    """`value` in plain YAML types, without secrets; line breaks that YAML would fold become spaces."""
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(entry) for key, entry in value.items()}
    if isinstance(value, str):
        return re.sub("[\x85\u2028\u2029]", " ", redact(value))
    if isinstance(value, bool | int | float | None):
        return value
    if isinstance(value, Iterable):
        return [_plain(entry) for entry in value]
    return _plain(str(value))
