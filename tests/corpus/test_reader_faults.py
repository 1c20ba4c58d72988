import gzip
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.corpus.readers import read_pairs, read_parallel
from metaphrase.corpus.report import CorpusReport
from metaphrase.corpus.text import is_blank
from metaphrase.exceptions import CorpusError
from tests.conftest import mostly_slow
from tests.corpus.samples import DEMO, PAIRS, dropped, make_folder, make_jsonl, many, moses, pairs_of, tmx, tsv, write
from tests.faults.memory import PEAK


def raw_tsv(folder: Path, *lines: bytes, name: str = "sw-en.tsv") -> Path:
    return write(folder / name, b"".join((b"source\ttarget\n", *lines)))


def test_lines_end_at_line_feeds_only(tmp_path, fault):
    odd = "moja\u2028mbili\x85tatu\x0bnne\x0ctano\x1csita\u2029saba\rnane"
    lines = [f"{odd}\tone {odd} two\n".encode(), b"paka\tcat\n"]
    expected = [(odd, f"one {odd} two"), ("paka", "cat")]
    assert pairs_of(load_corpus(raw_tsv(tmp_path, *lines))) == expected
    assert pairs_of(load_corpus(moses(tmp_path, pairs=expected))) == expected
    record = {"source": odd, "target": f"one {odd} two"}
    path = write(tmp_path / "sw-en.jsonl", json.dumps(record, ensure_ascii=False) + "\n")
    assert pairs_of(load_corpus(path)) == expected[:1]
    fault("C3", "other line separators inside a line, in three formats", tried=3, survived=3)


def test_byte_order_marks_and_crlf(tmp_path):
    path = write(tmp_path / "sw-en.tsv", b"\xef\xbb\xbfsource\ttarget\r\npaka\tcat\r\nmbwa\tdog")
    assert pairs_of(load_corpus(path, cleaning=None)) == [("paka", "cat"), ("mbwa", "dog")]


def test_no_text_is_read_twice(tmp_path, monkeypatch, capsys, fault):
    """In a folder with and without compression, under two names, or as Moses files; a shared side is not a shared text."""
    monkeypatch.chdir(tmp_path)
    plain, packed = tsv(tmp_path / "sw-en.tsv"), tsv(tmp_path / "sw-en.tsv.gz")
    Path("other").symlink_to(tmp_path)
    moses(tmp_path, "a", pairs=PAIRS)
    moses(tmp_path, "a", ".gz", pairs=PAIRS)
    doubled = [
        [tmp_path],
        [plain, packed],
        ["sw-en.tsv", plain],
        [plain, Path("other", "sw-en.tsv")],
        ["a.sw,a.en", "a.sw.gz,a.en.gz"],
    ]
    for corpus in doubled:
        for how in ({}, {"streaming": True}, {"on_disk": tmp_path / "disk"}):
            with pytest.raises(CorpusError, match=r"contain the same text and would be read twice\. Pass one of them"):
                load_corpus(corpus, languages=["sw"], **how)
        words = [*map(str, corpus), "--source_lang", "sw", "-o", str(tmp_path / "links.tsv")]
        assert main(["align", *words]) == 2
        assert "contain the same text" in capsys.readouterr().err
    for name, pairs in (("b", PAIRS), ("c", [(f"{one}!", two) for one, two in PAIRS])):
        moses(tmp_path, name, pairs=pairs)
    Path("c.en").unlink()
    assert len(pairs_of(load_corpus(["b.sw,b.en", "c.sw,b.en"], languages=["sw"], cleaning=None))) == 2 * len(PAIRS)
    fault("C12", "a text named twice, or with and without compression", tried=20, survived=20)


