"""CSV, columns of any name, and data sets in memory."""

import json

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from metaphrase import load_corpus
from metaphrase.cli import main
from metaphrase.exceptions import CorpusError, MissingFileError, UsageError
from tests.corpus.samples import PAIRS, dropped, languages_of, pairs_of, tsv, write
from tests.corpus.samples import moses as moses_pair

CSV = {
    "plain": "source,target\n" + "".join(f"{source},{target}\n" for source, target in PAIRS),
    "quoted": '"source","target"\n' + "".join(f'"{source}","{target}"\n' for source, target in PAIRS),
    "semicolons": "sw;en\n" + "".join(f"{source};{target}\n" for source, target in PAIRS),
    "a delimiter for Excel": "sep=|\nsw|en\n" + "".join(f"{source}|{target}\n" for source, target in PAIRS),
    "carriage returns": "source,target\r\n" + "".join(f"{source},{target}\r\n" for source, target in PAIRS),
    "byte order mark": "\ufeffsource,target\n" + "".join(f"{source},{target}\n" for source, target in PAIRS),
    "no header": "".join(f"{source},{target}\n" for source, target in PAIRS),
    "no header, semicolons": "".join(f"{source};{target}\n" for source, target in PAIRS),
    "more columns": "id,target,source\n" + "".join(f"{at},{t},{s}\n" for at, (s, t) in enumerate(PAIRS)),
}


@pytest.mark.parametrize("kind", CSV)
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_csv(tmp_path, kind, suffix):
    corpus = load_corpus(write(tmp_path / f"sw-en.{suffix}", CSV[kind]))
    assert pairs_of(corpus) == PAIRS
    assert languages_of(corpus) == {("sw", "en")}


def test_a_comma_in_the_first_line_does_not_hide_other_delimiters(tmp_path):
    pairs = [("Haya, twende", "Let us go"), *PAIRS]
    path = write(tmp_path / "sw-en.csv", "".join(f"{source};{target}\n" for source, target in pairs))
    assert pairs_of(load_corpus(path)) == pairs


def test_a_first_line_that_may_be_a_header_is_reported(tmp_path, caplog):
    for name, first in {"x": ("anchor", "positive"), "y": ("Habari ya asubuhi", "Hello")}.items():
        load_corpus(write(tmp_path / f"{name}.sw-en.csv", f"{','.join(first)}\nAsante,Thanks\n"), streaming=True)
    (record,) = caplog.records
    assert "x.sw-en.csv:1 is read as a pair: 'anchor', 'positive'. If it is a header" in record.getMessage()


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_columns_without_a_name_at_the_end_of_lines_are_not_read(tmp_path, kind):
    rows = [("source", "target", "", ""), ("Habari", "Hello", "", "")]
    text = "".join(("," if kind == "csv" else "\t").join(row) + "\r\n" for row in rows)
    assert pairs_of(load_corpus(write(tmp_path / f"sw-en.{kind}", text))) == [("Habari", "Hello")]


