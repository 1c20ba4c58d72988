import gzip
import json
import logging
import os
import random
import re
import subprocess
import sys
from collections import Counter
from importlib.resources import files
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.utils.data import DataLoader

from metaphrase.corpus import Cleaning, load_corpus
from metaphrase.corpus.files import find_files
from metaphrase.corpus.mixing import mix, shares
from metaphrase.corpus.overlap import overlap
from metaphrase.corpus.readers import read_pairs, read_parallel
from metaphrase.corpus.report import CorpusReport
from metaphrase.corpus.rows import COLUMNS
from metaphrase.exceptions import CorpusError
from tests.faults.memory import PEAK

DEMO = Path(str(files("metaphrase"))) / "data" / "demo"
PAIRS = [
    ("Habari ya asubuhi", "Good morning"),
    ("Asante sana", "Thank you very much"),
    ("Paka anakunywa maziwa", "The cat drinks milk"),
]


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def tsv(path: Path, pairs=PAIRS, header: str | None = "source\ttarget") -> Path:
    lines = [*([header] if header else []), *("\t".join(pair) for pair in pairs)]
    return write(path, "\n".join(lines) + "\n")


def many(n: int, word: str = "neno") -> list[tuple[str, str]]:
    return [(f"{word} {i} hapa", f"word {i} of {word}") for i in range(n)]


def pairs_of(corpus) -> list[tuple[str, str]]:
    return [(row["source"], row["target"]) for row in corpus.dataset]


def languages_of(corpus) -> set[tuple[str, str]]:
    return {(row["source_lang"], row["target_lang"]) for row in corpus.dataset}


def dropped(corpus) -> dict[str, int]:
    return dict(corpus.report.dropped)


# ------------------------------------------------------------------------------------------------------------- formats


def make_tsv(folder):
    return tsv(folder / "sw-en.tsv")


def make_tsv_gz(folder):
    return tsv(folder / "sw-en.train.tsv.gz")


def make_headerless(folder):
    return tsv(folder / "sw-en.tsv", header=None)


def make_named_by_languages(folder):
    return tsv(folder / "news.tsv", [pair[::-1] for pair in PAIRS], header="en\tsw")


def make_dap_header(folder):
    return tsv(folder / "sw-en.tsv", header="source\ten")


def make_language_columns(folder):
    return tsv(
        folder / "all.tsv",
        [("x", *pair, "sw", "en") for pair in PAIRS],
        "id\tsource\ttarget\tsource_lang\ttarget_lang",
    )


def make_reversed_name(folder):
    return tsv(folder / "en-sw.tsv", [pair[::-1] for pair in PAIRS])


def make_reversed_columns(folder):
    rows = [(target, source, "en", "sw") for source, target in PAIRS]
    return tsv(folder / "all.tsv", rows, "source\ttarget\tsource_lang\ttarget_lang")


def make_jsonl(folder):
    return write(folder / "x.sw-en.jsonl", "".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in PAIRS))


def make_jsonl_translation(folder):
    rows = [{"translation": {"en": t, "sw": s}} for s, t in PAIRS]
    return write(folder / "opus.jsonl.gz", "".join(json.dumps(row) + "\n" for row in rows))