FAULTS = {
    "not UTF-8": b"caf\xe9\tcoffee\n",
    "not text": b"nul\0l\tnull\n",
    "wrong number of columns": b"paka\tcat\tmbwa\tdog\n",
    "empty side": b"paka\t \xc2\xa0\n",
    "too long": b"pa" * 6000 + b"\tcat\n",
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("reason", FAULTS)
def test_unreadable_lines_are_counted_with_examples(tmp_path, caplog, reason, streaming):
    good = [f"{s}\t{t}\n".encode() for s, t in many(20)]
    path = raw_tsv(tmp_path, *good[:10], FAULTS[reason], *good[10:], FAULTS[reason])
    corpus = load_corpus(path, streaming=streaming)
    assert pairs_of(corpus) == many(20)
    assert dropped(corpus) == {reason: 2}
    assert (corpus.report.read, corpus.report.kept) == (22, 20)
    (counts,) = corpus.report.counts.values()
    assert [example.partition(" (")[0] for example in counts.examples[reason]] == [f"{path}:12", f"{path}:23"]
    list(corpus.dataset)  # a second pass logs nothing and counts afresh
    assert corpus.report.read == 22
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(f"{path}: 2 of 22 lines were unreadable: {reason} at {path}:12")


def test_no_more_than_five_examples(tmp_path):
    path = raw_tsv(tmp_path, b"paka\tcat\n", *[b"paka\n"] * 8)
    (counts,) = load_corpus(path).report.counts.values()
    assert counts.dropped["wrong number of columns"] == 8
    assert len(counts.examples["wrong number of columns"]) == 5


def test_every_bad_alignment_is_counted(tmp_path, fault):
    bad = ["9-9", "0", "0-0,1-1", "-1-0", "0-2"]
    rows = [("paka mweusi", "cat", links) for links in bad] + [
        ("paka", "cat", ""),
        ("paka wawili", "two cats", "0-1 1-0"),
    ]
    corpus = load_corpus(tsv(tmp_path / "sw-en.tsv", rows, "source\ttarget\talignment"))
    assert dropped(corpus) == {"bad alignment": 5}
    assert corpus.dataset["alignment"] == ["", "0-1 1-0"]
    fault("D1", "links to words that do not exist", tried=len(bad), survived=dropped(corpus)["bad alignment"])


def test_too_many_unreadable_lines_are_refused(tmp_path):
    good = [f"{s}\t{t}\n".encode() for s, t in many(1500)]
    bad = [b"paka\n"] * 60
    message = (
        r"sw-en\.tsv: 60 of the first 1000 lines .*more than 5%: wrong number of columns at .*sw-en\.tsv:{} \(1, not 2"
    )
    with pytest.raises(ValueError, match=message.format(2)):
        load_corpus(raw_tsv(tmp_path, *bad, *good[:940]))
    with pytest.raises(ValueError, match=message.format(942)):  # at once, long before the end of the file
        load_corpus(raw_tsv(tmp_path, *good[:940], *bad, *good[940:]))
    path = raw_tsv(tmp_path, *bad, *good[:939])
    assert load_corpus(path).report.kept == 939  # of so few lines, 60 may be bad
    path = raw_tsv(tmp_path, *bad, *good[:940])
    assert load_corpus(path, max_bad_rate=0.1).report.kept == 940


def test_lines_without_a_translation_are_no_fault_of_the_file(tmp_path):
    good = [f"{s}\t{t}\n".encode() for s, t in many(1500)]
    report = load_corpus(raw_tsv(tmp_path, *[b"paka\t\n"] * 300, *good)).report
    assert (report.kept, report.dropped) == (1500, {"empty side": 300})


def test_a_file_without_one_pair_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sw-en\.tsv has no readable pair in 2 lines: empty side at .*:2, .*:3"):
        load_corpus(raw_tsv(tmp_path, b"\tcat\n", b"paka\t\n"))
    with pytest.raises(ValueError, match=r"No pair of .*sw-en\.tsv was kept(.|\n)*no words 1"):
        load_corpus(raw_tsv(tmp_path, b"!\t?\n"))
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"sw-en\.tsv.*"):
            load_corpus(raw_tsv(tmp_path), streaming=streaming)
        with pytest.raises(ValueError, match=r"sw-en\.tsv"):
            load_corpus(write(tmp_path / "sw-en.tsv", b""), streaming=streaming)


