"""Rows from records with named columns."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

from metaphrase.corpus.codes import bare_language, standard_code
from metaphrase.corpus.files import LANGUAGE_COLUMN, BitextFile, is_language
from metaphrase.corpus.rows import OPTIONAL, SEPARATOR, Row
from metaphrase.corpus.text import BadLine
from metaphrase.exceptions import CorpusError
from metaphrase.io.redaction import excerpt

logger = logging.getLogger(__name__)

_SOURCE_NAMES, _TARGET_NAMES = ("source", "src", "non_english"), ("target", "tgt", "trg", "english")
#: Names of the column of hard negatives; a list of sentences is read too.
NEGATIVES = ("negatives", "negative")


class Layout(NamedTuple):
    """The roles of the columns, and the languages of a row without language columns."""

    source: str
    target: str
    source_lang: str
    target_lang: str
    optional: tuple[str, ...]
    languages: tuple[str | None, str | None]


def find_layout(names: Iterable[str], file: BitextFile) -> Layout | None:
    """Find the columns of a pair: the given ones, ``source`` and ``target``, or language codes; None if one is missing."""
    names = list(names)
    columns = _by_role(names, file)
    column = partial(_column, columns, file)
    languages: tuple[str | None, str | None]
    if file.columns:
        source, target = (name if name in names else None for name in file.columns)
        languages = file.language, file.into
    else:
        source, target, languages = _pair_columns(columns, file)
    if source is None or target is None:
        return None
    source_lang, target_lang, *optional = (column(name) or name for name in ("source_lang", "target_lang", *OPTIONAL))
    return Layout(source, target, source_lang, target_lang, tuple(optional), languages)


def _by_role(names: Iterable[str], file: BitextFile) -> dict[str, list[str]]:
    """The names of the columns by their roles, without languages in a script that is not chosen."""
    columns: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if _is_readable(name, file):
            columns[column_role(name)].append(name)
    return columns


def _is_readable(name: str, file: BitextFile) -> bool:
    """Whether a column is not that of a language in a script that is not chosen."""
    return not is_language(name.strip().lower()) or file.has_chosen_script(name)


def _source_codes(roles: Iterable[str], file: BitextFile) -> list[str]:
    """The roles of the columns that may hold the source because they are named after its language."""
    chosen, roles = {*map(bare_language, file.chosen)}, dict.fromkeys(roles).keys()
    codes = [role for role in roles if is_language(role) and role != file.into and file.language in (role, None)]
    if "id" not in (*chosen, file.language) and roles - {"id", file.into, "source_lang", "target_lang", *OPTIONAL}:
        codes = [code for code in codes if code != "id"]  # the key of a row, not Indonesian
    codes = [code for code in codes if code in chosen] or codes  # a row in another language is skipped later
    return codes if len(codes) == 1 else [*filter(standard_code, codes)]  # not "idx"


def _column(columns: Mapping[str, list[str]], file: BitextFile, role: str) -> str | None:
    """The column of a role, or None; several are refused."""
    found = columns.get(role, [])
    if len(found) > 1:
        raise CorpusError(
            f"{file.name} has several columns for {role!r}: {', '.join(map(repr, found))}. Rename all but one of them."
        )
    return found[0] if found else None


def _pair_columns(
    columns: Mapping[str, list[str]], file: BitextFile
) -> tuple[str | None, str | None, tuple[str | None, str | None]]:
    """The columns of a pair by their roles, and the languages of a row."""
    column = partial(_column, columns, file)
    codes = _source_codes(columns, file)
    code = codes[0] if len(codes) == 1 else None
    source, target = column("source"), column("target")
    languages = file.source_lang, file.target_lang
    if source is None or target is None or target.strip().lower() == "english":
        languages = file.language, file.into
        if code is not None and column(file.into) is not None and None in (source, target):
            source = target = None  # a column of another purpose, such as the origin of the pair
        if source is None and code is not None:
            source, languages = column(code), (code, file.into)
        target = target or column(file.into)
    return source, target, languages


def read_table(
    records: Iterator[tuple[int, list[str] | BadLine]], file: BitextFile, *, needs_header: bool = False
) -> Iterator[tuple[int, Row | BadLine]]:
    """Convert numbered lists of values to rows. The first is a header, or a pair unless a header is needed."""
    first = next(records, None)
    if first is None:
        return
    if isinstance(first[1], BadLine):
        raise CorpusError(f"{file.name}:1: {first[1].reason} ({first[1].detail}). The first line is the header.")
    columns = _header_columns(first[1], file)
    if columns is None:
        if needs_header:
            raise CorpusError(
                f"{file.name}:1: expected a header 'source<TAB>target', found {' '.join(first[1])[:80]!r}."
            )
        _warn_of_names(file.name, *first[1])
        columns, records = ["source", "target"], chain([first], records)

    def named() -> Iterator[tuple[int, Mapping[str, str] | BadLine]]:
        for line, values in records:
            if isinstance(values, BadLine):
                yield line, values
            elif len(values) != len(columns):
                yield line, BadLine("wrong number of columns", f"{len(values)}, not {len(columns)}")
            else:
                yield line, dict(zip(columns, values, strict=True))

    yield from read_records(named(), file)


@cache  # once for each file
def _warn_of_names(file: str, source: str, target: str) -> None:
    """Report a first line that is read as a pair, but may be a header."""
    if all(cell.isascii() and cell.strip().isidentifier() for cell in (source, target)):
        logger.warning(
            "%s:1 is read as a pair: %r, %r. If it is a header, rename the columns to source and target, or pass "
            "--source_column and --target_column.",
            *(file, source, target),
        )


def _header_columns(columns: list[str], file: BitextFile) -> list[str] | None:
    """The columns of the first line of a file; None if it is a pair."""
    kind = file.format.upper()
    if find_layout(columns, file) is not None:
        named = [*filter(str.strip, columns)]  # spreadsheets may end lines with empty columns
        if len(set(named)) < len(named):
            raise CorpusError(f"{file.name}:1: the header has a duplicate column: {excerpt(', '.join(columns))}.")
        return columns
    are_codes = not file.columns and len(columns) == 2 and all(map(standard_code, columns))
    if (
        are_codes
        and file.language
        and file.language not in (roles := [*map(column_role, columns)])
        and file.into in roles
    ):
        raise CorpusError(
            f"{file.name}:1: the columns are {' and '.join(columns)}, but the languages of the corpus are "
            f"{file.language} and {file.into}. Rename a column, or choose another language."
        )
    is_unusable = file.columns or is_header(columns) or not all(_is_readable(name, file) for name in columns)
    if is_unusable or _several_codes(columns, file):
        raise _no_columns(file, 1, columns)
    if len(columns) != 2:
        has = f"this one has {len(columns)}" if any(map(str.strip, columns)) else "the first line of this one is empty"
        header = ("," if file.format == "csv" else "<TAB>").join(["source", "target", "source_lang"])
        raise CorpusError(
            f"{file.name}:1: a {kind} without a header has two columns, source and target, but {has}. Add a header such as "
            f"'{header}', or, for a corpus, name the columns of its header: --source_column and --target_column."
        )
    return None


def _several_codes(names: Iterable[str], file: BitextFile) -> list[str]:
    """The columns of languages beside that of the target, if there are several."""
    columns = _by_role(names, file)
    codes = _source_codes(columns, file)
    is_open = not file.columns and file.into in columns and len(codes) > 1
    return [columns[code][0] for code in codes] if is_open else []


def _no_columns(file: BitextFile, line: int, names: Iterable[str]) -> CorpusError:
    """The error for a file without the columns of a pair."""
    if several := _several_codes(names, file):
        found = excerpt(", ".join(map(repr, several)))
        return CorpusError(
            f"{file.name}:{line}: several columns may be paired with {file.into!r}: {found}. "
            "Choose one of these languages (--languages), or name the columns (--source_column, --target_column)."
        )
    wanted = f"'source' and 'target' (or two language codes, one of them {file.into!r})"
    wanted = " and ".join(map(repr, file.columns)) if file.columns else wanted
    found = excerpt(", ".join(map(repr, names)))
    return CorpusError(
        f"{file.name}:{line}: no columns {wanted}; found {found}. Rename them, or, for a corpus, pass "
        "--source_column and --target_column."
    )


def is_header(names: Iterable[str], least: int = 1) -> bool:
    """Whether a line holds at least some names of columns of a pair, perhaps in quotation marks."""
    roles = [column_role(name.strip("\"' ")) for name in names]
    return sum(role in ("source", "target", "source_lang", "target_lang") for role in roles) >= least


def column_role(name: str) -> str:
    """What a column holds: ``source``, ``target``, the code of a language, or what its name says."""
    name = name.strip().lower()
    if name in _SOURCE_NAMES:
        return "source"
    if name in _TARGET_NAMES:
        return "target"
    if name in NEGATIVES:
        return NEGATIVES[0]
    if LANGUAGE_COLUMN.fullmatch(name):
        return f"{column_role(name.partition('_')[0])}_lang"
    return bare_language(name) if is_language(name) else name


def read_records(
    records: Iterable[tuple[int, Mapping[str, Any] | BadLine]], file: BitextFile
) -> Iterator[tuple[int, Row | BadLine]]:
    """Convert numbered records to rows. A column ``translation`` of ``{language: text}`` is read as those columns."""
    layout: Layout | None = None
    names: Set[str] | None = None
    for line, record in records:
        if isinstance(record, BadLine):
            yield line, record
            continue
        if isinstance(nested := record.get("translation"), Mapping):
            if repeated := sorted(record.keys() & nested.keys()):
                yield line, BadLine("repeated key", ", ".join(map(repr, repeated)))
                continue
            others = {name: value for name, value in record.items() if not is_language(name)}  # not an "id"
            record = others | dict(nested)
        if layout is None or record.keys() != names:  # JSON lines may differ in their keys
            try:
                layout, names = (
                    find_layout(record, file) or _in_another_language(record, file) or layout,
                    record.keys(),
                )
            except CorpusError as error:
                yield line, BadLine("repeated key", str(error))
                continue
            if layout is None:
                raise _no_columns(file, line, record)
        yield line, _row(record, layout, file)


def _in_another_language(names: Iterable[str], file: BitextFile) -> Layout | None:
    """The columns of a record in a language that is not chosen."""
    unnamed = dataclasses.replace(file, source_lang=None, target_lang=None)
    return find_layout(names, unnamed) if file.chosen and not file.columns else None


def _row(record: Mapping[str, Any], layout: Layout, file: BitextFile) -> Row | BadLine:
    """The row of a record, or why it is unusable."""
    names = (*layout[:4], *layout.optional)
    values: list[Any] = [record.get(name) for name in names]
    if None in values[:2]:
        return BadLine("missing side", repr(names[values.index(None)]))
    for at, (name, value) in enumerate(zip(names, values, strict=True)):
        if (
            isinstance(value, list)
            and column_role(name) == NEGATIVES[0]
            and all(isinstance(one, str | None) for one in value)
        ):
            values[at] = value = SEPARATOR.join(one for one in value if one is not None)
        if not isinstance(value, str | None):
            return BadLine("not text", f"{name} is {value!r:.40}")
    for at, language in enumerate(layout.languages, 2):
        if values[at] and not file.has_chosen_script(values[at]):
            return BadLine("language not chosen", values[at], fault=False)
        values[at] = bare_language(values[at]) if values[at] else language
    return Row(*values)
