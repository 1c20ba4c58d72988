"""Finding the files of a corpus, and the format and languages of each."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from metaphrase.corpus.codes import (
    NO_CODES,
    bare_language,
    code_with_script,
    is_in_script,
    language_code,
    script_of,
    standard_code,
)
from metaphrase.corpus.hub import is_hub_name, parse_hub_name, stream_rows
from metaphrase.corpus.kinds import check_distinct, check_regular
from metaphrase.corpus.rows import OPTIONAL
from metaphrase.corpus.text import MAX_CHARS, MAX_EXPANSION, read_lines
from metaphrase.exceptions import CorpusError, MissingFileError, UsageError
from metaphrase.io.digests import PinnedFile

logger = logging.getLogger(__name__)

#: Names of splits; others are recognised only if they are asked for.
SPLITS = ("train", "dev", "valid", "validation", "test", "devtest", "eval")
#: Names of the same split.
_DEV = frozenset(["dev", "valid", "validation"])
FORMATS = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet", ".tmx": "tmx"}

#: Files that `datasets` writes with `save_to_disk`.
_SAVED = ("dataset_info.json", "dataset_dict.json")

_LANGUAGE = re.compile(r"[a-z]{2,3}(?:_[a-z]{2,8}|(?:[-_][a-z]{4})?(?:[-_](?:[a-z]{2}|\d{3}))?)")
# sw, ca_valencia, zh_hant_tw, zh-Hant, pt-BR, zh-Hant-TW, es-419
_NAMED = r"[A-Za-z]{2,3}(?:_[A-Za-z]{2,8}|_[A-Za-z]{4}_[A-Za-z]{2}|(?:[-_][A-Z][a-z]{3})?(?:[-_](?:[A-Z]{2}|\d{3}))?)"
_LOCALE = r"[a-z]{2,3}-(?!EN)[A-Z]{2}(?:[._]|$)"  # en-GB, of a single language; sw-EN is a pair
_PAIR = re.compile(rf"(?:^|[._])(?!{_LOCALE})({_NAMED})-({_NAMED})(?=[._]|$)")
_BRACES = re.compile(r"(.*)\{([^,{}]+),([^,{}]+)\}(.*)")
#: Lines that show which columns a file has.
_PEEKED = 100
#: Names of the columns that state the languages of a row.
LANGUAGE_COLUMN = re.compile("(?:source|src|target|tgt|trg)_(?:lang|language)", re.IGNORECASE)
_KEYS = "|".join([LANGUAGE_COLUMN.pattern, *OPTIONAL, "negative"])
_KEY = re.compile(rf'(?<!\\)"\s*({_KEYS})\s*"\s*:(?!\s*null\b)', re.IGNORECASE)


#: Names of files and folders of parallel text, or data sets in memory.
CorpusLike: TypeAlias = str | Path | Dataset | Sequence[str | Path | Dataset]


@dataclass(frozen=True)
class BitextFile:
    """One file (or Moses pair, or Hub data set) of parallel text.

    Attributes:
        name: Its name as passed by the caller, for the report and error messages.
        format: ``tsv``, ``csv``, ``jsonl``, ``parquet``, ``tmx``, ``moses``, ``hub`` or ``dataset``.
        paths: Its file, or the two files of a Moses pair, source language first; empty for a data set.
        source_lang: Language of the column ``source``, if the file's name or the caller states it.
        target_lang: Language of the column ``target``.
        into: The corpus's target language.
        split: Split of a Hub data set.
        revision: Branch, tag or commit of a Hub data set; None is the default branch.
        max_expansion: Largest expansion of a compressed file; None disables the limit.
        columns: Names of the columns of the source and the target, in a file that has them; None finds them by their names.
        chosen: Codes of the chosen languages, which limit the languages and scripts of columns and rows; empty for no limit.
        pins: The files of ``paths`` with the digests of their content, after `pinned`.
        rows: The rows of a data set in memory.
    """

    name: str
    format: str
    paths: tuple[Path, ...] = ()
    source_lang: str | None = None
    target_lang: str | None = None
    into: str = "en"
    split: str = "train"
    revision: str | None = None
    max_expansion: float | None = MAX_EXPANSION
    columns: tuple[str, str] | None = None
    chosen: tuple[str, ...] = ()
    pins: tuple[PinnedFile, ...] = ()
    rows: Any = field(default=None, compare=False, repr=False)

    def pinned(self) -> BitextFile:
        """The same file with the digests of its content, which is checked whenever it is read."""
        return self if self.pins else dataclasses.replace(self, pins=tuple(map(PinnedFile.of, self.paths)))

    @property
    def sha256(self) -> str | None:
        """The pinned digest, comma-separated for the two files of a Moses pair; None on the Hub."""
        return ",".join(pin.sha256 for pin in self.pins) or None

    @property
    def language(self) -> str | None:
        """The language that is not the corpus's target."""
        return self.target_lang if self.source_lang == self.into else self.source_lang

    def has_chosen_script(self, language: str) -> bool:
        """Whether a language that a column or row states is in a chosen script."""
        return not any("-" in code for code in self.chosen) or is_in_script(language, self.chosen)