@pytest.mark.parametrize(
    ("first", "message"),
    [("score\tpaka\tcat", "without a header.* has 3.*'source<TAB>target<TAB>source_lang'"),
     ("paka", "without a header.* has 1"), ("", "the first line of this one is empty"),
     ("source\ttarget\tscore\tscore", "duplicate column")],
)  # fmt: skip
def test_wrong_headers(tmp_path, first, message):
    with pytest.raises(ValueError, match=rf"sw-en\.tsv:1: .*{message}"):
        load_corpus(write(tmp_path / "sw-en.tsv", f"{first}\npaka\tcat\n"))


#: Columns of which two could be the same side, and what an error says of them.
AMBIGUOUS = {
    "source source": "several columns for 'source': 'source', 'source'",
    "source Source target": "several columns for 'source': 'source', 'Source'",
    "source src target": "several columns for 'source': 'source', 'src'",
    "source target trg": "several columns for 'target': 'target', 'trg'",
    "source target source_lang SOURCE_LANG": "several columns for 'source_lang'",
    "sw sw en": "several columns for 'sw': 'sw', 'sw'",
    "zh_hans zh_hant en": "several columns for 'zh': 'zh_hans', 'zh_hant'",
    "en en": "several columns for 'en': 'en', 'en'",
}


@pytest.mark.parametrize("columns", AMBIGUOUS)
def test_ambiguous_columns_are_refused(tmp_path, capsys, fault, columns):
    names = columns.split()
    pair = ["paka", "cat", "sw", "en"][: len(names)]
    path = tsv(tmp_path / "pairs.tsv", [pair], "\t".join(names))
    survived = 0
    for arguments in (["diagnose", "--corpus", str(path)], ["align", str(path), "-o", str(tmp_path / "x.tsv")]):
        survived += main(arguments) == 2 and AMBIGUOUS[columns] in capsys.readouterr().err
    fault("C9", "a TSV whose columns are ambiguous", tried=2, survived=survived)
    if len({name.lower() for name in names}) < len(names) != len(set(names)):  # Parquet can hold it
        pq.write_table(pa.table([[text] for text in pair], names=names), path.with_suffix(".parquet"))
        with pytest.raises(CorpusError, match="duplicate column"):
            load_corpus(path.with_suffix(".parquet"))


def test_a_column_of_another_purpose_may_be_called_source(tmp_path):
    path = tsv(tmp_path / "pairs.tsv", [("cat", "paka", "opus")], "en\tsw\tsource")
    assert pairs_of(load_corpus(path)) == [("paka", "cat")]


@pytest.mark.parametrize(
    "header",
    ["source\tlugha", "Source\tNotes", "target_lang\tlugha", '"source"\t"target"', f"source\t{'x' * 70_000}"],
    ids=lambda header: header[:20],
)
def test_half_a_header_is_not_a_pair(tmp_path, header):
    with pytest.raises(CorpusError, match=r"sw-en\.tsv:1: no columns 'source' and 'target'") as error:
        load_corpus(tsv(tmp_path / "sw-en.tsv", header=header))
    assert len(str(error.value)) < 1000


def test_a_first_pair_of_equal_sides_is_a_pair(tmp_path):
    assert pairs_of(load_corpus(tsv(tmp_path / "es-en.tsv", [("no", "no"), ("sí", "yes")], None))) == [
        ("no", "no"),
        ("sí", "yes"),
    ]


def test_repeated_keys_are_counted(tmp_path, fault):
    lines = [
        '{"source": "paka", "source": "mbwa", "target": "cat"}',
        '{"source": "paka", "target": "cat", "target": "dog", "x": 1}',
        '{"translation": {"sw": "paka", "sw": "mbwa", "en": "cat"}}',
        '{"translation": {"sw": "paka", "en": "cat"}, "en": "dog"}',
    ]
    good = '{"source": "paka", "target": "cat"}'
    corpus = load_corpus(write(tmp_path / "sw-en.jsonl", "\n".join([good, *lines]) + "\n"))
    assert pairs_of(corpus) == [("paka", "cat")]
    (counts,) = corpus.report.counts.values()
    assert [example.partition(" ")[2] for example in counts.examples["repeated key"]] == [
        "('source')", "('target')", "('sw')", "('en')",
    ]  # fmt: skip
    fault("C9", "a JSON object with a key twice", tried=len(lines), survived=dropped(corpus)["repeated key"])


