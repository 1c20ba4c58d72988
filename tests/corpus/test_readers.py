import json
import math
import re
import subprocess
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset

from metaphrase.corpus import Cleaning, load_corpus
from metaphrase.corpus.files import find_files
from metaphrase.corpus.rows import COLUMNS
from metaphrase.corpus.writing import write_corpus
from metaphrase.exceptions import CorpusError, UsageError
from tests.corpus.samples import (
    FORMATS,
    PAIRS,
    dropped,
    languages_of,
    make_folder,
    make_tsv,
    many,
    moses,
    pairs_of,
    tsv,
    write,
)


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__.removeprefix("make_"))
def test_every_format_gives_the_same_rows(tmp_path, make, streaming):
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
        "segmenter",
        "source_bt",
        "target_bt",
    ]
    rows = [
        ("maji moto", "hot water", "sw", "en", "0-1 1-0", "0.9 0.5", "icu", "maji ya moto ||| maji", "warm water"),
        ("the cat", "paka huyo", "en", "sw", "1-0 0-1", "1e-3 1", "icu-target", "a cat", "paka"),
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
        "segmenter": "icu-source",
        "source_bt": "paka",
        "target_bt": "a cat",
    }


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet"])
def test_every_format_carries_the_optional_columns(tmp_path, kind, streaming):
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
        name = write(folder / "zh-en.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
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
        ("0-0", "1 1", "icu", "alignment_scores has 2 scores for 1 links"),
        ("0-0", "high", "icu", "alignment_scores has 'high', which is not a finite number"),
        ("0-0", "nan", "icu", "alignment_scores has 'nan', which is not a finite number"),
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
    ("record", "detail"),
    [
        ({"source": 3}, "source is 3"),
        ({"source_lang": math.nan}, "source_lang is nan"),
        ({"source_bt": ["paka"]}, "source_bt is ['paka']"),
        ({"target_bt": "\ud800"}, "lone surrogate"),
        ({"alignment": "0-0", "alignment_scores": [1.0]}, "alignment_scores is [1.0]"),
        ({"alignment": math.nan}, "alignment is nan"),
        ({"alignment": "0-0", "segmenter": 1}, "segmenter is 1"),
    ],
)
def test_columns_that_hold_no_text(tmp_path, record, detail):
    rows = [{"source": "paka", "target": "cat"} | record, {"source": "mbwa", "target": "dog"}]
    corpus = load_corpus(write(tmp_path / "sw-en.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert dropped(corpus) == {"not text": 1}
    (example,) = next(iter(corpus.report.counts.values())).examples["not text"]
    assert example == f"{tmp_path}/sw-en.jsonl:1 ({detail})"


def test_scores_and_segmenters_without_links_are_left_out(tmp_path):
    rows = [{"source": "paka", "target": "cat", "alignment_scores": "1", "segmenter": "icu"}]
    corpus = load_corpus(write(tmp_path / "sw-en.jsonl", json.dumps(rows[0]) + "\n"))
    assert corpus.dataset.column_names == list(COLUMNS)


def test_tmx_takes_the_languages_it_is_asked_for(tmp_path):
    unit = "<tu>" + "".join(
        f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>'
        for code, text in [("en", "a <ph>{0}</ph><ut>{b}</ut>word\nhere"), ("sw", "neno"), ("te", "పదం")]
    )  # fmt: skip
    alone = '<tu><tuv xml:lang="fr"><seg>mot</seg></tuv></tu>'
    path = write(tmp_path / "all.tmx", f"<tmx><body>{unit}</tu>{alone}</body></tmx>")
    corpus = load_corpus(path)
    assert [tuple(row.values()) for row in corpus.dataset] == [
        ("neno", "a word here", "sw", "en"), ("పదం", "a word here", "te", "en"),
    ]  # fmt: skip
    assert dropped(corpus) == {"other languages": 1}
    for languages in (["te"], "te"):
        assert pairs_of(load_corpus(path, languages=languages)) == [("పదం", "a word here")]


def test_another_language_can_be_the_target(tmp_path):
    path = tsv(tmp_path / "fr-de.tsv", [("le chat", "die Katze")])
    assert list(load_corpus(path, target_lang="fr").dataset) == [
        {"source": "die Katze", "target": "le chat", "source_lang": "de", "target_lang": "fr"}
    ]


@pytest.mark.parametrize(
    ("name", "language"),
    [("ccmatrix.sw-en.tsv", "sw"), ("en-zh_CN.tsv", "zh"), ("SW-EN.tsv", "sw"), ("zh-Hant-en.tsv", "zh"), ("sw-en.my-own.train.tsv.gz", "sw"),
     ("web_sw-en.tsv", "sw"), ("my_sw-en.tsv", "sw"), ("pt_br-en.tsv", "pt"), ("xx_Latn-en.tsv", "xx"),
     ("zh_Hant_TW-en.tsv", "zh"), ("x.en-zh-Hant-TW.tsv", "zh"), ("sr_latn_rs-en.tsv", "sr"), ("es-419-en.tsv", "es"),
     ("web_es_419-en.tsv", "es"), ("corpus.en-GB.tsv", None), ("the-end.tsv", None), ("de-fr.tsv", None), ("corpus.tsv", None)],
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


def test_the_target_language_is_not_among_several_languages(tmp_path):
    path = tsv(tmp_path / "corpus.tsv")
    with pytest.raises(UsageError, match=r"the languages besides the target language, en\. Omit en\."):
        load_corpus(path, languages=["sw", "en"])


def test_arguments_may_not_contradict_the_name(tmp_path):
    path = tsv(tmp_path / "sw-en.tsv")
    with pytest.raises(ValueError, match="states the language 'sw', but source_lang is 'te'"):
        load_corpus(path, source_lang="te")
    with pytest.raises(FileNotFoundError, match=r"no pairs for te\. Its languages: sw"):
        load_corpus(path, languages=["te"])


def test_a_name_with_two_other_languages_is_reported(tmp_path, caplog):
    for name in ("sw-fr.tsv", "my-set.tsv", "sw-en.tsv"):
        load_corpus(tsv(tmp_path / name), languages=["sw"])
    (record,) = caplog.records
    assert re.search(r"sw-fr\.tsv are read as en, although its name states sw-fr", record.getMessage())


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


@pytest.mark.parametrize("languages", [["sw", "fr"], ["fr"]])
def test_a_default_language_does_not_hide_those_of_the_columns(tmp_path, languages):
    rows = [{"source": "neno", "target": "word"}, {"source": "mot", "target": "a word", "source_lang": "fr"}]
    write(tmp_path / "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    corpus = load_corpus(tmp_path / "pairs.jsonl", source_lang="sw", languages=languages)
    assert corpus.report.languages == dict.fromkeys(languages, 1)


@pytest.fixture
def late(tmp_path):
    """150 pairs of a file in Swahili, and some in French and with links after them."""
    rows = [{"source": f"neno {at}", "target": f"word {at}"} for at in range(150)]
    rows += [
        {"source": f"mot {at}", "target": f"a word {at}", "SOURCE_LANG": "fr", "alignment": "0-0"} for at in range(3)
    ]
    return write(tmp_path / "sw-en.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def test_a_language_that_only_later_json_lines_state_is_read(late):
    assert load_corpus(late, limit=2).report.languages == {"sw": 2, "fr": 2}
    unnamed = late.rename(late.with_name("pairs.jsonl"))
    for languages in (["sw", "fr"], ["fr"]):
        found = load_corpus(unnamed, source_lang="sw", languages=languages).report.languages
        assert found == {code: {"sw": 150, "fr": 3}[code] for code in languages}


def test_a_stream_has_what_only_later_json_lines_state(late, tmp_path):
    whole, stream = (load_corpus(tmp_path, cleaning=None, streaming=streaming).dataset for streaming in (False, True))
    assert stream.features == whole.features
    assert list(stream) == list(whole)
    write(tmp_path / "fr-en.tsv", "".join(f"autre mot {at}\tword {at}\n" for at in range(3)))
    stream = load_corpus(tmp_path, limit=2, streaming=True).dataset
    assert Counter(row["source_lang"] for row in stream) == {"sw": 2, "fr": 2}
    with pytest.raises(CorpusError, match=r"sw-en\.jsonl has rows in other languages"):
        load_corpus(tmp_path, limit=2, temperature=0.5, streaming=True)


@pytest.mark.parametrize("kind", ["jsonl", "tsv"])
@pytest.mark.parametrize("last", ["sw", "fr"])
def test_languages_that_a_stream_states_late_count_against_the_limit(tmp_path, kind, last):
    rows = [(f"neno {at}", f"word {at}", "sw" if at < 150 else last) for at in range(153)]
    rows = [("source", "target", "source_lang"), *rows]
    lines = ["\t".join(row) if kind == "tsv" else json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows]
    write(tmp_path / f"sw-en.{kind}", "".join(f"{line}\n" for line in lines[kind == "jsonl" :]))
    write(tmp_path / "fr-en.tsv", "".join(f"mot {at}\ta word {at}\n" for at in range(3)))
    stream = load_corpus(tmp_path, limit=2, streaming=True)
    assert Counter(row["source_lang"] for row in stream.dataset) == {"sw": 2, "fr": 2}
    assert {file["language"] for file in stream.files} == {"fr", "sw" if last == "sw" else "sw, fr"}
    if last == "sw":  # which is the language of the file
        load_corpus(tmp_path, limit=2, temperature=0.5, streaming=True)


def test_a_stream_has_no_column_that_is_always_null_and_reads_long_lines(tmp_path):
    rows = [{"source": "neno", "target": "word", "negatives": None, "source_bt": None}] * 120
    long = {"source": "neno " * 30_000, "target": "word " * 30_000, "alignment": "0-0"}
    write(tmp_path / "sw-en.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, long]))
    corpora = [load_corpus(tmp_path, cleaning=None, max_chars=200_000, streaming=one) for one in (False, True)]
    whole, stream = (corpus.dataset for corpus in corpora)
    assert stream.features == whole.features
    assert list(stream) == list(whole)


def test_a_language_that_no_column_can_state_is_missing_before_anything_is_read(tmp_path):
    write(tmp_path / "pairs.tsv", "source\ttarget\nneno\tword\n")
    with pytest.raises(FileNotFoundError, match=r"no pairs for fr\. Its languages: sw"):
        find_files(tmp_path / "pairs.tsv", source_lang="sw", languages=["sw", "fr"])


def test_splits_of_a_folder(tmp_path):
    make_folder(tmp_path)
    tsv(tmp_path / "te-en.tsv", many(7))
    assert load_corpus(tmp_path).report.languages == {"sw": 3, "te": 7}
    assert load_corpus(tmp_path, split="dev").report.languages == {"sw": 5, "te": 7}
    (tmp_path / "te-en.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"xx-en\[\.test\].*Its splits are: dev, train"):
        load_corpus(tmp_path, split="test")


def test_a_folder_names_the_files_that_it_does_not_read(tmp_path, caplog):
    for name in ("sw-en.train.TSV", "opus.sw-en.tsv", "te-en.tsv", "sw-en.dev.tsv"):
        tsv(tmp_path / name, many(2, name))
    load_corpus(tmp_path, split="dev")
    assert not caplog.records
    assert load_corpus(tmp_path).report.languages == {"sw": 2, "te": 2}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} has files of the split train, so these are not read: {tmp_path}/opus.sw-en.tsv."
    ]


@pytest.mark.parametrize("name", ["sw-en.{}", "{}.sw-en", "news.sw-en.{}.v2"])
def test_splits_are_told_apart_whatever_their_names(tmp_path, name):
    for split in ("train", "validation", "test", "devtest", "extra"):
        tsv(tmp_path / f"{name.format(split)}.tsv", [(split, "word")])
    for split in ("validation", "test", "extra"):
        assert pairs_of(load_corpus(tmp_path, split=split)) == [(split, "word")]
    (tmp_path / f"{name.format('extra')}.tsv").unlink()
    assert pairs_of(load_corpus(tmp_path)) == [("train", "word")]


def test_validation_pairs_are_dev_pairs(tmp_path):
    """Otherwise the training pairs, whose file has no split, would be the dev pairs."""
    tsv(tmp_path / "sw-en.tsv", [("paka", "cat")])
    tsv(tmp_path / "sw-en.validation.tsv", [("mbwa", "dog")])
    for split in ("dev", "valid", "validation"):
        assert pairs_of(load_corpus(tmp_path, split=split)) == [("mbwa", "dog")]
    tsv(tmp_path / "sw-en.dev.tsv", [("maji", "water")])
    assert pairs_of(load_corpus(tmp_path, split="dev")) == [("maji", "water")]


def test_a_suffix_of_a_moses_pair_that_is_also_a_code(tmp_path):
    """src is Sardinian in ISO 639-3."""
    for suffix, text in ("src", "paka\n"), ("en", "cat\n"):
        (tmp_path / f"train.{suffix}").write_text(text)
    corpus = load_corpus(f"{tmp_path}/train.src,{tmp_path}/train.en", languages=["sw"])
    assert corpus.dataset["source_lang"][:] == ["sw"]


@pytest.mark.parametrize("code", ["zh-Hans", "pt-BR", "zh-Hant-TW", "es-419"])
def test_codes_with_a_hyphen(tmp_path, code):
    language = code[:2]
    rows = "".join(json.dumps({"translation": {code: source, "en": target}}) + "\n" for source, target in PAIRS)
    for side, suffix in enumerate((code, "en")):
        write(tmp_path / f"x.{suffix}", "".join(f"{pair[side]}\n" for pair in PAIRS))
    write(tmp_path / f"x.{language}-en", "another file\n")
    table, lines = tsv(tmp_path / "x.tsv", header=f"{code}\ten"), write(tmp_path / "x.jsonl", rows)
    for path in (table, lines, f"{tmp_path}/x.{code},{tmp_path}/x.en", tmp_path / "x"):
        corpus = load_corpus(path)
        assert pairs_of(corpus) == PAIRS
        assert languages_of(corpus) == {(language, "en")}


def test_a_moses_folder_with_ids_beside_it(tmp_path):
    moses(tmp_path, "Bible.en-sw")
    write(tmp_path / "Bible.en-sw.ids", "1\n")
    assert pairs_of(load_corpus(tmp_path)) == PAIRS
    assert pairs_of(load_corpus(tmp_path / "Bible.en-sw")) == PAIRS


@pytest.mark.parametrize("path", ["nothing.tsv", "europarl.sw-en", "a.sw,a.en", "x.{sw,en}"])
def test_missing_files(tmp_path, path):
    with pytest.raises(FileNotFoundError, match=path.split(".")[0]):
        load_corpus(tmp_path / path)


@pytest.mark.parametrize("folder", ["x{1,2}", "x,y"])
def test_folders_whose_names_look_like_moses_pairs(tmp_path, folder):
    (tmp_path / folder).mkdir()
    assert pairs_of(load_corpus(tsv(tmp_path / folder / "sw-en.tsv"))) == PAIRS


def test_unknown_formats_and_names(tmp_path):
    with pytest.raises(ValueError, match=r"sw-en\.xlsx is unknown\. Supported formats: \.tsv, \.csv, \.jsonl"):
        load_corpus(write(tmp_path / "sw-en.xlsx", "x"))
    with pytest.raises(ValueError, match="is not the name of a Hub data set"):
        load_corpus("hf:")
    with pytest.raises(FileNotFoundError, match="name of a corpus is empty"):
        load_corpus("")
    with pytest.raises(FileNotFoundError, match="has no parallel files"):
        load_corpus(tmp_path)


def test_shards_of_a_folder_are_read_or_named(tmp_path, caplog):
    columns = dict(zip(("source", "target"), zip(*PAIRS, strict=True), strict=True))
    pq.write_table(pa.table(columns), tmp_path / "other.parquet")
    with pytest.raises(
        FileNotFoundError, match="no Parquet files with pairs and the columns source_lang and target_lang"
    ):
        load_corpus(tmp_path)
    columns |= {name: [code] * len(PAIRS) for name, code in (("source_lang", "sw"), ("target_lang", "en"))}
    pq.write_table(pa.table(columns), tmp_path / "news.parquet")
    pq.write_table(pa.table(columns)[:0], tmp_path / "none_above_the_threshold.parquet")
    assert pairs_of(load_corpus(tmp_path, cleaning=None)) == PAIRS
    assert not caplog.messages
    write(tmp_path / "torn.parquet", (tmp_path / "news.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"torn\.parquet cannot be read as Parquet"):
        load_corpus(tmp_path)
    (tmp_path / "torn.parquet").unlink()
    tsv(tmp_path / "sw-en.tsv")
    assert pairs_of(load_corpus(tmp_path, cleaning=None)) == PAIRS
    assert any(re.match(r"Skipped: .*news\.parquet\. Other files", message) for message in caplog.messages)


def test_shards_of_other_splits_are_not_read(tmp_path):
    for split in ("train", "test"):
        columns = {"source": split, "target": "word", "source_lang": "sw", "target_lang": "en"}
        for name in ("0-of-2", "00001-of-00002"):
            pq.write_table(pa.Table.from_pylist([columns]), tmp_path / f"{split}-{name}.parquet")
    assert pairs_of(load_corpus(tmp_path, cleaning=None)) == [("train", "word")] * 2
    assert pairs_of(load_corpus(tmp_path, cleaning=None, split="test")) == [("test", "word")] * 2
    with pytest.raises(FileNotFoundError, match="Its splits are: test, train"):
        load_corpus(tmp_path, split="dev")


def test_hidden_files_of_a_folder_are_not_read(tmp_path):
    """Those of other systems, editors and unfinished copies."""
    tsv(tmp_path / "sw-en.tsv")
    write(tmp_path / "._sw-en.tsv", b"\x00\x05\x16\x07" + bytes(100))
    tsv(tmp_path / ".sw-en.tsv")
    assert pairs_of(load_corpus(tmp_path, cleaning=None)) == PAIRS


def test_numbers_are_written_and_lists_only_where_they_fit(tmp_path):
    rows = Dataset.from_list([{"source": "paka", "target": "cat", "score": 0.0, "origin": None}])
    assert write_corpus(rows, tmp_path / "a.tsv").read_text().splitlines()[1] == "paka\tcat\t0.0\t"
    lists = rows.add_column("monolingual", [["mbwa"]])
    with pytest.raises(CorpusError, match="cannot hold the lists of the column 'monolingual'"):
        write_corpus(lists, tmp_path / "b.tsv")
    assert write_corpus(lists, tmp_path / "b.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "b.jsonl"]