def find_files(
    corpus: CorpusLike,
    *,
    languages: Sequence[str] | None = None,
    source_lang: str | None = None,
    target_lang: str = "en",
    split: str = "train",
    source_column: str | None = None,
    target_column: str | None = None,
) -> list[BitextFile]:
    """Find the files of a corpus. See `load_corpus` for the arguments.

    Raises:
        FileNotFoundError: A file does not exist, or a folder has none for a language or split.
        ValueError: A file's format is unknown, its languages contradict the arguments, two names denote one text, or a
            language code is unknown.
    """
    items = [corpus] if isinstance(corpus, str) or not isinstance(corpus, Sequence) else corpus
    if not items:
        raise UsageError("The corpus is an empty list. Pass files, folders, hf:org/name or data sets.")
    chosen = tuple(dict.fromkeys(map(code_with_script, languages or ())))
    wanted = list(dict.fromkeys(map(bare_language, chosen)))
    into = _target_language(target_lang)
    if len(wanted) > 1 and into in wanted:
        raise UsageError(f"--languages names the languages besides the target language, {into}. Omit {into}.")
    given = bare_language(language_code(source_lang)) if source_lang else None
    files = list(dict.fromkeys(chain.from_iterable(_files(item, into, split) for item in items)))
    files = _with_columns(files, source_column, target_column)
    if given is None and len(wanted) == 1:
        given = wanted[0]
    unnamed = {i for i, file in enumerate(files) if file.language is None}  # their columns may state any language
    for i, file in enumerate(files):
        if file.language is None and given:
            _warn_of_another_pair(file, into)
            files[i] = dataclasses.replace(file, source_lang=given, target_lang=into)
        elif source_lang and file.language != given:
            raise CorpusError(
                f"The name of {file.name} states the language {file.language!r}, but source_lang is {given!r}."
            )
    if wanted:
        found = {file.language for file in files}
        kept = [file for i, file in enumerate(files) if i in unnamed or _is_chosen(file, chosen)]
        missing = [code for code in chosen if not any(_is_chosen(file, [code]) for file in kept)]
        if missing and None not in found and not any(states_languages(files[i]) for i in unnamed):
            available = ", ".join(sorted({_spelled(file) or str(file.language) for file in files})) or "none"
            raise MissingFileError(f"The corpus has no pairs for {', '.join(missing)}. Its languages: {available}.")
        # a row whose language has no script is in that of the file's name
        limit = tuple(sorted(chosen))
        files = [file if "-" in (_spelled(file) or "") else dataclasses.replace(file, chosen=limit) for file in kept]
    for path in chain.from_iterable(file.paths for file in files):
        check_regular(path)
    check_distinct(file.paths for file in files)
    return files


def _target_language(name: str) -> str:
    """The code of a target language, which has no script."""
    code, _, script = language_code(name).partition("-")
    if script:
        raise UsageError(
            f"Targets cannot be selected by script: {name}. Pass {code} as the target language, and only files with targets "
            "in this script."
        )
    return code


def _is_chosen(file: BitextFile, chosen: Collection[str]) -> bool:
    """Whether the language of a file is chosen, in the script that its name or its rows state."""
    if file.language is None or file.language not in map(bare_language, chosen):
        return False
    spelled = _spelled(file)
    return spelled is None or is_in_script(spelled, chosen) or ("-" not in spelled and states_languages(file))