def test_fields_that_repeat_a_parquet_column_are_refused(tmp_path):
    table = pa.table({"translation": [{"sw": "paka", "en": "cat"}], "en": ["dog"]})
    pq.write_table(table, tmp_path / "pairs.parquet")
    with pytest.raises(CorpusError, match=r"duplicate column: en, translation\.sw, translation\.en"):
        load_corpus(tmp_path / "pairs.parquet")


#: A value of a column, and what the report says of it.
VALUES = [
    ("source", math.nan, "source is nan"),
    ("source", None, "'source'"),
    ("target", 7, "target is 7"),
    ("source_lang", math.nan, "source_lang is nan"),
    ("target_lang", 1.5, "target_lang is 1.5"),
    ("alignment", math.nan, "alignment is nan"),
    ("alignment", [[0, 0]], "alignment is [[0, 0]]"),
    ("alignment_scores", math.nan, "alignment_scores is nan"),
    ("alignment_scores", "nan", "alignment_scores has 'nan', which is not a finite number"),
    ("alignment_scores", "inf", "alignment_scores has 'inf', which is not a finite number"),
    ("alignment_scores", "1,0", "alignment_scores has '1,0', which is not a finite number"),
    ("segmenter", math.nan, "segmenter is nan"),
]


def test_values_that_a_column_cannot_hold_are_counted_with_line_and_column(tmp_path, fault):
    good = {"source": "paka", "target": "cat", "source_lang": "sw", "target_lang": "en"}
    good |= {"alignment": "0-0", "alignment_scores": "1", "segmenter": "whitespace"}
    survived = 0
    for name, value, detail in VALUES:
        rows = [good, {**good, name: value}]
        path = write(tmp_path / "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        corpus = load_corpus(path, source_lang="sw")
        (examples,) = [examples for c in corpus.report.counts.values() for examples in c.examples.values()]
        survived += len(corpus.dataset) == 1 and examples == [f"{path}:2 ({detail})"]
    assert survived == len(VALUES)
    fault("C9", "a value that a column cannot hold", tried=len(VALUES), survived=survived)


@pytest.mark.parametrize("name", ["source", "source_lang", "alignment", "alignment_scores", "source_bt"])
@pytest.mark.parametrize("kind", [pa.float64(), pa.int8(), pa.timestamp("ns"), pa.date32(), pa.decimal128(5)])
def test_parquet_columns_that_hold_no_text_are_named(tmp_path, name, kind):
    columns = {"source": ["paka"], "target": ["cat"], "alignment": ["0-0"], name: pa.array([None], kind)}
    pq.write_table(pa.table(columns), tmp_path / "sw-en.parquet")
    with pytest.raises(CorpusError, match=rf"sw-en\.parquet: the column '{name}' holds .*, but should hold text"):
        load_corpus(tmp_path / "sw-en.parquet")


def test_a_first_line_that_is_not_utf_8(tmp_path):
    with pytest.raises(ValueError, match=r"sw-en\.tsv:1: not UTF-8 \(byte 0xe9 at 3\)"):
        load_corpus(write(tmp_path / "sw-en.tsv", b"caf\xe9\tcoffee\n"))


@pytest.mark.parametrize("streaming", [False, True])
def test_moses_files_of_unequal_length_are_refused_at_once(tmp_path, streaming, fault):
    prefix = moses(tmp_path, pairs=many(30), suffix=".gz")
    write(tmp_path / "europarl.sw-en.en.gz", "".join(f"{t}\n" for _, t in many(29)))
    with pytest.raises(ValueError, match=r"sw-en\.sw\.gz has 30 and .*sw-en\.en\.gz has 29"):
        load_corpus(prefix, streaming=streaming)
    fault("C2", "sides of different numbers of lines", tried=1, survived=1)


def test_a_moses_side_of_a_byte_order_mark_only_is_empty(tmp_path):
    write(tmp_path / "x.sw", b"\xef\xbb\xbf")
    write(tmp_path / "x.en", "cat")
    with pytest.raises(CorpusError, match=r"x\.sw has 0 and .*x\.en has 1"):
        load_corpus(tmp_path / "x", languages=["sw"])


def refusal(prefix, sources, targets):
    write(prefix.with_suffix(".sw"), "".join(f"{source}\n" for source in sources))
    write(prefix.with_suffix(".en"), "".join(f"{target}\n" for target in targets))
    with pytest.raises(CorpusError) as refused:
        load_corpus(f"{prefix}.sw,{prefix}.en")
    return str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize("language", ["sw", "th"])
def test_the_place_where_the_sides_part_is_named(tmp_path, fault, language):
    """Missing lines of either side, of sentences whose lengths tell nothing but themselves."""
    dataset = load_corpus(DEMO, languages=[language]).dataset
    places = [(0, 1), (9, 1), (700, 1), (1500, 3), (2500, 1)]
    survived = 0
    for at, gone in places:
        for side in (0, 1):
            sides = list(dataset["source"]), list(dataset["target"])
            del sides[side][at : at + gone]
            said = refusal(tmp_path / "text", *sides)
            named = re.search(r"the shift starts near line ([\d,]+)\.$", said)
            survived += named is not None and abs(int(named[1].replace(",", "")) - at - 1) <= 10
    assert survived == 2 * len(places)
    fault("C2", "lines missing on one side: the position is reported", tried=2 * len(places), survived=survived)


def test_no_place_is_named_where_none_can_be_seen(tmp_path):
    dataset = load_corpus(DEMO, languages=["sw"]).dataset
    sources, targets = list(dataset["source"]), list(dataset["target"])
    for seed in range(4):
        shuffled = random.Random(seed).sample(targets, len(targets))
        assert "starts near" not in refusal(tmp_path / "text", sources, shuffled[:-1])
    assert "starts near" not in refusal(tmp_path / "text", sources, targets[:-5])
    assert "starts near" not in refusal(tmp_path / "text", sources[:30], ["word"] * 29)
    assert "starts near" not in refusal(tmp_path / "text", sources[:30], [])
    assert "starts near" not in refusal(tmp_path / "text", ["neno"] * 20_000, ["word"] * 3)


def test_a_bad_moses_line_takes_its_partner_along(tmp_path):
    prefix = moses(tmp_path, pairs=many(6))
    lines = (tmp_path / "europarl.sw-en.en").read_bytes().split(b"\n")
    lines[1], lines[3] = b"caf\xe9", b"x" * 300_000
    write(tmp_path / "europarl.sw-en.en", b"\n".join(lines))
    corpus = load_corpus(prefix)
    assert pairs_of(corpus) == [pair for i, pair in enumerate(many(6)) if i not in (1, 3)]
    assert dropped(corpus) == {"not UTF-8": 1, "too long": 1}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["sw-en.tsv.gz", "sw-en.jsonl.gz", "sw-en.tmx.gz"])
