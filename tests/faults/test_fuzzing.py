"""Files that nobody would write: read, refused in our own words, or counted line by line; never anything else."""

from __future__ import annotations

import gzip
import json
import logging
import math
from collections import Counter
from encodings.aliases import aliases
from importlib import resources
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.corpus import load_corpus
from metaphrase.corpus.readers import read_pairs
from metaphrase.corpus.report import CorpusReport
from metaphrase.corpus.rows import OPTIONAL
from metaphrase.corpus.text import is_blank
from metaphrase.corpus.words import format_links, parse_links
from metaphrase.corpus.writing import WRITTEN, write_corpus
from metaphrase.exceptions import AlignmentFormatError, ConfigError, CorpusError, MetaphraseError
from metaphrase.io.configuration import read_yaml
from metaphrase.training.recipe import Recipe, list_recipes
from tests.faults.children import Child

PAIRS = [
    ("Habari ya asubuhi", "Good morning"),
    ("Asante sana, rafiki – 😀", "Thank you very much, friend"),
    ("Paka anakunywa maziwa", "The cat drinks milk"),
]
LINE_FORMATS = ("tsv", "headerless.tsv", "jsonl", "moses")
FORMATS = (*LINE_FORMATS, "csv", "tmx", "parquet", "tsv.gz", "jsonl.gz")


@pytest.fixture(autouse=True)
def _no_warnings_of_every_file(caplog):
    caplog.set_level(logging.ERROR, logger="metaphrase")


@pytest.fixture(params=[10, pytest.param(500, marks=pytest.mark.slow)], ids=["short", "long"])
def survives(request, fault):
    """Check what hypothesis draws, and record how much that was."""

    def survives(number, what, check, *strategies):
        tried = 0

        @settings(max_examples=request.param)
        @given(st.tuples(*strategies))
        def explore(drawn):
            nonlocal tried
            tried += 1
            check(*drawn)

        explore()
        fault(number, what, tried=tried, survived=tried)

    return survives


def written(folder: Path, kind: str, pairs=PAIRS) -> Path:
    """A file of pairs; of a Moses pair, the source."""
    path = folder / f"sw-en.{kind}"
    if kind == "moses":
        path = folder / "sw-en.sw"
        path.with_suffix(".en").write_text("".join(f"{target}\n" for _, target in pairs), encoding="utf-8")
        path.write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
    elif kind == "headerless.tsv":
        path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    elif kind == "csv":
        Dataset.from_list([{"source": source, "target": target} for source, target in pairs]).to_csv(path)
    elif kind == "tmx":
        units = "\n".join(
            f'<tu><tuv xml:lang="sw"><seg>{source}</seg></tuv><tuv xml:lang="en"><seg>{target}</seg></tuv></tu>'
            for source, target in pairs
        )
        path.write_text(f'<?xml version="1.0"?>\n<tmx version="1.4"><body>\n{units}\n</body></tmx>\n')
    else:
        rows = [{"source": s, "target": t, "source_lang": "sw", "target_lang": "en"} for s, t in pairs]
        write_corpus(Dataset.from_list(rows), path)
    return path


def read(path: Path, **options) -> tuple[list[tuple[str, str]] | None, CorpusReport]:
    """The pairs of a file, or None where it is refused in our own words; the report adds up either way."""
    corpus = f"{path},{path.with_suffix('.en')}" if path.suffix == ".sw" else path
    report = CorpusReport()
    pairs: list[tuple[str, str]] | None = []
    try:
        for _, source, target, _ in read_pairs(corpus, report=report, **options):
            pairs.append((source, target))
    except MetaphraseError as error:
        named(error, path)
        given, pairs = len(pairs), None
    else:
        given = len(pairs)
    assert report.read == given + report.dropped.total()
    return pairs, report


def named(error: MetaphraseError, path: Path) -> None:
    """A refusal names the file, and is no longer than people read."""
    assert path.name in str(error)
    assert len(str(error)) < 3000


def lines(data: bytes) -> list[bytes]:
    return data.removesuffix(b"\n").split(b"\n") if data else []


# ------------------------------------------------------------------------------------------------------- damaged files

PIECES = [b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\n", b"\r\n", b"\t", b"\xed\xa0\x80", "\u2028\x85".encode(), b'"',
          b"\\ud800", b"\x1f\x8b", b"x" * 70_000, b"]]>", b"&#0;", b"<", b"{", b"9" * 5000]  # fmt: skip
CHANGES = st.lists(
    st.tuples(st.sampled_from(["flip", "insert", "cut", "remove", "repeat"]), st.integers(0), st.integers(0), st.binary(max_size=8) | st.sampled_from(PIECES)),
    min_size=1,
    max_size=4,
)  # fmt: skip