def _spelled(file: BitextFile) -> str | None:
    """The code of the language in the name of a file, with a script that is stated or follows from its region."""
    pairs = _PAIR.findall(file.name if file.format == "hub" else ".".join(map(_stem, file.paths)))
    for code in [*map(_suffix, file.paths), *chain.from_iterable(pairs)]:
        if file.language and standard_code(code) and bare_language(code) == file.language:
            script = script_of(code)
            return code_with_script(code) if script == script_of(file.language) else f"{file.language}-{script}"
    return None


def states_languages(file: BitextFile) -> bool:
    """Whether the rows of a file state languages in columns of their own, which may differ from the file's.

    Any JSON line may have a key that the others lack, so all are searched. A damaged Parquet file is left to its reader.
    """
    try:
        names = json_keys(file) if file.format == "jsonl" else _texts_with_names(file)
        return any(LANGUAGE_COLUMN.search(name) for name in names)
    except (OSError, pa.ArrowException):
        return True


def has_columns(file: BitextFile, names: Iterable[str]) -> bool:
    """Whether a file has a column with one of some names, or may have one: a damaged file is left to its reader."""
    try:
        return any(name in text for text in _texts_with_names(file) for name in names)
    except (OSError, pa.ArrowException):
        return True


def _texts_with_names(file: BitextFile) -> Iterable[str]:
    """The names of the columns of a file, or its first lines, which contain them."""
    if file.format in ("tmx", "moses"):
        return ()
    if file.format == "parquet":
        return pq.read_schema(file.paths[0]).names
    if file.format in ("hub", "dataset"):
        return next(iter(dataset_rows(file)), {})
    return [str(line) for _, line in islice(read_lines(file.paths[0], max_expansion=file.max_expansion), _PEEKED)]


def json_keys(file: BitextFile, max_chars: int = MAX_CHARS) -> Iterator[str]:
    """Yield the optional columns that have a value anywhere in a file of JSON lines, in lower case and with repetitions."""
    for _, line in read_lines(file.paths[0], max_chars, file.max_expansion):
        if isinstance(line, str):
            yield from map(str.lower, _KEY.findall(line))


def dataset_rows(file: BitextFile) -> Iterable[dict[str, Any]]:
    """The rows of a data set on the Hub or in memory."""
    rows: Iterable[dict[str, Any]] = file.rows
    return stream_rows(file.name, file.split, file.revision) if file.format == "hub" else rows


def _with_columns(files: list[BitextFile], source: str | None, target: str | None) -> list[BitextFile]:
    """The files with the columns that the caller names, if any; of several files, some may have others."""
    if source is None and target is None:
        return files
    if source is None or target is None:
        raise UsageError("Name the columns of both sides: source_column and target_column.")
    if source == target:
        raise UsageError(f"The column {source!r} cannot be both sides. Name different columns.")
    having = [file for file in files if has_columns(file, (source, target))]
    if files and not having and all(file.format in ("moses", "tmx") for file in files):
        raise UsageError(f"{file_names(files)}: {files[0].format} files have no columns. Omit --source_column.")
    return [
        dataclasses.replace(file, columns=(source, target)) if file in having or not having else file for file in files
    ]


def find_file(path: str | Path, *, source_lang: str | None = None, target_lang: str = "en") -> BitextFile:
    """Find the file of a corpus that consists of a single file.

    Raises:
        CorpusError: The corpus has several files.
    """
    files = find_files(path, source_lang=source_lang, target_lang=target_lang)
    if len(files) != 1:
        raise CorpusError(
            f"{path} has {len(files)} parallel files, but exactly one is required. Pass the path of one of them."
        )
    return files[0]


def file_names(files: Iterable[BitextFile]) -> str:
    """The names of some files, for a message."""
    return ", ".join(file.name for file in files)


def describe_file(file: BitextFile, languages: Sequence[str]) -> dict[str, Any]:
    """The facts of a file for a model card and a run's report: path, name, languages, digest and revision."""
    name = ",".join(path.name for path in file.paths) or file.name
    facts: dict[str, Any] = {"path": file.name, "file": name, "language": ", ".join(languages)}
    facts |= {"languages": sorted({*languages, file.into}), "sha256": file.sha256}
    return facts | ({"revision": file.revision} if file.revision else {})