def test_truncated_gzip(tmp_path, name, streaming):
    generator = random.Random(0)
    pairs = [
        (f"{i} {generator.random()}", f"word {generator.random()}") for i in range(20_000 if ".tmx" in name else 6000)
    ]
    content = {
        ".tsv": "source\ttarget\n" + "".join(f"{s}\t{t}\n" for s, t in pairs),
        ".jsonl": "".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in pairs),
        ".tmx": tmx(pairs),
    }[Path(name).suffixes[0]]
    path = write(tmp_path / name, content)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"{path}, after line [1-9]\d+: the gzip file is damaged or truncated"):
        list(load_corpus(path, streaming=streaming).dataset)


def test_a_damaged_gzip_and_a_wrong_suffix(tmp_path):
    path = tsv(tmp_path / "sw-en.tsv.gz", many(100))
    data = bytearray(path.read_bytes())
    data[-6] ^= 255
    path.write_bytes(data)
    with pytest.raises(ValueError, match="the gzip file is damaged"):
        load_corpus(path)
    path.write_bytes(gzip.compress(b"source\ttarget\npaka\tcat\n"))
    assert pairs_of(load_corpus(path.rename(tmp_path / "sw-en.tsv"))) == [("paka", "cat")]


def test_jsonl_faults(tmp_path):
    lines = [
        "{",
        "[1]",
        '{"source": "paka"}',
        '{"source": 3, "target": "cat"}',
        '{"source": "\\ud800", "target": "cat"}',
    ]
    path = write(tmp_path / "sw-en.jsonl", '{"source": "paka", "target": "cat"}\n' + "\n".join(lines) + "\n")
    assert dropped(load_corpus(path)) == {"not JSON": 2, "missing side": 1, "not text": 2}
    with pytest.raises(ValueError, match=r"sw-en\.jsonl:1: no columns 'source' and 'target'.* found 'text'"):
        load_corpus(write(tmp_path / "sw-en.jsonl", '{"text": "paka"}\n'))