def table(path, *rows):
    """A file of rows, the first of which has the names of the columns."""
    if path.suffix == ".csv":
        return write(path, "".join(",".join(row) + "\n" for row in rows))
    records = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    if path.suffix == ".parquet":
        Dataset.from_list(records).to_parquet(path)
        return path
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_other_columns_may_look_like_codes_of_languages(tmp_path, kind):
    idx = table(tmp_path / f"idx.{kind}", ("idx", "sw", "en"), ("1", "Habari", "Hello"))
    assert pairs_of(load_corpus(idx)) == [("Habari", "Hello")]
    url = table(tmp_path / f"url.{kind}", ("sw", "en", "url"), ("Asante", "Thanks", "x.org"))
    assert pairs_of(load_corpus([idx, url], languages=["sw"])) == [("Habari", "Hello"), ("Asante", "Thanks")]
    telugu = table(tmp_path / f"te.{kind}", ("te", "en", "url"), ("gurram", "horse", "x.org"))
    assert pairs_of(load_corpus([url, telugu], languages=["sw", "te"])) == [("Asante", "Thanks"), ("gurram", "horse")]
    with pytest.raises(CorpusError, match=r"several columns may be paired with 'en': 'sw', 'url'\. Choose one"):
        load_corpus(url)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_column_named_id_is_indonesian_only_alone_or_if_chosen(tmp_path, kind):
    key = table(tmp_path / f"key.{kind}", ("id", "sw", "en"), ("1", "Habari", "Hello"))
    assert pairs_of(load_corpus(key)) == [("Habari", "Hello")]
    named = table(tmp_path / f"named.{kind}", ("id", "swahili", "english"), ("1", "Habari", "Hello"))
    with pytest.raises(CorpusError, match=r"no columns 'source' and 'target' .*; found 'id', 'swahili', 'english'"):
        load_corpus(named)
    scored = table(tmp_path / f"scored.{kind}", ("id", "en", "score"), ("Selamat", "Hello", "x"))
    assert pairs_of(load_corpus(scored, languages=["id"])) == [("Selamat", "Hello")]
    alone = table(tmp_path / f"alone.{kind}", ("id", "en"), ("Selamat", "Hello"))
    assert pairs_of(load_corpus(alone)) == [("Selamat", "Hello")]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_several_languages_in_a_row_have_to_be_read_one_at_a_time(tmp_path, kind):
    path = table(tmp_path / f"x.{kind}", ("en", "fr", "sw"), ("horse", "cheval", "farasi"))
    assert pairs_of(load_corpus(path, languages=["fr"])) == [("cheval", "horse")]
    with pytest.raises(CorpusError, match=r"several columns may be paired with 'en': 'fr', 'sw'\. Choose one"):
        load_corpus(path, languages=["sw", "fr"])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("names", [("src_lang", "tgt_lang"), ("source_language", "target_language")])
def test_usual_names_of_the_columns_of_languages(tmp_path, names, kind, streaming):
    path = table(tmp_path / f"x.{kind}", ("src", "tgt", *names), ("Hello", "Habari", "en", "sw"))
    corpus = load_corpus(path, languages=["sw"], streaming=streaming)
    assert pairs_of(corpus) == [("Habari", "Hello")]
    assert languages_of(corpus) == {("sw", "en")}


def test_languages_may_be_named_in_english(tmp_path):
    rows = [("Hujambo", "Hello", "swahili", "English"), ("Thanks", "Asante", "english", "Swahili")]
    lines = ["source,target,source_lang,target_lang", *map(",".join, rows)]
    corpus = load_corpus(write(tmp_path / "x.csv", "\n".join(lines) + "\n"))
    assert pairs_of(corpus) == [("Hujambo", "Hello"), ("Asante", "Thanks")]
    assert languages_of(corpus) == {("sw", "en")}


def test_quoted_values_may_have_delimiters_quotation_marks_and_line_feeds(tmp_path):
    path = write(tmp_path / "sw-en.csv", 'source,target\n"Habari, ""wewe""\nhapa",Hello there\nAsante,Thanks\n')
    corpus = load_corpus(path, cleaning=None)
    assert pairs_of(corpus) == [('Habari, "wewe"\nhapa', "Hello there"), ("Asante", "Thanks")]


def test_unusable_records_are_counted_with_their_line(tmp_path):
    lines = [
        "source,target",
        *[f"neno {at},word {at}" for at in range(5)],
        "a,b,c",
        '"say" it,x',
        "Asante,Thanks",
        '"open,end',
    ]
    corpus = load_corpus(write(tmp_path / "sw-en.csv", "\n".join(lines) + "\n"))
    assert len(corpus.dataset) == 6
    assert set(dropped(corpus)) == {"wrong number of columns", "not CSV", "unclosed quotation mark"}
    assert "sw-en.csv:10" in str(
        corpus.report.of(str(tmp_path / "sw-en.csv"), "sw").examples["unclosed quotation mark"]
    )