def make_jsonl_english(folder):
    rows = [{"english": t, "non_english": s} for s, t in PAIRS]
    return write(folder / "en-sw.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def make_parquet(folder):
    path = folder / "sw-en.train.parquet"
    pq.write_table(pa.table({"source": [s for s, _ in PAIRS], "target": [t for _, t in PAIRS], "n": [1, 2, 3]}), path)
    return path


def tmx(pairs=PAIRS, encoding="utf-8") -> bytes:
    units = "".join(
        f'<tu><tuv xml:lang="en-US"><seg>{t}</seg></tuv><tuv xml:lang="SW"><seg>{s}</seg></tuv></tu>\n'
        for s, t in pairs
    )
    head = f'<?xml version="1.0" encoding="{encoding}"?>\n<tmx version="1.4"><header/><body>\n'
    return f"{head}{units}</body></tmx>".encode(encoding)


def make_tmx(folder):
    return write(folder / "en-sw.tmx", tmx())


def make_tmx_gz_utf16(folder):
    return write(folder / "memory.tmx.gz", tmx(encoding="utf-16"))


def moses(folder, name="europarl.sw-en", suffix="", pairs=PAIRS):
    write(folder / f"{name}.sw{suffix}", "".join(f"{s}\n" for s, _ in pairs))
    write(folder / f"{name}.en{suffix}", "".join(f"{t}\n" for _, t in pairs))
    return folder / name


def make_moses_prefix(folder):
    return moses(folder, suffix=".gz")


def make_moses_comma(folder):
    prefix = moses(folder, "train")
    return f"{prefix}.en,{prefix}.sw"


def make_moses_braces(folder):
    return f"{moses(folder, suffix='.gz')}.{{sw,en}}.gz"


def make_folder(folder):
    make_tsv_gz(folder)
    tsv(folder / "sw-en.dev.tsv.gz", many(5))
    write(folder / "NOTICE.md", "no bitext")
    write(folder / "report.json", "{}")
    return folder


def make_folder_of_moses(folder):
    return moses(folder, suffix=".gz").parent


def make_hub(folder):
    make_jsonl_translation(folder)
    return f"hf:{folder}"


FORMATS = [value for name, value in sorted(globals().items()) if name.startswith("make_")]


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__.removeprefix("make_"))
def test_every_format_gives_the_same_rows(tmp_path, make, streaming, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    corpus = load_corpus(make(folder), streaming=streaming)
    assert isinstance(corpus.dataset, IterableDataset if streaming else Dataset)
    assert pairs_of(corpus) == PAIRS
    assert languages_of(corpus) == {("sw", "en")}
    assert corpus.dataset.column_names == ["source", "target", "source_lang", "target_lang"]
    assert (corpus.report.read, corpus.report.kept, dropped(corpus)) == (3, 3, {})
    (facts,) = corpus.files
    assert facts["languages"] == ["en", "sw"]
    assert facts["language"] == "sw"
    assert ("pairs" in facts) == (not streaming)


def test_facts_tell_the_file(tmp_path):
    path = make_tsv(tmp_path)
    (facts,) = load_corpus(path).files
    digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    assert facts == {
        "path": str(path), "file": "sw-en.tsv", "language": "sw", "languages": ["en", "sw"], "pairs": 3,
        "sha256": digest,
    }  # fmt: skip


def test_several_corpora_make_one(tmp_path):
    first, second = tsv(tmp_path / "sw-en.tsv"), tsv(tmp_path / "te-en.tsv", many(4))
    corpus = load_corpus([first, str(second), first])
    assert len(corpus.dataset) == 7
    assert corpus.report.languages == {"sw": 3, "te": 4}
    assert [facts["pairs"] for facts in corpus.files] == [3, 4]


@pytest.mark.parametrize("streaming", [False, True])
def test_alignment_goes_along_and_turns_round_with_its_pair(tmp_path, streaming):
    header = "source\ttarget\talignment"
    one = tsv(tmp_path / "en-sw.tsv", [("the cat drinks", "paka anakunywa", "1-0 2-1")], header)
    other = tsv(tmp_path / "te-en.tsv")
    corpus = load_corpus([one, other], streaming=streaming)
    rows = {row["source"]: row for row in corpus.dataset}
    assert rows["paka anakunywa"]["target"] == "the cat drinks"
    assert rows["paka anakunywa"]["alignment"] == "0-1 1-2"
    assert rows[PAIRS[0][0]]["alignment"] is None


def test_alignment_follows_words_that_cleaning_empties(tmp_path):
    rows = [('" paka " anakunywa', 'the "cat" drinks', "0-0 1-1 3-2"), ("paka \x07x", "cat", "0-0")]
    path = tsv(tmp_path / "sw-en.tsv", rows, "source\ttarget\talignment")
    corpus = load_corpus(path, cleaning=Cleaning(control_characters=True))
    assert next(iter(corpus.dataset)) == {
        "source": "paka  anakunywa", "target": "the cat drinks", "source_lang": "sw", "target_lang": "en",
        "alignment": "0-1 1-2",
    }  # fmt: skip
    assert list(corpus.dataset)[1]["alignment"] == "0-0"


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
def test_scores_and_back_translations_go_along_and_turn_round(tmp_path, streaming):
    columns = [
        "source",
        "target",
        "source_lang",
        "target_lang",
        "alignment",
        "alignment_scores",
        "source_bt",
        "target_bt",
    ]
    rows = [
        ("maji moto", "hot water", "sw", "en", "0-1 1-0", "0.9 0.5", "maji ya moto ||| maji", "warm water"),
        ("the cat", "paka huyo", "en", "sw", "1-0 0-1", "1e-3 1", "a cat", "paka"),
    ]
    path = tsv(tmp_path / "all.tsv", rows, "\t".join(columns))
    first, second = load_corpus(path, streaming=streaming).dataset
    assert first == dict(zip(columns, rows[0], strict=True))
    assert second == {
        "source": "paka huyo",
        "target": "the cat",
        "source_lang": "sw",
        "target_lang": "en",
        "alignment": "0-1 1-0",
        "alignment_scores": "1e-3 1",
        "source_bt": "paka",
        "target_bt": "a cat",
    }


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet", "hub"])
def test_every_format_carries_the_optional_columns(tmp_path, kind, streaming, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"source": "我喜欢猫", "target": "I like cats", "alignment": "1-1", "alignment_scores": "0.5"},
        {"source": "猫", "target": "cat", "alignment": "0-0", "alignment_scores": "1"},
    ]
    rows = [row | {"segmenter": "icu", "target_bt": "cat ||| cats"} for row in rows]
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "tsv":
        name = tsv(folder / "zh-en.tsv", [row.values() for row in rows], "\t".join(rows[0]))
    elif kind == "parquet":
        name = folder / "zh-en.parquet"
        pq.write_table(pa.Table.from_pylist(rows), name)
    else:
        write(folder / "zh-en.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        name = folder / "zh-en.jsonl" if kind == "jsonl" else f"hf:{folder}"
    corpus = load_corpus(name, streaming=streaming, source_lang="zh")
    languages = {"source_lang": "zh", "target_lang": "en"}
    assert [dict(row) for row in corpus.dataset] == [row | languages for row in rows]
    assert "source_bt" not in corpus.dataset.column_names


def test_lines_that_spell_their_columns_in_different_ways(tmp_path):
    lines = [{"Source": "paka", "TARGET": "cat"}, {"source": "maji", "target": "water"}, {"target": "dog"}]
    path = write(tmp_path / "sw-en.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    corpus = load_corpus(path, max_bad_rate=1.0)
    assert pairs_of(corpus) == [("paka", "cat"), ("maji", "water")]
    assert dropped(corpus) == {"missing side": 1}


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
def test_rows_without_an_optional_column_beside_rows_with_it(tmp_path, streaming):
    first = tsv(tmp_path / "sw-en.tsv")
    second = write(
        tmp_path / "te-en.jsonl",
        '{"source": "pilli", "target": "cat"}\n'
        '{"source": "neeru", "target": "water", "alignment": "0-0", "source_bt": "nillu"}\n',
    )
    corpus = load_corpus([first, second], streaming=streaming)
    assert set(corpus.dataset.column_names) == {*COLUMNS, "alignment", "source_bt"}
    rows = {row["source"]: row for row in corpus.dataset}
    assert rows["neeru"]["source_bt"] == "nillu"
    assert rows["pilli"]["source_bt"] == rows["Asante sana"]["source_bt"] == ""
    assert rows["pilli"]["alignment"] is rows["Asante sana"]["alignment"] is None


def test_scores_follow_links_that_cleaning_drops(tmp_path):
    rows = [
        ('paka " maji', 'the cat " water', "0-1 1-2 2-3", "0.1 0.2 0.3", '"nyau" ||| " ||| paka'),
        ("maji", "water", "0-0", "", ""),
    ]
    header = "source\ttarget\talignment\talignment_scores\tsource_bt"
    corpus = load_corpus(tsv(tmp_path / "sw-en.tsv", rows, header), cleaning=Cleaning(control_characters=True))
    first, second = corpus.dataset
    assert (first["source"], first["target"]) == ("paka  maji", "the cat  water")
    assert (first["alignment"], first["alignment_scores"]) == ("0-1 1-2", "0.1 0.3")
    assert first["source_bt"] == "nyau ||| paka"
    assert (second["alignment_scores"], second["source_bt"]) == (None, "")


def test_words_found_by_icu_are_followed_through_cleaning(tmp_path):
    rows = [('我"喜欢"猫', "I like cats", "0-0 1-1 2-1 3-1 4-2", "icu")]
    corpus = load_corpus(
        tsv(tmp_path / "zh-en.tsv", rows, "source\ttarget\talignment\tsegmenter"),
        cleaning=Cleaning(control_characters=True),
    )
    (row,) = corpus.dataset
    assert (row["source"], row["alignment"], row["segmenter"]) == ("我喜欢猫", "0-0 1-1 2-2", "icu")


@pytest.mark.parametrize(
    ("alignment", "scores", "segmenter", "detail"),
    [
        ("0-0 2-2", "1 1", "", "a link points outside of the 1 and 3 words"),
        ("0-0", "1 1", "icu", "2 scores for 1 links"),
        ("0-0", "high", "icu", "could not convert string to float"),
        ("0-0", "1", "spacy", "A segmenter is 'whitespace' or 'icu', not 'spacy'"),
        ("4-0", "1", "icu", "a link points outside of the 3 and 3 words"),
        ("0:0", "1", "icu", "An alignment has the form '0-0 1-2', not '0:0'"),
    ],
)
def test_links_that_do_not_fit_are_counted_with_their_reason(tmp_path, alignment, scores, segmenter, detail):
    rows = [("我喜欢猫", "I like cats", alignment, scores, segmenter), ("猫", "cat", "0-0", "1", "icu")]
    path = tsv(tmp_path / "zh-en.tsv", rows, "source\ttarget\talignment\talignment_scores\tsegmenter")
    corpus = load_corpus(path)
    assert dropped(corpus) == {"bad alignment": 1}
    (counts,) = corpus.report.counts.values()
    assert detail in counts.examples["bad alignment"][0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"source_bt": ["paka"]}, "not text"),
        ({"target_bt": "\ud800"}, "not text"),
        ({"alignment": "0-0", "alignment_scores": [1.0]}, "bad alignment"),
        ({"alignment": ["0-0"]}, "bad alignment"),
        ({"alignment": "0-0", "segmenter": 1}, "bad alignment"),
    ],
)
def test_optional_columns_that_hold_no_text(tmp_path, record, reason):
    rows = [{"source": "paka", "target": "cat"} | record, {"source": "mbwa", "target": "dog"}]
    corpus = load_corpus(write(tmp_path / "sw-en.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert dropped(corpus) == {reason: 1}


def test_scores_and_segmenters_without_links_are_left_out(tmp_path):
    rows = [{"source": "paka", "target": "cat", "alignment_scores": [1], "segmenter": 3}]
    corpus = load_corpus(write(tmp_path / "sw-en.jsonl", json.dumps(rows[0]) + "\n"))
    assert corpus.dataset.column_names == list(COLUMNS)


def test_tmx_takes_the_languages_it_is_asked_for(tmp_path):
    unit = "<tu>" + "".join(
        f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>'
        for code, text in [("en", "a <ph>{0}</ph>word\nhere"), ("sw", "neno"), ("te", "పదం")]
    )  # fmt: skip
    alone = '<tu><tuv xml:lang="fr"><seg>mot</seg></tuv></tu>'
    path = write(tmp_path / "all.tmx", f"<tmx><body>{unit}</tu>{alone}</body></tmx>")
    corpus = load_corpus(path)
    assert [tuple(row.values()) for row in corpus.dataset] == [
        ("neno", "a word here", "sw", "en"), ("పదం", "a word here", "te", "en"),
    ]  # fmt: skip
    assert dropped(corpus) == {"other languages": 1}
    assert pairs_of(load_corpus(path, languages=["te"])) == [("పదం", "a word here")]


def test_another_language_can_be_the_target(tmp_path):
    path = tsv(tmp_path / "fr-de.tsv", [("le chat", "die Katze")])
    assert list(load_corpus(path, target_lang="fr").dataset) == [
        {"source": "die Katze", "target": "le chat", "source_lang": "de", "target_lang": "fr"}
    ]


@pytest.mark.parametrize(
    ("name", "language"),
    [("ccmatrix.sw-en.tsv", "sw"), ("en-zh_CN.tsv", "zh"), ("SW-EN.tsv", "sw"), ("zh-Hant-en.tsv", "zh"), ("sw-en.my-own.train.tsv.gz", "sw"),
     ("the-end.tsv", None), ("de-fr.tsv", None), ("corpus.tsv", None)],
)  # fmt: skip
def test_languages_in_file_names(tmp_path, name, language):
    (file,) = find_files(tsv(tmp_path / name))
    assert file.language == language


@pytest.mark.parametrize("streaming", [False, True])
def test_a_language_must_be_told(tmp_path, streaming):
    path = tsv(tmp_path / "corpus.tsv")
    with pytest.raises(ValueError, match=r"Cannot infer the language of .*corpus\.tsv\..*languages=\['sw'\]"):
        load_corpus(path, streaming=streaming)
    assert languages_of(load_corpus(path, languages=["sw"], streaming=streaming)) == {("sw", "en")}
    assert languages_of(load_corpus(path, source_lang="te", streaming=streaming)) == {("te", "en")}


def test_arguments_may_not_contradict_the_name(tmp_path):
    path = tsv(tmp_path / "sw-en.tsv")
    with pytest.raises(ValueError, match="'sw' by its name, but source_lang is 'te'"):
        load_corpus(path, source_lang="te")
    with pytest.raises(FileNotFoundError, match=r"no pairs for te\. Its languages: sw"):
        load_corpus(path, languages=["te"])


def test_languages_select_from_a_folder_and_from_columns(tmp_path):
    for code in ("sw", "te", "th"):
        tsv(tmp_path / f"{code}-en.tsv", many(3, code))
    assert load_corpus(tmp_path, languages=["te", "sw"]).report.languages == {"sw": 3, "te": 3}
    rows = [(*pair, "sw") for pair in PAIRS] + [(*pair, "te") for pair in many(2)]
    path = tsv(tmp_path / "mixed.tsv", rows, "source\ttarget\tsource_lang")
    corpus = load_corpus(path, languages=["te", "sw"])
    assert corpus.report.languages == {"sw": 3, "te": 2}
    corpus = load_corpus(path, languages=["te"])
    assert corpus.report.languages == {"te": 2}
    assert dropped(corpus) == {"language not chosen": 3}
    with pytest.raises(ValueError, match=r"No pair was kept for th\. Languages of the corpus: te"):
        load_corpus(path, languages=["te", "th"])


def test_splits_of_a_folder(tmp_path):
    make_folder(tmp_path)
    tsv(tmp_path / "te-en.tsv", many(7))
    assert load_corpus(tmp_path).report.languages == {"sw": 3, "te": 7}
    assert load_corpus(tmp_path, split="dev").report.languages == {"sw": 5, "te": 7}
    (tmp_path / "te-en.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"xx-en\[\.test\].*Its splits are: dev, train"):
        load_corpus(tmp_path, split="test")


def test_a_moses_folder_with_ids_beside_it(tmp_path):
    moses(tmp_path, "Bible.en-sw")
    write(tmp_path / "Bible.en-sw.ids", "1\n")
    assert pairs_of(load_corpus(tmp_path)) == PAIRS
    assert pairs_of(load_corpus(tmp_path / "Bible.en-sw")) == PAIRS


@pytest.mark.parametrize("path", ["nothing.tsv", "europarl.sw-en", "a.sw,a.en", "x.{sw,en}"])
def test_missing_files(tmp_path, path):
    with pytest.raises(FileNotFoundError, match=path.split(".")[0]):
        load_corpus(tmp_path / path)


def test_unknown_formats_and_names(tmp_path):
    with pytest.raises(ValueError, match=r"sw-en\.xlsx is unknown\. Supported formats: \.tsv, \.jsonl"):
        load_corpus(write(tmp_path / "sw-en.xlsx", "x"))
    with pytest.raises(ValueError, match="is not the name of a Hub data set"):
        load_corpus("hf:")
    with pytest.raises(FileNotFoundError, match="has no parallel files"):
        load_corpus(tmp_path)


# -------------------------------------------------------------------------------------------------------------- faults


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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_refused(tmp_path, encoding, fault):
    path = write(tmp_path / "sw-en.tsv", "source\ttarget\npaka\tcat\n".encode(encoding))
    with pytest.raises(ValueError, match=r"sw-en\.tsv:1: the file is UTF-16"):
        load_corpus(path)
    fault("C1", "a file in UTF-16 or UTF-32", tried=1, survived=1)


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
    [("score\tpaka\tcat", "without a header.* has 3"), ("paka", "without a header.* has 1"),
     ("source\ttarget\tsource", "duplicate column")],
)  # fmt: skip
def test_wrong_headers(tmp_path, first, message):
    with pytest.raises(ValueError, match=rf"sw-en\.tsv:1: .*{message}"):
        load_corpus(write(tmp_path / "sw-en.tsv", f"{first}\npaka\tcat\n"))


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


def refusal(prefix, sources, targets):
    write(prefix.with_suffix(".sw"), "".join(f"{source}\n" for source in sources))
    write(prefix.with_suffix(".en"), "".join(f"{target}\n" for target in targets))
    with pytest.raises(CorpusError) as refused:
        load_corpus(f"{prefix}.sw,{prefix}.en")
    return str(refused.value)


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
    fault("C2", "lines missing on one side: the position is reported", tried=2 * len(places), survived=survived)


def test_no_place_is_named_where_none_can_be_seen(tmp_path):
    dataset = load_corpus(DEMO, languages=["sw"]).dataset
    sources, targets = list(dataset["source"]), list(dataset["target"])
    for seed in range(4):
        shuffled = random.Random(seed).sample(targets, len(targets))
        assert "part near" not in refusal(tmp_path / "text", sources, shuffled[:-1])
    assert "part near" not in refusal(tmp_path / "text", sources, targets[:-5])
    assert "part near" not in refusal(tmp_path / "text", sources[:30], ["word"] * 29)
    assert "part near" not in refusal(tmp_path / "text", sources[:30], [])
    assert "part near" not in refusal(tmp_path / "text", ["neno"] * 20_000, ["word"] * 3)


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
    pairs = [(f"{i} {generator.random()}", f"word {generator.random()}") for i in range(20_000)]
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
    assert dropped(load_corpus(path)) == {"not JSON": 2, "missing side": 2, "not text": 1}
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


@pytest.mark.parametrize("name", ["sw-en.tsv.gz", "sw-en.tmx.gz"])
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


@pytest.mark.parametrize(("kind", "streaming"), [("tsv", False), ("jsonl", False), ("tmx", True), ("moses", True)])
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
    with pytest.raises(CorpusError, match=r"\.gz expands to more than 200 times its size: .* [1-4] MiB from \d+ KiB"):
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
    assert re.search(r"times its size: 6[4-9] MiB from \d+ KiB", said)
    fault("C10", "a decompression bomb of 4 GiB", tried=1, survived=int(used) < 100)


def test_honest_text_may_shrink_and_the_cap_can_be_lifted(tmp_path, monkeypatch):
    monkeypatch.setattr("metaphrase.corpus.text.EXPANSION_AFTER", 1 << 16)
    path = tsv(tmp_path / "sw-en.tsv.gz", many(20_000))
    assert load_corpus(path).report.kept == 20_000
    path = bomb(tmp_path / "sw-en.jsonl.gz", b'{"source": "a", "target": "b"}\n', 1)
    assert load_corpus(path, max_expansion=None).report.kept == 1
    with pytest.raises(CorpusError, match="more than 300 times its size"):
        load_corpus(path, max_expansion=300)
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
    with pytest.raises(ValueError, match="Give the path of one of them"):
        next(read_pairs(tmp_path))


SIDE = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\0"), min_size=1, max_size=30).filter(
    lambda text: text.strip() and not text.endswith("\r") and not text.startswith("\ufeff")
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=20))
def test_any_text_makes_the_round_trip(tmp_path, pairs):
    path = tsv(tmp_path / "sw-en.tsv.gz", pairs)
    assert read_parallel(path) == pairs
    assert pairs_of(load_corpus(path, cleaning=None)) == pairs
    prefix = moses(tmp_path, pairs=pairs)
    assert pairs_of(load_corpus(prefix, cleaning=None)) == pairs


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"paka\tcat", b"\t", b"a\tb\tc"]), max_size=30))
def test_any_bytes_are_read_or_refused_in_words(tmp_path, lines):
    path = raw_tsv(tmp_path, b"simba\tlion\n", *(line + b"\n" for line in lines))
    data = path.read_bytes()
    corpus = load_corpus(path, cleaning=None)
    assert corpus.report.read == data.count(b"\n") - 1
    assert corpus.report.read == corpus.report.kept + corpus.report.dropped.total()
    kept = [f"{s}\t{t}".encode() for s, t in pairs_of(corpus)]
    assert Counter(kept) <= Counter(line.removesuffix(b"\r") for line in data.split(b"\n"))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# ------------------------------------------------------------------------------------------------------------ cleaning