def test_damaged_parquet_and_tmx(tmp_path):
    with pytest.raises(ValueError, match=r"sw-en\.parquet cannot be read as Parquet"):
        load_corpus(write(tmp_path / "sw-en.parquet", b"PAR1 but not quite"))
    with pytest.raises(ValueError, match=r"sw-en\.tmx:5: not well-formed TMX"):
        load_corpus(write(tmp_path / "sw-en.tmx", tmx()[:-60]))
    bomb = '<!DOCTYPE t [<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 100}">' for a, b in zip("abcdef", "bcdefg", strict=True)
    )
    body = '<tmx><body><tu><tuv xml:lang="en"><seg>&g;</seg></tuv></tu></body></tmx>'
    with pytest.raises(ValueError, match="not well-formed TMX"):
        load_corpus(write(tmp_path / "sw-en.tmx", bomb + "]>" + body))


HUNGRY = f"""{PEAK}
import sys
from metaphrase.corpus import load_corpus
used = peak()
corpus = load_corpus(sys.argv[1], max_expansion=None)
print(len(corpus.dataset), dict(corpus.report.dropped))
print(peak() - used)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["sw-en.tsv.gz", pytest.param("sw-en.tmx.gz", marks=pytest.mark.slow)])
def test_a_huge_line_costs_no_memory(tmp_path, name, fault):
    path = tmp_path / name
    before, after = (b"source\ttarget\npaka\t", b"\nmbwa\tdog\n")
    if ".tmx" in name:
        unit = '<tu><tuv xml:lang="sw"><seg>{}</seg></tuv><tuv xml:lang="en"><seg>{}</seg></tuv></tu>'
        before, after = f"<tmx><body>{unit}".encode().split(b"{}", 1)[0] + b"paka", b"</seg></tuv></tu>"
        after = b'</seg></tuv><tuv xml:lang="en"><seg>cat</seg></tuv></tu>' + unit.format("mbwa", "dog").encode()
        after += b"</body></tmx>"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(before)
        for _ in range(256):
            file.write(b"x" * (1 << 20))
        file.write(after)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HUNGRY, str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split("\n")
    assert output[0] == "1 {'too long': 1}"
    assert int(output[1]) < 100, f"{output[1]} MiB for a line of 256 MiB"
    fault("C5", "a line of 256 MiB", tried=1, survived=1)


def bomb(path: Path, line: bytes, times: int) -> Path:
    """A gzip file of one line, again and again."""
    block = line * (1 + (1 << 20) // len(line))
    with gzip.open(path, "wb") as file:
        for _ in range(times):
            file.write(block)
    return path


@pytest.mark.parametrize(
    ("kind", "streaming"),
    mostly_slow([("tsv", False), ("jsonl", False), ("tmx", True), ("moses", True)], [("tmx", True), ("moses", True)]),
)
def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch, fault, kind, streaming):
    """Of short lines: no limit of a line stops them, and cleaning them away takes as long as there are some."""
    monkeypatch.setattr("metaphrase.corpus.text.EXPANSION_AFTER", 1 << 20)
    line = {
        "tsv": b"paka mweusi anakunywa maziwa\tthe black cat drinks its milk\n",
        "jsonl": b'{"source": "paka mweusi anakunywa maziwa", "target": "the black cat drinks its milk"}\n',
        "moses": b"the black cat drinks its milk\n",
        "tmx": b"<tu><note>the black cat drinks its milk</note></tu>\n",
    }[kind]
    if kind == "moses":
        corpus = f"{bomb(tmp_path / 'x.sw.gz', line, 8)},{bomb(tmp_path / 'x.en.gz', line, 8)}"
    else:
        corpus = bomb(tmp_path / f"sw-en.{kind}.gz", (b"<tmx><body>" if kind == "tmx" else b"") + line, 8)
    with pytest.raises(CorpusError, match=r"\.gz expands to more than 200 times its size: .* [1-6] MiB from \d+ KiB"):
        list(load_corpus(corpus, streaming=streaming).dataset)
    fault("C10", f"a decompression bomb of short lines, {kind}", tried=1, survived=1)


@pytest.mark.slow
def test_a_bomb_of_gigabytes_is_refused_in_bounded_memory(tmp_path, fault):
    line = b"paka mweusi anakunywa maziwa " * 40 + b"\t" + b"the black cat drinks its milk " * 40 + b"\n"
    path = bomb(tmp_path / "sw-en.tsv.gz", line, 64)
    path.write_bytes(path.read_bytes() * 64)
    script = f"""{PEAK}