def test_a_stray_quotation_mark_takes_no_other_pair_along(tmp_path):
    good = [f"neno {at},word {at}" for at in range(3000)]
    inches = [line if at % 50 else f'skrini ya 5" {at},5" screen' for at, line in enumerate(good)]
    corpus = load_corpus(write(tmp_path / "sw-en.csv", "\n".join(["source,target", *inches]) + "\n"))
    assert pairs_of(corpus)[:2] == [('skrini ya 5" 0', '5" screen'), ("neno 1", "word 1")]
    assert len(corpus.dataset) == 3000
    opened = [line if at != 7 else '"neno,word' for at, line in enumerate(good)]
    corpus = load_corpus(write(tmp_path / "sw-en.csv", "\n".join(["source,target", *opened]) + "\n"))
    assert (len(corpus.dataset), dropped(corpus)) == (2999, {"unclosed quotation mark": 1})


def test_every_line_of_an_unusable_record_is_counted(tmp_path):
    broken = ['"neno', *[f"neno {at},word {at}" for at in range(1500)], 'mwisho" x,end']
    path = write(tmp_path / "sw-en.csv", "\n".join(["source,target", "a,b", *broken]) + "\n")
    with pytest.raises(CorpusError, match="999 of the first 1000 lines are unreadable"):
        load_corpus(path)


def test_a_csv_without_the_columns_is_refused(tmp_path):
    with pytest.raises(
        CorpusError,
        match=r"x\.csv:1: a CSV without a header has two columns.*'source,target,source_lang'.*--source_column",
    ):
        load_corpus(write(tmp_path / "x.csv", "id,swahili,english text\n1,a,b\n"), source_lang="sw")


ROWS = [{"id": at, "anchor": target, "positive": source} for at, (source, target) in enumerate(PAIRS)]


def write_rows(folder, kind):
    """The rows with English as `anchor`, as a corpus of some kind."""
    dataset = Dataset.from_list(ROWS)
    path = folder / f"pairs.{kind}"
    if kind == "jsonl":
        return write(path, "".join(json.dumps(row) + "\n" for row in ROWS))
    if kind == "parquet":
        dataset.to_parquet(path)
    elif kind == "csv":
        dataset.to_csv(path)
    elif kind == "tsv":
        dataset.to_csv(path, sep="\t")
    return dataset if kind == "dataset" else path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "dataset"])
def test_columns_of_any_name(tmp_path, kind):
    corpus = write_rows(tmp_path, kind)
    loaded = load_corpus(corpus, source_lang="sw", source_column="positive", target_column="anchor")
    assert pairs_of(loaded) == PAIRS
    assert languages_of(loaded) == {("sw", "en")}
    with pytest.raises(CorpusError, match="no columns 'positive' and 'ancor'; found 'id', 'anchor', 'positive'"):
        load_corpus(corpus, source_lang="sw", source_column="positive", target_column="ancor")


def test_translations_of_a_data_set_in_memory(tmp_path):
    rows = [{"id": "1", "translation": {"sw": source, "en": target}} for source, target in PAIRS]
    Dataset.from_list(rows).to_parquet(tmp_path / "pairs.parquet")
    assert pairs_of(load_corpus(tmp_path / "pairs.parquet")) == PAIRS
    assert pairs_of(load_corpus(Dataset.from_list(rows))) == PAIRS
    assert pairs_of(load_corpus([Dataset.from_list(rows[:2]), Dataset.from_list(rows[2:])])) == PAIRS
    with pytest.raises(UsageError, match="neither streamed nor stored"):
        load_corpus(Dataset.from_list(rows), streaming=True)


@pytest.mark.parametrize("kind", ["arrow", "numpy", "pandas", "torch"])
def test_a_data_set_may_have_any_format(kind):
    rows = [{"source": source, "target": target, "negatives": ["x", "y"]} for source, target in PAIRS]
    corpus = load_corpus(Dataset.from_list(rows).with_format(kind), languages=["sw"])
    assert pairs_of(corpus) == PAIRS
    assert corpus.dataset["negatives"][0] == "x ||| y"