def test_basic_cleaning(tmp_path):
    pairs = [
        ("  paka ", "cat"),
        ("paka", "cat"),
        ("paka", "Cat"),
        ("...", "cat"),
        ("paka", "—"),
        ("OK", "OK"),
        ("猫", "cat"),
    ]
    path = tsv(tmp_path / "sw-en.tsv", pairs)
    corpus = load_corpus(path)
    assert pairs_of(corpus) == [("paka", "cat"), ("paka", "Cat"), ("OK", "OK"), ("猫", "cat")]
    assert dropped(corpus) == {"duplicate": 1, "no words": 2}
    assert pairs_of(load_corpus(path, cleaning=None)) == pairs
    assert len(load_corpus(path, cleaning=Cleaning(duplicates=False)).dataset) == 5


BLANKS = ["", " ", "\u00a0\u3000 ", "\u2028", "...", "—!?", "\u200b", "()[]{}", "，。"]


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("kind", ["tsv", "jsonl", "moses"])
def test_sides_without_words_in_every_combination(tmp_path, kind, streaming, fault):
    """Each goes with its links and its reason; the pairs around it keep theirs."""
    good = [("paka mweusi", "black cat", "0-1 1-0"), ("mbwa wawili", "two dogs", "0-1")]
    bad = [
        pair for blank in BLANKS for pair in ((blank, "cat"), ("paka", blank), *((blank, other) for other in BLANKS))
    ]
    rows = [good[0], *((source, target, "") for source, target in bad), good[1]]
    if kind == "tsv":
        corpus = tsv(tmp_path / "sw-en.tsv", rows, "source\ttarget\talignment")
    elif kind == "jsonl":
        records = [dict(zip(("source", "target", "alignment"), row, strict=True)) for row in rows]
        corpus = write(tmp_path / "sw-en.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    else:
        corpus = moses(tmp_path, pairs=[row[:2] for row in rows])
    corpus = load_corpus(corpus, streaming=streaming)
    assert [row.get("alignment") for row in corpus.dataset] == (
        [None] * 2 if kind == "moses" else [row[2] for row in good]
    )
    assert pairs_of(corpus) == [row[:2] for row in good]
    empty = sum(not source.strip() or not target.strip() for source, target in bad)
    assert dropped(corpus) == {"empty side": empty, "no words": len(bad) - empty}
    fault(
        "C4", "a side that is empty, blank or without letters", tried=len(bad), survived=corpus.report.dropped.total()
    )


def test_repeated_pairs_are_dropped_once_read(tmp_path, fault):
    generator = random.Random(0)
    pairs = many(700)
    repeated = pairs + generator.choices(pairs, k=300)
    generator.shuffle(repeated)
    corpus = load_corpus(tsv(tmp_path / "sw-en.tsv", repeated))
    assert sorted(pairs_of(corpus)) == sorted(pairs)
    assert dropped(corpus) == {"duplicate": 300}
    fault("C6", "repeated pairs, dropped", tried=300, survived=corpus.report.dropped["duplicate"])


def test_the_same_pair_in_two_languages_is_no_duplicate(tmp_path):
    tsv(tmp_path / "sw-en.tsv", [("Linux", "Linux"), ("Linux", "Linux")])
    tsv(tmp_path / "te-en.tsv", [("Linux", "Linux")])
    assert load_corpus(tmp_path).report.languages == {"sw": 1, "te": 1}


def words(n: int, prefix: str = "w") -> str:
    return " ".join(f"{prefix}{i}" for i in range(n))


@pytest.mark.parametrize(
    ("source", "target", "fault"),
    [
        (words(4, "a"), words(4), None),
        (words(3, "a"), words(4), "too few pieces"),
        (words(4, "a"), words(3), "too few pieces"),
        (words(4, "a"), words(32), None),  # 32 is never too long
        (words(4, "a"), words(33), "length ratio"),
        (words(20, "a"), words(40), None),
        (words(20, "a"), words(41), "length ratio"),
        (words(41), words(20, "a"), "length ratio"),
        (words(64, "a"), words(128), None),
        (words(65, "a"), words(66), "too many pieces"),
        (words(8, "a") + " a@b", words(8), "forbidden string"),
        (words(8, "a"), words(8) + " http", "forbidden string"),
        ("N/A", words(8), "placeholder"),
        (words(8), "N/A", "placeholder"),
        (words(4), words(4), "identical sides"),
        (words(5), "x " + words(4), None),  # not both sides have more than five pieces
        (words(6), words(3) + " " + words(3, "a"), "copied"),  # half of them
        (words(6), words(2) + " " + words(4, "a"), None),
        ("w0 w0 w0 a b c", "w0 d e f g h", "copied"),  # half of the source's, a sixth of the target's
        ("w0 d e f g h", "w0 w0 w0 a b c", "copied"),
    ],
)
def test_daps_filters(source, target, fault):
    assert Cleaning.dap(str.split).fault(source, target) == fault


def test_daps_filters_as_the_released_code_has_them():
    """Against a transcription of the published conditions, on random pairs near every limit."""

    def keeps(one: str, two: str) -> bool:
        if "@" in one or "@" in two or "http" in one or "http" in two or "N/A" in (one, two):
            return False
        ones, twos = one.split(), two.split()
        n, m = len(ones), len(twos)
        if min(n, m) <= 3 or max(n, m) > max(2 * min(n, m), 32) or min(n, m) > 64 or one == two:
            return False
        if min(n, m) <= 5:
            return True
        return 2 * sum(w in twos for w in ones) < n and 2 * sum(w in ones for w in twos) < m

    generator = random.Random(0)
    cleaning = Cleaning.dap(str.split)
    outcomes = Counter()
    for _ in range(3000):
        n = generator.choice([2, 3, 4, 5, 6, 7, 12, 20, 31, 33, 63, 64, 65, 66])
        m = max(1, round(n * generator.choice([0.5, 1, 1, 1, 1.9, 2, 2.1, 5])))
        shared = generator.choice([4, 20, 200, 2000])
        one, two = (" ".join(f"w{generator.randrange(shared)}" for _ in range(k)) for k in (n, m))
        assert (cleaning.fault(one, two) is None) == keeps(one, two)
        outcomes[cleaning.fault(one, two)] += 1
    assert set(outcomes) >= {None, "too few pieces", "length ratio", "too many pieces", "copied"}
    assert min(outcomes[reason] for reason in (None, "copied", "length ratio")) > 100


def test_dap_tidies():
    assert Cleaning.dap().tidy('a\tb "c"\x07d\x0be\x7f\x00') == "a b cde"
    assert Cleaning().tidy(' a "b"\x07 ') == 'a "b"\x07'


def test_ppas_filters():
    cleaning = Cleaning.ppa(str.split)
    assert cleaning.fault(words(9), words(10)) == "too few pieces"
    assert cleaning.fault(words(10), words(9)) == "too few pieces"
    assert cleaning.fault(words(10), words(118)) is None
    assert cleaning.fault(words(11), words(118)) == "too many pieces"


def test_pieces_need_a_tokenizer(tmp_path, tokenizer):
    path = tsv(tmp_path / "sw-en.tsv", [*many(3), ("a@b neno neno", "one two three"), ("a b c d", "e f g h")])
    with pytest.raises(ValueError, match="counts pieces: pass a tokenizer"):
        load_corpus(path, cleaning=Cleaning.dap())
    assert dropped(load_corpus(path, cleaning=Cleaning.dap().without_pieces())) == {"forbidden string": 1}
    assert dropped(load_corpus(path, cleaning=Cleaning.dap(), tokenizer=str.split))["too few pieces"] == 3
    assert load_corpus(path, cleaning=Cleaning(min_pieces=1), tokenizer=tokenizer).report.kept == 5


def test_limit_is_per_language(tmp_path):
    tsv(tmp_path / "a.sw-en.tsv", many(5))
    tsv(tmp_path / "b.sw-en.tsv", many(5, "kitu"))
    tsv(tmp_path / "te-en.tsv", many(3))
    for streaming in (False, True):
        corpus = load_corpus(tmp_path, limit=7, streaming=streaming)
        assert Counter(row["source_lang"] for row in corpus.dataset) == {"sw": 7, "te": 3}
    rows = [(*pair, "sw") for pair in many(5)]
    mixed = tsv(tmp_path / "mixed.tsv", rows, "source\ttarget\tsource_lang")
    assert dropped(load_corpus(mixed, limit=2)) == {"beyond the limit": 3}


# -------------------------------------------------------------------------------------------------------------- report


def test_the_report_adds_up(tmp_path):
    pairs = [*many(5), *many(2), ("", "x"), ("!", "!")]
    tsv(tmp_path / "sw-en.tsv", pairs)
    tsv(tmp_path / "te-en.tsv", many(4))
    report = load_corpus(tmp_path).report
    assert report.table() == [
        {"file": str(tmp_path / "sw-en.tsv"), "language": "sw", "read": 9, "kept": 5,
         "dropped": "duplicate 2, empty side 1, no words 1"},
        {"file": str(tmp_path / "te-en.tsv"), "language": "te", "read": 4, "kept": 4, "dropped": ""},
    ]  # fmt: skip
    facts = json.loads(json.dumps(report.to_dict()))
    assert (facts["read"], facts["kept"], facts["languages"]) == (13, 9, {"sw": 5, "te": 4})
    assert facts["files"][0]["examples"]["empty side"] == [f"{tmp_path / 'sw-en.tsv'}:9"]
    assert str(report).splitlines() == [
        "file       language  read  kept  dropped",
        "sw-en.tsv  sw           9     5  duplicate 2, empty side 1, no words 1",
        "te-en.tsv  te           4     4",
        "total                  13     9  duplicate 2, empty side 1, no words 1",
    ]


# ------------------------------------------------------------------------------------------------ mixing and streaming


@pytest.fixture
def two_languages(tmp_path) -> Path:
    tsv(tmp_path / "sw-en.tsv", many(800, "swa"))
    tsv(tmp_path / "te-en.tsv", many(100, "tel"))
    return tmp_path


def test_shares():
    sizes = {"a": 1, "b": 9, "c": 0}
    assert shares(sizes, 1) == {"a": 0.1, "b": 0.9}
    assert shares(sizes, 0) == {"a": 0.5, "b": 0.5}
    assert shares(sizes, 0.5) == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    # 800 ** 0.7 = 107.67 and 100 ** 0.7 = 25.12
    [(1, {"sw": 800, "te": 100}), (0, {"sw": 450, "te": 450}), (0.7, {"sw": 730, "te": 170})],
)
def test_temperature_resamples_at_the_same_size(two_languages, temperature, expected):
    corpus = load_corpus(two_languages, temperature=temperature)
    assert corpus.report.sampled == expected == Counter(corpus.dataset["source_lang"])
    times = Counter(pairs_of(corpus))
    assert {times[pair] for pair in many(100, "tel")} <= {expected["te"] // 100, expected["te"] // 100 + 1}
    assert max(times[pair] for pair in many(800, "swa")) == 1
    again = load_corpus(two_languages, temperature=temperature)
    assert pairs_of(again) == pairs_of(corpus)
    assert pairs_of(load_corpus(two_languages, temperature=temperature, seed=1)) != pairs_of(corpus)
    assert corpus.report.to_dict()["sampled"] == expected


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=50), st.sampled_from([0, 0.3, 0.7, 1]), st.integers(0, 9))
def test_a_mixture_has_the_size_of_the_corpus(languages, temperature, seed):
    mixture = mix(languages, temperature, seed)
    assert len(mixture) == len(languages)
    assert set(mixture) <= set(range(len(languages)))


