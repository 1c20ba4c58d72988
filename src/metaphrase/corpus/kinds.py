"""The kind of a file, identified by its first bytes, regardless of its name."""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from metaphrase.exceptions import CorpusError, MissingFileError

PARQUET = "a Parquet file"
#: Kinds of text that an XML file may be.
UTF_16, RETURNS = XML = "text in UTF-16", "text whose lines end in carriage returns"

_UTF_8 = "Convert it to UTF-8."
_EXPORT = "Export its text as TSV in UTF-8."
_EXTRACT = "Extract the files in it."
_DECOMPRESS = "Decompress it, or compress it with gzip instead."
#: The first bytes of files that are not text in UTF-8, what these files are, and what to do.
_SIGNATURES = {
    rb"PAR1": (PARQUET, "Rename it to .parquet."),
    rb"\x1f\x8b": ("compressed one time too many", "Decompress it once."),
    rb"\xfd7zXZ\0": ("compressed with xz", _DECOMPRESS),
    rb"BZh[1-9](1AY&SY|\x17rE8P)": ("compressed with bzip2", _DECOMPRESS),
    rb"\x28\xb5\x2f\xfd": ("compressed with Zstandard", _DECOMPRESS),
    rb"PK\x03\x04.*?(\[Content_Types\]|word/|xl/)": ("an Office document, such as .docx or .xlsx", _EXPORT),
    rb"PK\x03\x04.{26}mimetype": ("an OpenDocument file, such as .odt or .ods", _EXPORT),
    rb"PK(\x03\x04|\x05\x06)": ("a ZIP archive", _EXTRACT),
    rb"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", _EXTRACT),
    rb"Rar!\x1a\x07": ("a RAR archive", _EXTRACT),
    rb".{257}ustar(\0|  \0)": ("a tar archive", _EXTRACT),
    rb"%PDF-": ("a PDF document", _EXPORT),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an Office document, such as .doc or .xls", _EXPORT),
    rb"SQLite format 3\0": ("an SQLite database", _EXPORT),
    rb"ARROW1\0\0": ("an Arrow file", "Write its table as .parquet."),
    rb"\s*<(?i:!doctype\s+html|html[\s>])": ("a web page, perhaps of a failed download", "Download the file again."),
    rb"version https://git-lfs\.github\.com/": ("a Git LFS pointer without its content", "Run git lfs pull."),
    rb"\0+$": ("filled with NUL bytes", "It is damaged: copy or download it again."),
    rb"\xff\xfe\0\0|\0\0\xfe\xff|([^\0].\0\0){4}|(\0\0.[^\0]){4}": ("text in UTF-32", _UTF_8),
    rb"\xff\xfe|\xfe\xff|([^\0]\0){4}|(\0[^\0]){4}": (UTF_16, _UTF_8),
    rb"[^\n]*\r[^\n]+\Z": (RETURNS, "Convert its line ends to line feeds."),
}


def check_regular(path: Path) -> None:
    """Check that a path is a file, which can be read more than once."""
    if not path.exists():
        what = f"is a link to {path.readlink()}, which does not exist" if path.is_symlink() else "does not exist"
        raise MissingFileError(f"The file {path} {what}.")
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise CorpusError(f"{path} is a folder, but should be a file.")
    if not stat.S_ISREG(mode):
        raise CorpusError(
            f"{path} is a pipe or a device, which cannot be read twice. Write its content to a file first."
        )


def check_distinct(texts: Iterable[tuple[Path, ...]]) -> None:
    """Refuse a text that would be read twice: under two names, or with and without compression.

    A text is one file, or the two files of a Moses pair; none for a data set on the Hub.
    """
    known: dict[tuple[Path, ...], tuple[Path, ...]] = {}
    for paths in texts:
        places = tuple(path.resolve() for path in paths)
        key = tuple(place.with_name(place.name.removesuffix(".gz")) for place in places)
        if key and (other := known.setdefault(key, paths)) is not paths:
            one, again = (",".join(map(str, names)) for names in (other, paths))
            raise CorpusError(f"{one} and {again} contain the same text and would be read twice. Pass one of them.")


def check_content(path: Path, head: bytes, *, accepted: Collection[str] = ()) -> None:
    """Check that a file is text in UTF-8, as far as its first bytes show.

    ``head`` are the first bytes, decompressed; ``accepted`` is what the file may be instead: `PARQUET` or one of `XML`.
    """
    for magic, (what, remedy) in _SIGNATURES.items():
        if re.match(magic, head, re.DOTALL):
            if what in accepted:
                return
            raise CorpusError(f"{path} is {what}. {remedy}")