def changed(data: bytes, changes) -> bytes:
    """Bits flipped, bytes put in, taken out and doubled, the end cut off."""
    for kind, first, second, piece in changes:
        at, length = first % (len(data) + 1), second % 40
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << second % 8]) + data[at + 1 :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "cut":
            data = data[:at]
        elif kind == "remove":
            data = data[:at] + data[at + length :]
        elif kind == "repeat":
            data = data[: at + length] + data[at:]
    return data


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_is_read_or_refused(tmp_path, survives, kind):
    path = written(tmp_path, kind)
    good = path.read_bytes()

    def check(changes):
        data = changed(good, changes)
        path.write_bytes(data)
        pairs, report = read(path, max_bad_rate=1.0)
        if pairs is None or kind not in LINE_FORMATS or data[:2] == b"\x1f\x8b":
            return
        header = kind == "tsv" and data.startswith(lines(good)[0] + b"\n")
        if kind == "tsv" and not header:  # what was the header may count as a pair
            assert len(lines(data)) - report.read in (0, 1)
            return
        assert report.read == len(lines(data)) - header
        whole = Counter(line.removesuffix(b"\r") for line in lines(data)[header:])
        for line, pair in zip(lines(good)[header:], PAIRS, strict=True):
            assert kind == "moses" or pairs.count(pair) >= whole[line]

    survives("C9", f"a {kind} file with flipped bits, inserted and removed bytes, truncated ends", check, CHANGES)


@pytest.mark.long
@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)], ids=["short", "long"])
def test_a_damaged_parquet_footer_does_not_end_the_process(tmp_path, fault, step):
    """Bits flipped, bytes taken out: some of Arrow's bindings let what they stumble over end the process."""
    path = written(tmp_path, "parquet")
    good = path.read_bytes()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    places = range(8 * footer, 8 * (len(good) - 8), step)

    def work():
        for place in places:
            at, bit = divmod(place, 8)
            for left_out in (0, 1):
                path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 + left_out :])
                read(path, max_bad_rate=1.0)

    child = Child(work, tmp_path / "log")
    assert child.wait(1200) == 0, child.said()
    fault("C9", "a parquet file with a damaged footer", tried=2 * len(places), survived=2 * len(places))


@pytest.mark.parametrize("kind", FORMATS)
def test_any_bytes_are_read_or_refused(tmp_path, survives, kind):
    path = written(tmp_path, kind)
    packed = kind.endswith(".gz")
    starts = [
        b"",
        b"source\ttarget\n",
        b'{"source": "a", "target": "b"}\n',
        b"\xef\xbb\xbf",
        b'<?xml version="1.0"?><tmx>',
        b"PAR1",
    ]

    def check(start, scraps, end):
        data = start + b"".join(scraps) + end
        path.write_bytes(gzip.compress(data) if packed else data)
        pairs, report = read(path, max_bad_rate=1.0)
        if pairs is not None and kind in ("jsonl", "jsonl.gz") and data[:2] != b"\x1f\x8b":
            assert report.read == len(lines(data))

    scraps = st.lists(
        st.binary(max_size=20) | st.sampled_from([*PIECES, b"paka\tcat\n", b"<seg>", b"</seg>"]), max_size=12
    )
    survives(
        "C1",
        f"arbitrary bytes as a {kind} file",
        check,
        st.sampled_from(starts),
        scraps,
        st.sampled_from([b"", b"PAR1", b"\n"]),
    )


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_off_anywhere_gives_its_whole_lines_or_is_refused(tmp_path, fault, kind, step):
    path = written(tmp_path, kind)
    good = path.read_bytes()
    assert read(path)[0] == PAIRS
    sizes = range(0, len(good), step)
    survived = given = 0
    for size in sizes:
        path.write_bytes(good[:size])
        pairs, report = read(path, max_bad_rate=1.0)
        given += bool(pairs)
        whole = good[:size].count(b"\n") - (kind == "tsv")
        if kind in LINE_FORMATS[:3] and len(pairs or []) < whole:  # lines that were there are lost
            continue
        if not pairs or (kind in ("tsv", "csv") and b"\n" not in good[:size]):  # half a header may count as a pair
            survived += 1
        elif kind in (*LINE_FORMATS, "csv"):
            end = report.read - len(pairs)  # the last line, cut in a way that shows
            survived += (
                pairs[:-1] == PAIRS[: len(pairs) - 1]
                and end <= 1
                and PAIRS[len(pairs) - 1][0].startswith(pairs[-1][0])
            )
        else:  # what follows the last pair tells nothing of pairs
            survived += pairs == PAIRS
    assert given or kind not in LINE_FORMATS
    fault("C9", f"a {kind} file truncated", tried=len(sizes), survived=survived)


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["tsv.gz", "jsonl.gz"])
def test_no_flipped_bit_of_a_packed_file_changes_a_pair(tmp_path, fault, kind, step):
    path = written(tmp_path, kind)
    good = path.read_bytes()
    assert read(path)[0] == PAIRS
    survived = 0
    bits = range(0, 8 * len(good), step)
    for bit in bits:
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        survived += read(path)[0] in (None, PAIRS)
    fault("C10", f"a {kind} file with a flipped bit", tried=len(bits), survived=survived)