import sys
from metaphrase.corpus import load_corpus
used = peak()
try:
    load_corpus(sys.argv[1])
except ValueError as error:
    print(error)
print(peak() - used)
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True, env=environment
    )
    said, used = done.stdout.splitlines()
    assert re.search(r"times its size: reading stopped after 6[4-9] MiB from \d+ KiB", said)
    fault("C10", "a decompression bomb of 4 GiB", tried=1, survived=int(used) < 100)


@pytest.mark.long
def test_honest_text_may_shrink_and_the_cap_can_be_lifted(tmp_path, monkeypatch):
    monkeypatch.setattr("metaphrase.corpus.text.EXPANSION_AFTER", 1 << 16)
    path = tsv(tmp_path / "sw-en.tsv.gz", many(4000))
    assert load_corpus(path).report.kept == 4000
    path = bomb(tmp_path / "sw-en.jsonl.gz", b'{"source": "%s", "target": "%s"}\n' % (b"a " * 30, b"b " * 30), 1)
    assert load_corpus(path, max_expansion=None).report.kept == 1
    with pytest.raises(CorpusError, match="more than 100 times its size"):
        load_corpus(path, max_expansion=100)
    with pytest.raises(CorpusError, match="more than 200 times its size"):
        read_parallel(bomb(tmp_path / "te-en.tsv.gz", b"source\ttarget\n", 1))


def test_sides_that_are_the_same_or_swapped(tmp_path, caplog, fault):
    pairs = many(150)
    with pytest.raises(ValueError, match="both sides are the same text in 100 of the first 100 pairs"):
        load_corpus(tsv(tmp_path / "sw-en.tsv", [(s, s) for s, _ in pairs]))
    load_corpus(tsv(tmp_path / "sw-en.tsv", pairs))
    assert not caplog.records
    load_corpus(tsv(tmp_path / "sw-en.tsv", [pair[::-1] for pair in pairs]))
    assert "100 of the first 100 sources look English, 0 of the targets. Are the sides swapped?" in caplog.text
    fault("C8", "identical and swapped sides, found while reading", tried=2, survived=2)


def test_read_parallel_is_strict(tmp_path):
    assert read_parallel(tsv(tmp_path / "sw-en.tsv.gz")) == PAIRS
    assert read_parallel(tsv(tmp_path / "a.tsv", [("paka", "cat", "x")], "source\ttarget\tfrom")) == [("paka", "cat")]
    for reason, line in FAULTS.items():
        with pytest.raises(ValueError, match=rf"sw-en\.tsv:3: {reason}"):
            read_parallel(raw_tsv(tmp_path, b"paka\tcat\n", line))
    with pytest.raises(ValueError, match=r"sw-en\.tsv:1: expected a header 'source<TAB>target', found 'Habari"):
        read_parallel(tsv(tmp_path / "sw-en.tsv", header=None))
    with pytest.raises(ValueError, match="is not a TSV file"):
        read_parallel(make_jsonl(tmp_path))