@pytest.mark.parametrize("languages", [["sw"], ["sw", "te"]])
def test_a_stream_has_the_rows_of_the_data_set(two_languages, languages):
    stream = load_corpus(two_languages, languages=languages, streaming=True)
    rows = [tuple(row.values()) for row in stream.dataset]
    assert Counter(rows) == Counter(
        tuple(row.values()) for row in load_corpus(two_languages, languages=languages).dataset
    )
    assert [tuple(row.values()) for row in stream.dataset] == rows
    assert stream.report.languages == Counter(row[2] for row in rows)
    if len(languages) == 2:  # one language after the other would be no mixture
        assert 5 <= sum(row[2] == "te" for row in rows[:200]) <= 60


def test_streamed_temperature(two_languages):
    rows = [row["source_lang"] for row in load_corpus(two_languages, streaming=True, temperature=0).dataset]
    assert rows.count("sw") >= 800  # every language is read to its end
    assert 0.45 < rows.count("te") / len(rows) < 0.55
    path = tsv(two_languages / "mixed.tsv", [(*pair, "sw") for pair in PAIRS], "source\ttarget\tsource_lang")
    with pytest.raises(ValueError, match=r"the name of .*mixed\.tsv gives no language"):
        load_corpus(path, streaming=True, temperature=0.5)