def test_a_transform_of_a_data_set_is_applied():
    dataset = Dataset.from_dict({"source": ["paka"], "target": ["cat"]})
    dataset = dataset.with_transform(lambda batch: {name: [text.upper() for text in batch[name]] for name in batch})
    assert pairs_of(load_corpus(dataset, languages=["sw"])) == [("PAKA", "CAT")]


def test_a_saved_data_set_is_refused_with_the_way_to_load_it(tmp_path):
    dataset = Dataset.from_dict({"source": ["paka"], "target": ["cat"]})
    dataset.save_to_disk(tmp_path / "one")
    DatasetDict(train=dataset).save_to_disk(tmp_path / "splits")
    for name in ("one", "splits"):
        with pytest.raises(MissingFileError, match=r"a saved data set: in Python, pass datasets\.load_from_disk"):
            load_corpus(tmp_path / name, languages=["sw"])


@pytest.mark.parametrize("kind", [DatasetDict, IterableDataset])
def test_what_is_no_corpus_is_refused(kind):
    dataset = Dataset.from_list([{"source": "paka", "target": "cat"}])
    other = DatasetDict(train=dataset) if kind is DatasetDict else dataset.to_iterable_dataset()
    for corpus in (other, [other]):
        with pytest.raises(UsageError, match=f"or a list of them, not a {kind.__name__}"):
            load_corpus(corpus, languages=["sw"])
    with pytest.raises(UsageError, match="The corpus is an empty list"):
        load_corpus([])


def test_columns_of_later_lines_are_read(tmp_path):
    path = write(
        tmp_path / "sw-en.jsonl",
        '{"source": "paka", "target": "cat"}\n{"Source": "mbwa", "target": "dog", "negative": ["fox", "wolf"]}\n',
    )
    assert load_corpus(path).dataset["negatives"] == ["", "fox ||| wolf"]


@pytest.mark.parametrize("languages", [["te"], ["te", "ne"]])
def test_json_lines_in_other_languages_are_skipped(tmp_path, languages):
    records = [{code: f"{code} {at}", "en": f"word {at}"} for at in range(400) for code in ("te", "sw", "ne")]
    path = write(tmp_path / "mixed.jsonl", "\n".join(map(json.dumps, records)) + "\n")
    corpus = load_corpus(path, languages=languages)
    assert languages_of(corpus) == {(code, "en") for code in languages}
    assert len(corpus.dataset) == 400 * len(languages)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_in_another_language_than_the_chosen_ones_is_skipped(tmp_path, streaming):
    files = [table(tmp_path / f"{at}.csv", (code, "en"), ("neno", "word")) for at, code in enumerate(("te", "sw"))]
    corpus = load_corpus(files, languages=["te", "ne"], streaming=True) if streaming else None
    if streaming:
        assert languages_of(corpus) == {("te", "en")}
    else:
        with pytest.raises(CorpusError, match="No pair was kept for ne"):
            load_corpus(files, languages=["te", "ne"])


def test_columns_that_no_file_has_are_refused(tmp_path):
    named = {"source_column": "anchr", "target_column": "positve"}
    with pytest.raises(CorpusError, match=r"no columns 'anchr' and 'positve'; found 'source', 'target'"):
        load_corpus(tsv(tmp_path / "sw-en.tsv"), languages=["sw"], **named)
    with pytest.raises(UsageError, match="moses files have no columns"):
        load_corpus(moses_pair(tmp_path), languages=["sw"], **named)


def test_a_pair_in_capitals_is_no_locale(tmp_path):
    assert languages_of(load_corpus(tsv(tmp_path / "sw-EN.tsv"))) == {("sw", "en")}


