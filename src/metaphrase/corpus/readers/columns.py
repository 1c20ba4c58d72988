"""Rows from records with named columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from metaphrase.corpus.files import BitextFile, bare_language, is_language
from metaphrase.corpus.rows import OPTIONAL, Row
from metaphrase.corpus.text import BadLine
from metaphrase.exceptions import CorpusError

_SOURCE_NAMES, _TARGET_NAMES = ("source", "src", "non_english"), ("target", "tgt", "trg", "english")


class Layout(NamedTuple):
    """The roles of the columns, and the languages of a row without language columns."""

    source: str
    target: str
    source_lang: str
    target_lang: str
    optional: tuple[str, ...]
    languages: tuple[str | None, str | None]


def find_layout(names: Iterable[str], file: BitextFile) -> Layout | None:
    """Find the columns of a pair: ``source`` and ``target``, or language codes; None if neither is found."""
    columns = {name.strip().lower(): name for name in names}
    source = next((columns[name] for name in _SOURCE_NAMES if name in columns), None)
    target = next((columns[name] for name in _TARGET_NAMES if name in columns), None)
    languages = file.source_lang, file.target_lang
    if "english" in columns or source is None or target is None:
        codes = {bare_language(name): column for name, column in columns.items() if is_language(name)}
        others = [code for code in codes if code != file.into and file.language in (code, None)]
        languages = file.language, file.into
        target = target or codes.get(file.into)
        if source is None and len(others) == 1:
            source, languages = codes[others[0]], (others[0], file.into)
    if source is None or target is None:
        return None
    source_lang, target_lang, *optional = (
        columns.get(name, name) for name in ("source_lang", "target_lang", *OPTIONAL)
    )
    return Layout(source, target, source_lang, target_lang, tuple(optional), languages)


def read_records(
    records: Iterable[tuple[int, Mapping[str, Any] | BadLine]], file: BitextFile
) -> Iterator[tuple[int, Row | BadLine]]:
    """Convert numbered records to rows. A column ``translation`` of ``{language: text}`` is read as those columns.

    Raises:
        CorpusError: The columns of a pair cannot be found.
    """
    layout: Layout | None = None
    for line, record in records:
        if isinstance(record, BadLine):
            yield line, record
            continue
        if isinstance(record.get("translation"), Mapping):
            record = {**record, **record["translation"]}
        if (
            layout is None or not {layout.source, layout.target} <= record.keys()
        ):  # JSON lines may differ in their keys
            layout = find_layout(record, file) or layout
            if layout is None:
                raise CorpusError(
                    f"{file.name}:{line}: no columns 'source' and 'target' (or two language codes, one of them "
                    f"{file.into!r}); found {', '.join(map(repr, record))}. Rename them."
                )
        source, target = record.get(layout.source), record.get(layout.target)
        if not isinstance(source, str) or not isinstance(target, str):
            yield line, BadLine("missing side", f"{layout.source if not isinstance(source, str) else layout.target!r}")
            continue
        source_lang, target_lang = layout.languages
        if value := record.get(layout.source_lang):
            source_lang = bare_language(str(value))
        if value := record.get(layout.target_lang):
            target_lang = bare_language(str(value))
        yield line, Row(source, target, source_lang, target_lang, *map(record.get, layout.optional))