@pytest.mark.parametrize("kind", LINE_FORMATS)
def test_lines_around_the_limit_are_counted_once(tmp_path, fault, kind):
    limit = 8 * 10 + (1 << 16)  # of bytes, for sentences of 10 characters
    path = written(tmp_path, kind, [("a", "b")])
    *header, good = lines(path.read_bytes())
    lengths = [*range(limit - 2, limit + 3), 2 * limit - 1, 2 * limit, 2 * limit + 1]
    for length in lengths:
        for tail in (b"", b"\n", b"\n" + good, b"\n" + good + b"\n"):
            path.write_bytes(b"\n".join([*header, good, b"x" * length]) + tail)
            n = 2 + tail.count(good if tail.strip() else b"-")
            if kind == "moses":
                path.with_suffix(".en").write_bytes(b"b\n" * n)
            pairs, report = read(path, max_chars=10)
            assert (pairs, report.read, report.dropped.total()) == ([("a", "b")] * (n - 1), n, 1), (length, tail)
    fault("C5", f"{kind} lines near the length limit", tried=4 * len(lengths), survived=4 * len(lengths))


# ---------------------------------------------------------------------------------------------------------- whole files

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30).filter(
    lambda text: not is_blank(text)
)


@pytest.mark.parametrize("suffix", WRITTEN)
def test_what_is_written_is_read_again(tmp_path, survives, suffix):
    path = tmp_path / f"pairs{suffix}"
    pair = st.fixed_dictionaries(
        {"source": TEXT, "target": TEXT, "source_lang": st.sampled_from(["sw", "te"]), "source_bt": TEXT | st.just("")}
    )

    def check(pairs):
        rows = [{**row, "target_lang": "en", "alignment": "0-0"} for row in pairs]
        write_corpus(Dataset.from_list(rows), path)
        corpus = load_corpus(path, cleaning=None)
        clean = str.maketrans("\t\n\r", "   ") if "tsv" in suffix else {}
        for name in rows[0]:
            there = corpus.dataset[name] if name in corpus.dataset.column_names else [""] * len(rows)
            assert list(there) == [row[name].translate(clean) for row in rows]
        assert corpus.report.read == corpus.report.kept == len(rows)

    survives(
        "C3", f"arbitrary text, written as {suffix} and read again", check, st.lists(pair, min_size=1, max_size=8)
    )


def test_any_value_in_any_column(tmp_path, survives):
    """Rows of JSON whose columns hold what they should, or anything that JSON can say."""
    path = tmp_path / "sw-en.jsonl"
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from([0.5, math.nan]) | st.text(max_size=5),
        lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=3), values, max_size=2),
        max_leaves=3,
    ) | st.sampled_from(["\ud800", "a\0b", "", " ", "icu", "whitespace", "0-0", "99-0", "1 2", "nan", "en", "zh", "-"])
    names = ["source", "target", "source_lang", "target_lang", "translation", *OPTIONAL]
    row = st.dictionaries(st.sampled_from(names), anything, max_size=6)
    good = {"source": "paka", "target": "cat", "source_lang": "sw"}

    def check(rows, overlaid):
        rows = [{**good, **row} if over else row for row, over in zip(rows, overlaid, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in [good, *rows]))
        corpus = load_corpus(path, cleaning=None, max_bad_rate=1.0)
        assert corpus.report.read == 1 + len(rows) == corpus.report.kept + corpus.report.dropped.total()
        assert len(corpus.dataset) == corpus.report.kept
        write_corpus(corpus.dataset, path.with_suffix(".tsv"))

    survives(
        "C9",
        "arbitrary values in JSON columns",
        check,
        st.lists(row, min_size=5, max_size=5),
        st.lists(st.booleans(), min_size=5, max_size=5),
    )


def test_text_that_could_not_be_written_down_is_no_text(tmp_path):
    """A NUL ends a line for other tools, and half of a surrogate pair is in no encoding."""
    good = {"source": "paka", "target": "cat", "source_lang": "sw"}
    bad = [
        {"source": "pa\0ka"},
        {"target": "\ud800"},
        {"source_lang": "\ud800"},
        {"source_lang": "-"},
        {"target_lang": "e\0n"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(good | row) + "\n" for row in [{}, *bad]))
    corpus = load_corpus(path)
    assert corpus.report.dropped == {"not text": 2, "no language": 3}
    assert len(corpus.dataset) == 1


