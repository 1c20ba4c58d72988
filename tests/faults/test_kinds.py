"""Files that are not text: identified by their content, with what to do about them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sqlite3
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.corpus.monolingual import load_monolingual
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.exceptions import CorpusError, MetaphraseError
from metaphrase.mining.sentences import read_sentences

TEXT = "source\ttarget\npaka mweusi\tblack cat\n"
#: A frame of Zstandard that holds these bytes uncompressed.
ZSTANDARD = b"\x28\xb5\x2f\xfd\x20\x01\x09\x00\x00x"


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as members:
        for name in names:
            members.writestr(name, TEXT * 9)
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as members:
        member = tarfile.TarInfo("pairs.tsv")
        member.size = len(TEXT)
        members.addfile(member, io.BytesIO(TEXT.encode()))
    return buffer.getvalue()


def database(tmp_path) -> bytes:
    connection = sqlite3.connect(tmp_path / "pairs.db")
    connection.execute("create table pairs (source text, target text)")
    connection.close()
    return (tmp_path / "pairs.db").read_bytes()


def table(tmp_path, write) -> bytes:
    write(pa.table({"source": ["paka"], "target": ["cat"]}), str(tmp_path / "table"))
    return (tmp_path / "table").read_bytes()


@pytest.fixture
def kinds(tmp_path) -> dict[str, tuple[bytes, str]]:
    """The content of a file, and what an error says of it."""
    docx = archive("[Content_Types].xml", "_rels/.rels", "word/document.xml")
    page = b"\n<!DOCTYPE html>\n<html><title>404 Not Found</title></html>\n"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    return {
        "zip": (archive("pairs.tsv"), "a ZIP archive. Extract the files"),
        "an empty zip": (archive(), "a ZIP archive"),
        "docx": (docx, "an Office document, such as .docx or .xlsx. Export its text as TSV in UTF-8"),
        "xlsx": (archive("docProps/app.xml", "xl/workbook.xml"), "an Office document"),
        "odt": (archive("mimetype", "content.xml"), "an OpenDocument file"),
        "doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "an Office document, such as .doc or .xls"),
        "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF document"),
        "xz": (lzma.compress(TEXT.encode()), "compressed with xz. Decompress it"),
        "bzip2": (bz2.compress(TEXT.encode()), "compressed with bzip2"),
        "zstandard": (ZSTANDARD, "compressed with Zstandard"),
        "7z": (b"7z\xbc\xaf\x27\x1c\x00\x04", "a 7-Zip archive"),
        "rar": (b"Rar!\x1a\x07\x01\x00", "a RAR archive"),
        "tar": (tar(), "a tar archive"),
        "tar.gz": (gzip.compress(tar()), "a tar archive"),
        "gzip twice": (gzip.compress(gzip.compress(TEXT.encode())), "compressed one time too many"),
        "parquet": (table(tmp_path, pq.write_table), "a Parquet file. Rename it to .parquet"),
        "arrow": (table(tmp_path, feather.write_feather), "an Arrow file"),
        "sqlite": (database(tmp_path), "an SQLite database"),
        "web page": (page, "a web page, perhaps of a failed download"),
        "packed web page": (gzip.compress(page), "a web page"),
        "pointer": (pointer, "a Git LFS pointer without its content. Run git lfs pull"),
        "carriage returns": (TEXT.replace("\n", "\r").encode(), "text whose lines end in carriage returns. Convert"),
        "zeros": (bytes(5000), "filled with NUL bytes. It is damaged"),
        **{
            encoding: (TEXT.encode(encoding), f"text in {encoding[:6].upper()}. Convert it to UTF-8")
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
        },
    }


def refusal(call) -> str:
    with pytest.raises(MetaphraseError) as refused:
        call()
    return str(refused.value)


@pytest.mark.parametrize("name", ["sw-en.tsv", "sw-en.tsv.gz", "sw-en.jsonl", "x.sw", "text.txt", "text.sw"])
def test_a_file_says_what_it_is(tmp_path, kinds, fault, name):
    path, other = tmp_path / name, tmp_path / "x.en"
    other.write_text("the cat\n")
    for content, message in kinds.values():
        path.write_bytes(content)
        if name == "text.txt":
            said = refusal(lambda: load_monolingual(path))
        elif name == "text.sw":
            said = refusal(lambda: list(read_sentences(path)))
        else:
            said = refusal(lambda: load_corpus(f"{path},{other}" if name == "x.sw" else path))
        assert f"{path} is {message}" in said
    fault("C1", f"archives, documents and other encodings named {name}", tried=len(kinds), survived=len(kinds))


def test_the_command_says_it_too(tmp_path, kinds, capsys, fault):
    path, survived = tmp_path / "sw-en.tsv", 0
    for content, message in kinds.values():
        path.write_bytes(content)
        assert main(["diagnose", "--corpus", str(path)]) == 2
        survived += f"sw-en.tsv is {message}" in capsys.readouterr().err.replace("\n", " ")
    fault("C1", "archives, documents and other encodings, in a command", tried=len(kinds), survived=survived)


def test_other_files_named_parquet_and_tmx(tmp_path, kinds):
    for suffix, as_text in (("parquet", False), ("tmx", True)):
        path = tmp_path / f"sw-en.{suffix}"
        for kind in ("zip", "xlsx", "xz", "web page", "pointer", "zeros"):
            path.write_bytes(kinds[kind][0])
            assert f"{path} is {kinds[kind][1]}" in refusal(lambda path=path: load_corpus(path))
        path.write_bytes(kinds["parquet"][0])
        assert ("Rename it" in refusal(lambda path=path: load_corpus(path))) if as_text else load_corpus(path)


def test_tmx_may_have_the_line_ends_of_xml(tmp_path):
    unit = '<tu><tuv xml:lang="sw"><seg>paka</seg></tuv>\r<tuv xml:lang="en"><seg>cat</seg></tuv></tu>'
    (tmp_path / "sw-en.tmx").write_bytes(f"<tmx><body>\r{unit}\r</body></tmx>".encode())
    assert load_corpus(tmp_path / "sw-en.tmx").dataset["source"] == ["paka"]


def test_tmx_may_be_utf_16(tmp_path):
    unit = '<tu><tuv xml:lang="sw"><seg>paka</seg></tuv><tuv xml:lang="en"><seg>cat</seg></tuv></tu>'
    tmx = f'<?xml version="1.0" encoding="utf-16"?><tmx><body>{unit}</body></tmx>'
    (tmp_path / "sw-en.tmx").write_bytes(tmx.encode("utf-16"))
    assert load_corpus(tmp_path / "sw-en.tmx").dataset["source"] == ["paka"]
    (tmp_path / "te-en.tsv").write_text("pilli\tcat\n")
    stream = load_corpus([tmp_path / "sw-en.tmx", tmp_path / "te-en.tsv"], streaming=True)
    assert {row["source"] for row in stream.dataset} == {"paka", "pilli"}


@pytest.mark.parametrize("start", ["PK", "BZh9 kitabu", "Rar", "7z", "ustar", "%PDF", "<htm", "PAR", "version https"])
def test_text_that_starts_like_something_else_is_text(tmp_path, start):
    path = tmp_path / "sw-en.tsv"
    path.write_text(f"{start} paka\tcat\n")
    assert load_corpus(path).dataset["source"] == [f"{start} paka"]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0), b"source\ttarget\n"])
@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
def test_an_empty_file_is_refused(tmp_path, content, streaming, fault):
    """Beside others, too: it is more often a failed download than a corpus."""
    good = tmp_path / "te-en.tsv"
    good.write_text("pilli\tcat\n")
    path = tmp_path / "sw-en.tsv"
    path.write_bytes(content)
    for corpus in (path, [good, path]):
        assert f"{path} has no pairs" in refusal(lambda corpus=corpus: load_corpus(corpus, streaming=streaming))
    fault("C1", "a file that is empty, or has nothing but a byte order mark or a header", tried=2, survived=2)


def test_folders_pipes_and_devices_are_refused(tmp_path, fault, capsys):
    pipe, folder = tmp_path / "sw-en.tsv", tmp_path / "folder.txt"
    os.mkfifo(pipe)
    folder.mkdir()
    for call in (
        lambda: load_corpus(pipe),
        lambda: load_corpus(f"{pipe},{pipe}"),
        lambda: load_monolingual(pipe),
        lambda: list(read_sentences(pipe)),
    ):
        assert f"{pipe} is a pipe or a device, which cannot be read twice" in refusal(call)
    assert main(["diagnose", "--corpus", str(pipe)]) == 2
    assert "is a pipe" in capsys.readouterr().err
    for call in (lambda: load_monolingual(folder), lambda: list(read_sentences(folder))):
        assert f"{folder} is a folder, but should be a file" in refusal(call)
    assert "is a pipe or a device" in refusal(lambda: load_monolingual("/dev/null"))
    fault("C1", "a folder, pipe or device instead of a file", tried=8, survived=8)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    link = tmp_path / "sw-en.tsv"
    link.symlink_to(tmp_path / "nowhere.tsv")
    with pytest.raises(FileNotFoundError, match=r"sw-en\.tsv"):
        load_corpus(link)
    (tmp_path / "fi-en.tsv").write_text("source\ttarget\nkissa\tcat\n")
    for load in (load_corpus, load_parallel_folder):  # in a folder, a broken link is not skipped
        with pytest.raises(FileNotFoundError, match=r"sw-en\.tsv is a link to .*nowhere\.tsv, which does not exist"):
            load(tmp_path)
        load(tmp_path, languages=["fi"])
    link.unlink()
    link.write_bytes(b"\0\0\0\tcat\nsource\ttarget\n")
    with pytest.raises(CorpusError, match=r"sw-en\.tsv:1: not text \(NUL byte\)"):
        load_corpus(link)