def source_language(known: Mapping[str, str], file: BitextFile) -> str:
    """The language of the source of a pair, of which some columns are known."""
    if "source_lang" in known:
        return known["source_lang"]
    raise CorpusError(
        f"Cannot infer the language of {file.name}. Name it like 'sw-{file.into}.tsv', add a column 'source_lang', "
        "or pass the language: languages=['sw'] (--languages sw)."
    )


def language_pair(source_lang: str | None, target_lang: str | None) -> str:
    """Return the name of a pair of languages; ``und`` denotes an unknown language.

    >>> language_pair("sw", "en"), language_pair(None, "en")
    ('sw-en', 'und-en')
    """
    return f"{source_lang or 'und'}-{target_lang or 'und'}"


def is_language(name: str) -> bool:
    """Whether a name has the form of a language code, such as ``sw``, ``zh_cn`` or ``zh-hans``."""
    return _LANGUAGE.fullmatch(name) is not None and name not in NO_CODES


def _files(item: str | Path | Dataset, into: str, split: str) -> list[BitextFile]:
    """The files that one name denotes."""
    if isinstance(item, Dataset):
        rows = item if item.format["type"] == "custom" else item.with_format(None)  # a transform may change the texts
        return [BitextFile(f"dataset {item._fingerprint}", "dataset", into=into, rows=rows)]  # noqa: SLF001 - its digest
    if not isinstance(item, str | Path):
        raise UsageError(
            "A corpus is a file, a folder, hf:org/name or a datasets.Dataset, or a list of them, not a "
            f"{type(item).__name__}. Pass one split of a DatasetDict, and the files of a stream."
        )
    item = str(item)
    if is_hub_name(item):
        parsed = parse_hub_name(item)
        pair = _named_pair(parsed.config or Path(parsed.name).name, into)
        return [BitextFile(item, "hub", (), *pair, into, parsed.split or split, parsed.revision)]
    path = Path(item)
    if not item:  # which would be the current folder
        raise MissingFileError("The name of a corpus is empty. Pass a file, a folder or hf:org/name.")
    if path.is_dir():
        return _folder(path, into, split)
    if path.exists():
        check_regular(path)
        return [BitextFile(item, _format(path), (path,), *_named_pair(_stem(path), into), into)]
    if braces := _BRACES.fullmatch(item):
        before, first, second, after = braces.groups()
        return [_moses(item, Path(before + first + after), Path(before + second + after), into)]
    if "," in item:
        first, _, second = item.partition(",")
        return [_moses(item, Path(first), Path(second), into)]
    sides = _sides_of(path, into)
    if sides is None:
        raise MissingFileError(f"No such file, folder or Moses pair: {item}.")
    return [_moses(",".join(map(str, sides)), *sides, into)]


def _warn_of_another_pair(file: BitextFile, into: str) -> None:
    """Warn of a file whose name states two other languages, such as ``sw-fr.tsv`` for the target language ``en``."""
    for path in file.paths:
        for one, other in _PAIR.findall(_stem(path)):
            codes = {bare_language(one), bare_language(other)}
            if into not in codes and all(len(code) == 2 and standard_code(code) for code in codes):
                logger.warning(
                    "The targets of %s are read as %s, although its name states %s-%s. Rename the file if they are.",
                    *(file.name, into, one, other),
                )