def test_a_test_set_has_one_language(tmp_path):
    header = "source\ttarget\tsource_lang\ttarget_lang"
    rows = [("paka", "cat", "swh", "eng"), ("dog", "mbwa", "en", "sw"), ("ndege", "bird", "", "")]
    path = tsv(tmp_path / "sw-en.tsv", rows, header)
    assert read_parallel(path) == [("paka", "cat"), ("mbwa", "dog"), ("ndege", "bird")]
    for code in ("es-419", "zh_Hant", "zh_Hant_TW"):
        tsv(tmp_path / f"{code}-en.tsv", [("x", "cat", code, "en")], header)
    assert list(load_parallel_folder(tmp_path)) == ["es-419", "sw", "zh_Hant", "zh_Hant_TW"]
    for name in ("sw-en.tsv", "pairs.tsv"):
        for languages in (("te", "en"), ("sw", "fr"), ("en", "te")):
            path = tsv(tmp_path / name, [*rows, ("x", "y", *languages)], header)
            with pytest.raises(CorpusError, match=rf"{name}:5: a test set has one language, here 'sw' with 'en', but"):
                read_parallel(path)


def test_read_pairs_gives_lines_and_columns(tmp_path):
    report = CorpusReport()
    path = tsv(
        tmp_path / "sw-en.tsv", [("paka", "cat", "0-0"), ("", "dog", ""), ("!", "!", "")], "source\ttarget\talignment"
    )
    known = {"source_lang": "sw", "target_lang": "en"}
    assert list(read_pairs(path, report=report)) == [
        (2, "paka", "cat", {**known, "alignment": "0-0"}), (4, "!", "!", {**known, "alignment": ""}),
    ]  # fmt: skip
    assert report.dropped == {"empty side": 1}
    make_folder(tmp_path)
    tsv(tmp_path / "te-en.tsv")
    with pytest.raises(ValueError, match="Pass the path of one of them"):
        next(read_pairs(tmp_path))


SIDE = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\0"), min_size=1, max_size=30).filter(
    lambda text: not is_blank(text) and not text.endswith("\r") and not text.startswith("\ufeff")
)


@settings(max_examples=20)
@given(st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=20))
def test_any_text_makes_the_round_trip(tmp_path, pairs):
    path = tsv(tmp_path / "sw-en.tsv.gz", pairs)
    assert read_parallel(path) == pairs
    assert pairs_of(load_corpus(path, cleaning=None)) == pairs
    prefix = moses(tmp_path, pairs=pairs)
    assert pairs_of(load_corpus(prefix, cleaning=None)) == pairs


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"paka\tcat", b"\t", b"a\tb\tc"]), max_size=30))
def test_any_bytes_are_read_or_refused_in_words(tmp_path, lines):
    path = raw_tsv(tmp_path, b"simba\tlion\n", *(line + b"\n" for line in lines))
    data = path.read_bytes()
    corpus = load_corpus(path, cleaning=None)
    assert corpus.report.read == data.count(b"\n") - 1
    assert corpus.report.read == corpus.report.kept + corpus.report.dropped.total()
    kept = [f"{s}\t{t}".encode() for s, t in pairs_of(corpus)]
    assert Counter(kept) <= Counter(line.removesuffix(b"\r") for line in data.split(b"\n"))


@settings(max_examples=30)
@given(st.binary(max_size=200), st.sampled_from(["tsv", "jsonl", "tmx", "parquet", "tsv.gz"]))
def test_any_file_is_read_or_refused_in_words(tmp_path, data, suffix):
    path = tmp_path / f"sw-en.{suffix}"
    path.write_bytes(data)
    message, kept = "", 0
    try:
        kept = len(load_corpus(path).dataset)
    except ValueError as error:
        message = str(error)
    assert kept or path.name in message
