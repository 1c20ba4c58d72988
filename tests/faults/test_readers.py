"""Corpora that are cut, shifted, or larger than they look."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaphrase.corpus import load_corpus
from metaphrase.corpus.readers import read_pairs
from metaphrase.exceptions import CorpusError
from tests.conftest import mostly_slow
from tests.faults.memory import PEAK

LIMIT = 8 * 10 + (1 << 16)  # bytes of a line, for sentences of 10 characters


# ------------------------------------------------------------------------------------------------------ byte order marks


@pytest.mark.parametrize("marked", ["sw", "en"])
def test_a_long_first_line_with_a_byte_order_mark_shifts_no_line(tmp_path, fault, marked):
    rows, lengths = [("paka", "cat"), ("mbwa", "dog")], range(LIMIT - 6, LIMIT + 6)
    for length in lengths:
        for at, side in enumerate(("sw", "en")):
            first = codecs.BOM_UTF8 + b"x" * length if side == marked else b"first"
            lines = [first, *(row[at].encode() for row in rows)]
            (tmp_path / f"x.sw-en.{side}").write_bytes(b"\n".join(lines) + b"\n")
        found = list(read_pairs(tmp_path / "x.sw-en", max_chars=10))
        assert [row[:3] for row in found] == [(2, "paka", "cat"), (3, "mbwa", "dog")]
    fault("C1", "byte order mark before a line near the length limit", tried=len(lengths), survived=len(lengths))


# --------------------------------------------------------------------------------------------------------------- Parquet

HUNGRY = f"""{PEAK}
import sys
from metaphrase.corpus import load_corpus
used = peak()
try:
    corpus = load_corpus(sys.argv[1])
    print(len(corpus.dataset), dict(corpus.report.dropped))
except ValueError as error:
    print(error)
print(peak() - used)
"""


def read_apart(path):
    """What a process of its own says of a file, and by how many MiB it grew."""
    command = [sys.executable, "-c", HUNGRY, str(path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    said, used = done.stdout.splitlines()
    return said, int(used)


def repeated(good, bad, size):
    """A column of short values and of one long one, which stands once in the file."""
    values = pa.array([*(f"neno {at}" for at in range(good)), "x" * size])
    return pa.DictionaryArray.from_arrays(pa.array([*range(good), *[good] * bad], pa.int32()), values)


@pytest.mark.long
@pytest.mark.parametrize("nested", mostly_slow([False, True], [False]), ids=["columns", "translation"])
def test_a_long_value_of_many_rows_costs_its_memory_once(tmp_path, fault, nested):
    path = tmp_path / "sw-en.parquet"
    columns = [repeated(20, 600, 1 << 18), pa.array(["cat"] * 620)]
    if nested:
        columns[0] = columns[0].cast(pa.string())
        table = pa.table({"translation": pa.StructArray.from_arrays(columns, ["sw", "en"])})
    else:
        table = pa.table(dict(zip(("source", "target"), columns, strict=True)))
    pq.write_table(table, path, store_schema=False)
    assert path.stat().st_size < 1 << 17
    del table, columns
    said, used = read_apart(path)
    assert said == "20 {'too long': 600}"
    fault("C5", "a Parquet value of 256 KiB in 600 rows", tried=1, survived=used < 100)


@pytest.mark.slow
def test_a_parquet_bomb_is_refused_in_bounded_memory(tmp_path, fault):
    path = tmp_path / "sw-en.parquet"
    pq.write_table(pa.table({"source": repeated(1, 9999, 10_000_000), "target": ["cat"] * 10_000}), path)
    said, used = read_apart(path)
    assert "999 of the first 1000 lines are unreadable" in said
    fault("C10", "100 GB of Parquet in 500 KB", tried=1, survived=used < 200)


def test_parquet_that_compresses_too_well_is_not_read(tmp_path, monkeypatch, fault):
    monkeypatch.setattr("metaphrase.corpus.text.EXPANSION_AFTER", 1 << 20)
    path = tmp_path / "sw-en.parquet"
    table = pa.table({"source": [f"{'x' * 9000}{at}" for at in range(1000)], "target": ["cat"] * 1000})
    pq.write_table(table, path, use_dictionary=False, compression="zstd")
    with pytest.raises(CorpusError, match=r"more than 200 times its size: 8 MiB from \d+ KiB"):
        load_corpus(path)
    assert len(load_corpus(path, max_expansion=None).dataset) == 1000
    fault("C10", "Parquet with implausible compression", tried=1, survived=1)


def test_every_kind_of_text_column_is_read(tmp_path):
    rows = [("paka", "cat"), (None, "dog"), ("", "x"), ("x" * (LIMIT + 1), "long"), ("ng'ombe", "cow")]
    source, target = (list(side) for side in zip(*rows, strict=True))
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
    for kind in kinds:
        for nested in (False, True)[: 1 if pa.types.is_dictionary(kind) else 2]:
            path = tmp_path / "sw-en.parquet"
            sides = [pa.array(side, pa.string()).cast(kind) for side in (source, target)]
            if nested:
                mask = pa.array([False] * 4 + [True])
                table = {"translation": pa.StructArray.from_arrays(sides, ["sw", "en"], mask=mask)}
            else:
                table = {"source": sides[0], "target": sides[1], "other": [[1]] * 5}
            pq.write_table(pa.table(table), path, row_group_size=None if kind == pa.string_view() else 2)
            report = load_corpus(path, max_chars=10, cleaning=None).report
            assert (report.read, report.kept) == (5, 1 if nested else 2)
            assert report.dropped == {"missing side": 2 if nested else 1, "empty side": 1, "too long": 1}


def test_parquet_with_the_wrong_columns_is_refused(tmp_path):
    path = tmp_path / "sw-en.parquet"
    pq.write_table(pa.table({"source": [["paka"]], "target": ["cat"]}), path)
    with pytest.raises(CorpusError, match=r"the column 'source' holds list<.*>, but should hold text"):
        load_corpus(path)
    pq.write_table(pa.table([["paka"], ["cat"], ["dog"]], names=["source", "target", "target"]), path)
    with pytest.raises(CorpusError, match="has a duplicate column: source, target, target"):
        load_corpus(path)
    pq.write_table(pa.table({"text": ["paka"], "number": [1]}), path)
    with pytest.raises(CorpusError, match=r"no columns 'source' and 'target' .*; found 'text', 'number'"):
        load_corpus(path)