def test_files_without_the_columns_may_have_others(tmp_path):
    other, moses = tsv(tmp_path / "sw-en.tsv", PAIRS[:1]), moses_pair(tmp_path, pairs=PAIRS[1:2])
    columns = table(tmp_path / "x.csv", ("anchor", "positive"), PAIRS[2])
    files = [other, moses, columns]
    assert pairs_of(load_corpus(files, languages=["sw"], source_column="anchor", target_column="positive")) == PAIRS


def test_one_column_alone_and_a_column_for_both_sides_are_refused(tmp_path):
    path = write_rows(tmp_path, "csv")
    with pytest.raises(UsageError, match="both sides: source_column and target_column"):
        load_corpus(path, source_column="positive")
    with pytest.raises(UsageError, match="The column 'positive' cannot be both sides"):
        load_corpus(path, source_column="positive", target_column="positive")


COLUMNS = ["--source_column", "positive", "--target_column", "anchor"]


def test_every_command_takes_columns(tmp_path, tiny_encoder_dir, capsys):
    path = str(write_rows(tmp_path, "csv"))
    assert main(["diagnose", "--corpus", path, "--languages", "sw", *COLUMNS, "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["pairs"] == {"sw": 3}
    encoder, output = str(tiny_encoder_dir), str(tmp_path / "good.tsv")
    words = ["filter", path, "-o", output, "--model", encoder, "--source_lang", "sw", "--threshold", "0", "--k", "1"]
    assert main([*words, *COLUMNS]) == 0
    assert (tmp_path / "good.tsv").read_text(encoding="utf-8").splitlines()[0].split("\t")[:3] == [
        "source",
        "target",
        "source_lang",
    ]
    words = ["train", "--model", encoder, "--corpus", path, "--dev", path, "--languages", "sw", "--recipe", "tr"]
    words += ["--output_dir", str(tmp_path / "out"), "--max_steps", "1", "--per_device_train_batch_size", "2"]
    assert main([*words, *COLUMNS, "--use_cpu", "--report_to", "none"]) == 0
    assert main(["adapt", "--model", encoder, "--corpus", path, "--languages", "sw", *COLUMNS]) == 2
    assert "3 different pairs" in capsys.readouterr().err


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_in_other_languages_are_dropped(tmp_path, streaming):
    rows = [
        ("mambo", "bonjour", "sw", "fr"),
        ("bonjour", "mambo", "fr", "sw"),
        ("a", "b", "sw", "sw"),
        ("hi", "ho", "en", "en"),
    ]
    lines = [
        "source\ttarget\tsource_lang\ttarget_lang",
        *map("\t".join, rows),
        "jambo\thi\tsw\ten",
        "hello\thujambo\ten\tsw",
    ]
    corpus = load_corpus(write(tmp_path / "r.tsv", "\n".join(lines) + "\n"), streaming=streaming)
    assert [(row["source"], row["target"]) for row in corpus.dataset] == [("jambo", "hi"), ("hujambo", "hello")]
    assert dropped(corpus) == {"other languages": 4}


@pytest.mark.parametrize(("name", "separator"), [("x.tsv", "\t"), ("sw-en.tsv", "\t"), ("x.csv", ";")])
def test_a_header_of_other_languages_is_not_a_pair(tmp_path, name, separator):
    text = separator.join(["rn", "en"]) + "\n" + separator.join(["mwaramutse", "good morning"]) + "\n"
    path = write(tmp_path / name, text)
    with pytest.raises(
        CorpusError, match=r":1: the columns are rn and en, but the languages of the corpus are sw and en"
    ):
        load_corpus(path, languages=["sw"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_null_in_a_list_of_negatives_is_skipped(tmp_path, kind):
    rows = [
        {"source": "a", "target": "b", "negatives": ["x", None, "y"]},
        {"source": "c", "target": "d", "negatives": None},
    ]
    path = tmp_path / f"sw-en.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        Dataset.from_list(rows).to_parquet(str(path))
    assert load_corpus(str(path)).dataset["negatives"] == ["x ||| y", ""]