@pytest.mark.parametrize(
    "make", [make_parquet, make_tmx, make_moses_prefix, make_jsonl], ids=lambda make: make.__name__
)
def test_streams_of_every_format_can_be_mixed(tmp_path, make):
    other = tsv(tmp_path / "te-en.tsv", many(6))
    corpus = load_corpus([make(tmp_path), other], streaming=True, temperature=0.3)
    assert {*PAIRS, *many(6)} == set(pairs_of(corpus))


def test_a_languages_files_are_shards(tmp_path):
    for i in range(3):
        tsv(tmp_path / f"part{i}.sw-en.tsv", many(4, f"n{i}"))
    dataset = load_corpus(tmp_path, streaming=True).dataset
    assert dataset.num_shards == 3
    parts = [[row["source"] for row in dataset.shard(3, i)] for i in range(3)]
    assert parts == [[s for s, _ in many(4, f"n{i}")] for i in range(3)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than there are CPUs
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("names", ["sw", "sw sw", "sw sw sw", "sw sw sw sw", "sw te", "sw sw te te"])
def test_processes_share_a_stream(tmp_path, names, workers):
    """Each of two processes makes its batches as training does; together they have every row, and none twice."""
    rows = []
    for at, language in enumerate(names.split()):
        rows += many(24, f"{language}{at}")
        tsv(tmp_path / f"part{at}.{language}-en.tsv", rows[-24:])
    shared = []
    for process in (0, 1):
        stream = load_corpus(tmp_path, streaming=True).dataset
        loader = DataLoader(stream, batch_size=4, drop_last=True, num_workers=workers, collate_fn=list)
        loader = prepare_data_loader(
            loader, num_processes=2, process_index=process, put_on_device=False, dispatch_batches=False
        )
        shared.append([[(row["source"], row["target"]) for row in batch] for batch in loader])
    assert all(len(batch) == 4 for batches in shared for batch in batches)
    assert min(map(len, shared)) >= 3
    assert Counter(pair for batches in shared for batch in batches for pair in batch) == Counter(rows)


def test_a_stream_resumes_exactly(two_languages):
    def stream():
        return load_corpus(two_languages, streaming=True, temperature=0.5).dataset

    first = stream()
    rows = list(first)
    again = stream()
    list(islice(again, 57))
    state = again.state_dict()
    rest = stream()
    rest.load_state_dict(state)
    assert list(rest) == rows[57:]


def test_a_stream_can_be_shuffled_and_read_by_epochs(two_languages):
    dataset = load_corpus(two_languages, streaming=True).dataset.shuffle(seed=1, buffer_size=100)
    first = list(dataset)
    assert list(dataset) == first
    dataset.set_epoch(1)
    assert list(dataset) != first
    assert Counter(row["source"] for row in dataset) == Counter(row["source"] for row in first)


def test_streams_keep_duplicates_unless_told(tmp_path):
    path = tsv(tmp_path / "sw-en.tsv", [*PAIRS, *PAIRS])
    assert pairs_of(load_corpus(path, streaming=True)) == [*PAIRS, *PAIRS]
    assert pairs_of(load_corpus(path, streaming=True, cleaning=Cleaning(duplicates=True))) == PAIRS


@pytest.mark.parametrize("streaming", [False, True])
def test_sentence_transformers_trains_on_it(tmp_path, tiny_encoder, two_languages, streaming):
    dataset = load_corpus(two_languages, streaming=streaming).dataset.select_columns(["source", "target"])
    assert dataset.column_names == ["source", "target"]
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(tiny_encoder)
    SentenceTransformerTrainer(tiny_encoder, arguments, train_dataset=dataset, loss=loss).train()


def test_the_demo_bitext():
    corpus = load_corpus(DEMO)
    assert corpus.report.languages == dict.fromkeys(["et", "fi", "ml", "sw", "te", "th", "tl", "vi"], 3000)
    assert not corpus.report.dropped
    for split in ("dev", "test"):
        for path in DEMO.glob(f"*.{split}.tsv.gz"):
            assert len(read_parallel(path)) > 80
    assert (
        overlap(load_corpus(DEMO, languages=["sw"]).dataset, load_corpus(DEMO, languages=["sw"], split="dev").dataset)
        == 0
    )


# ------------------------------------------------------------------------------------------------------------- leakage


def test_overlap(tmp_path, fault):
    train = load_corpus(tsv(tmp_path / "sw-en.tsv")).dataset
    test = [
        {"source": "HABARI  ya\u00a0asubuhi", "target": "Something else"},
        {"source": "Kitu kingine", "target": "Ｔhank you very much"},
        {"source": "Thank you very much", "target": "Asante sana"},  # on the other sides
        {"source": "Mbwa", "target": "Dog"},
    ]
    assert overlap(train, test) == 2
    assert overlap(train, train) == 3
    assert overlap(load_corpus(tmp_path, streaming=True).dataset, test) == 2
    fault("C7", "test sentences in the training corpus, counted", tried=2, survived=overlap(train, test))