def test_parquet_columns_that_no_corpus_has_are_left_alone(tmp_path):
    path = tmp_path / "sw-en.parquet"
    table = {"source": ["paka"], "target": ["cat"], "crawled": pa.array([1], pa.timestamp("ns"))}
    pq.write_table(pa.table(table), path)
    assert read(path)[0] == [("paka", "cat")]
    pq.write_table(pa.table({"source": pa.array([b"\xff"]).view(pa.string()), "target": ["cat"]}), path)
    with pytest.raises(CorpusError, match="cannot be read as Parquet"):
        load_corpus(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
def test_tmx_in_every_encoding_that_there_is(tmp_path, fault):
    encodings = sorted({*aliases.values(), "no such", "undefined", "idna", "unicode_escape", "raw_unicode_escape"})
    path = written(tmp_path, "tmx", [("paka", "cat")])
    text = path.read_text()
    survived, understood = 0, set()
    for encoding in encodings:
        path.write_bytes(text.replace("?>", f' encoding="{encoding}"?>', 1).encode())
        pairs, _ = read(path)
        survived += pairs in (None, [("paka", "cat")])
        understood |= {encoding} if pairs else set()
    assert understood >= {"ascii", "latin_1", "utf_8"}
    assert "no such" not in understood
    fault("C1", "TMX with a declared encoding", tried=len(encodings), survived=survived)


def test_variants_within_a_tmx_unit_are_counted(tmp_path):
    path = written(tmp_path, "tmx", [("paka", "cat")])
    more = '<tuv xml:lang="EN-GB"><seg>puss</seg></tuv><tuv xml:lang="fr"><seg>chat</seg></tuv></tu>'
    path.write_text(path.read_text().replace("</tu>", more))
    pairs, report = read(path)
    assert pairs == [("paka", "cat")]
    assert report.dropped == {"another variant": 1}


# ------------------------------------------------------------------------------------------------------ links and YAML


def test_pharaoh_is_parsed_or_refused(survives):
    def check(text):
        try:
            links = parse_links(text)
        except AlignmentFormatError:
            assert not all(part.count("-") == 1 and part.replace("-", "").isdecimal() and part.isascii() and len(part) < 10 and part[0] != "-" != part[-1] for part in text.split())  # fmt: skip
        else:
            assert parse_links(format_links(links)) == links
            assert len(links) == len(text.split())

    link = st.from_regex(r"[0-9]{1,12}-[0-9]{1,12}", fullmatch=True) | st.sampled_from(
        ["9" * 5000 + "-0", "٣-١", "-", "0--0", "²-0"]
    )
    survives(
        "D1",
        "arbitrary text as Pharaoh links",
        check,
        st.text("0123456789- \t\n٣–x") | st.lists(link, max_size=5).map(" ".join),
    )


VALUES = ["0x" + "f" * 5000, "1" + ":0" * 200 + ".0", "9" * 5000, "1e400", "-.inf", ".nan", '"\\ud800"', "!!int ''", "!!set {a}", "!!binary é",
          "!!python/object:os.system x", "9999-99-99", "&a [*a]", "*b", "<<", "~", "[", "{a: {a: 1}}", "? [x]", "=", "%YAML 9.9", "---", "\t", "\0"]  # fmt: skip


def test_yaml_is_a_recipe_or_refused(tmp_path, survives):
    packaged = [path.read_bytes() for path in Path(str(resources.files("metaphrase") / "recipes")).glob("*.yaml")]
    assert len(packaged) == len(list_recipes())
    path = tmp_path / "mine.yaml"

    def check(text, changes, place, value):
        data = changed(text, changes)
        words = data.split(b" ")
        if value is not None:
            words[place % len(words)] = value.encode()
        path.write_bytes(b" ".join(words))
        try:
            content = read_yaml(path)
        except ConfigError as error:
            return named(error, path)
        try:
            recipe = Recipe.load(path)
        except MetaphraseError as error:
            return named(error, path)
        assert content["terms"]
        assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe
        json.dumps(recipe.to_dict(), default=str).encode()

    few = CHANGES.filter(lambda changes: all(len(piece) < 6000 for *_, piece in changes)) | st.just([])
    survives(
        "H7",
        "recipes with changed bytes and unexpected values",
        check,
        st.sampled_from(packaged),
        few,
        st.integers(0),
        st.none() | st.sampled_from(VALUES),
    )


@pytest.mark.parametrize("value", VALUES[:9])
def test_numbers_and_characters_that_yaml_can_say_and_others_cannot(tmp_path, value):
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nterms:\n- objective: tr\n  weight: {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        Recipe.load(path)