def _folder(folder: Path, into: str, split: str) -> list[BitextFile]:
    """Files ``xx-en[.split].ext`` of a folder: the files of the split, or files without a split for the other languages.

    Without such a file, the Parquet files whose columns state the languages, as `metaphrase mine` and `filter` write them.
    """
    split_of = re.compile(rf"(?:^|\.)({'|'.join(map(re.escape, (*SPLITS, split)))})(?=\.|-\d+-of-\d+|$)")
    found: dict[tuple[str, str | None] | None, list[tuple[str | None, BitextFile]]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        if (file := _member(path, into)) is None:
            continue
        match = split_of.search(_stem(path))
        key = (file.language, script_of(_spelled(file) or file.language)) if file.language else None
        found[key].append((match[1] if match else None, file))
    if len(found) > 1 and (shards := found.pop(None, None)):
        names = file_names(file for _, file in shards)
        logger.warning(
            "Skipped: %s. Other files of %s are named after their languages. Pass the paths of all.", names, folder
        )
    files: list[BitextFile] = []
    for candidates in found.values():
        chosen = [file for part, file in candidates if part == split]
        if not chosen and split in _DEV:
            chosen = [file for part, file in candidates if part in _DEV]
        unsplit = [file for part, file in candidates if part is None]
        if chosen and unsplit and split == "train":
            logger.warning("%s has files of the split train, so these are not read: %s.", folder, file_names(unsplit))
        files += chosen or unsplit
    if not files:
        has = "It has no parallel files, and no Parquet files with pairs and the columns source_lang and target_lang."
        if any((folder / name).is_file() for name in _SAVED):
            has = "It is a saved data set: in Python, pass datasets.load_from_disk(folder), or one split of a DatasetDict."
        if splits := {part for candidates in found.values() for part, _ in candidates if part}:
            has = f"Its splits are: {', '.join(sorted(splits))}."
        raise MissingFileError(f"{folder} has no file named xx-{into}[.{split}].tsv.gz or similar. {has}")
    return files


def _member(path: Path, into: str) -> BitextFile | None:
    """What a path in a folder is part of: a file named after its languages, a Moses pair, or a Parquet file."""
    if path.name.startswith(".") or path.is_dir():
        return None
    source_lang, target_lang = _named_pair(_stem(path), into)
    if source_lang is None:
        is_shard = path.suffix == ".parquet" and path.is_file() and _is_shard(path)
        return BitextFile(str(path), "parquet", (path,), into=into) if is_shard else None
    if "." + _suffix(path).lower() in FORMATS:
        return BitextFile(str(path), _format(path), (path,), source_lang, target_lang, into)
    sides = _sides_of(path.with_name(_stem(path)), into) if _suffix(path) == into else None
    return _moses(",".join(map(str, sides)), *sides, into) if sides else None


def _is_shard(path: Path) -> bool:
    """Whether a Parquet file has pairs, and columns that state their languages. A damaged file is left to its reader."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return True
    return metadata.num_rows > 0 and {"source_lang", "target_lang"} <= {*metadata.schema.names}


def _moses(name: str, first: Path, second: Path, into: str) -> BitextFile:
    """A Moses pair with the languages of its suffixes; the corpus's target comes second."""
    suffixes = [_suffix(path) for path in (first, second)]
    languages = [bare_language(suffix) if is_language(suffix.lower()) else None for suffix in suffixes]
    if languages[0] == into:
        first, second, languages = second, first, languages[::-1]
    source_lang, target_lang = languages if languages[1] == into else (None, None)
    return BitextFile(name, "moses", (first, second), source_lang, target_lang, into)


def _sides_of(prefix: Path, into: str) -> tuple[Path, Path] | None:
    """The two files ``prefix.xx[.gz]`` and ``prefix.en[.gz]``, or None; a pair in the prefix decides between several."""
    if not prefix.parent.is_dir():
        return None
    sides: dict[str, Path] = {}
    for path in sorted(prefix.parent.iterdir()):
        code = _suffix(path)
        if _stem(path) == prefix.name and is_language(code.lower()) and _named_pair(code, into)[0] is None:
            sides.setdefault(bare_language(code), path)
    named = set(filter(None, _named_pair(prefix.name, into)))
    others = [code for code in sides if code != into and (code in named or not named) and code not in FORMATS.values()]
    return (sides[others[0]], sides[into]) if into in sides and len(others) == 1 else None


def _format(path: Path) -> str:
    suffix = "." + _suffix(path).lower()
    if suffix not in FORMATS:
        raise CorpusError(
            f"The format of {path} is unknown. Supported formats: {', '.join(FORMATS)} (also .gz), and the Moses pair "
            "'x.sw,x.en'."
        )
    return FORMATS[suffix]


def _suffix(path: Path) -> str:
    return path.name.removesuffix(".gz").rpartition(".")[2]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rpartition(".")[0]


def _named_pair(name: str, into: str) -> tuple[str | None, str | None]:
    """The languages in a name such as ``europarl.sw-en.train``, in its order, if one is the target."""
    for match in _PAIR.finditer(name):
        first, second = match.groups()
        last = first.rpartition("_")[2]
        if standard_code(first) is None and standard_code(last) is not None:  # web_sw-en: a word before the pair
            first = last
        first, second = bare_language(first), bare_language(second)
        if into in (first, second) and first != second:
            return first, second
    return None, None
