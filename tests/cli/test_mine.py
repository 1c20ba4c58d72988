import gzip
import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, load_dataset

from metaphrase.cli import main
from metaphrase.cli.tables import text_histogram
from metaphrase.corpus import Corpus, load_corpus
from metaphrase.corpus.report import CorpusReport
from metaphrase.mining import filtering, shards, workflow
from metaphrase.mining.margins import Pairs, Threshold
from metaphrase.mining.options import FilterOptions, MiningOptions, SearchOptions
from metaphrase.mining.output import draw_histogram, histogram, write_sample
from metaphrase.mining.resources import estimate_needs
from metaphrase.mining.sentences import Sentences, read_sentences
from tests.conftest import mostly_slow
from tests.mining.test_search import mine_loop
from tests.processes import run_python

SETTINGS = ["--shard_size", "7", "--k", "2", "--batch_size", "4"]


def embedder(bitext):
    """Embeds translations near each other, as no untrained encoder does."""
    number = {row[side]: at for at, row in enumerate(bitext) for side in ("source", "target")}

    def encode(texts, **kwargs):
        return np.array([vector(text) for text in texts], dtype=np.float32)

    def vector(text):
        own = np.random.default_rng([len(text), *text.casefold().encode()]).normal(size=32)
        return np.random.default_rng(number.get(text, 99)).normal(size=32) + 0.9 * own

    return encode


@pytest.fixture
def encoder(tiny_encoder, monkeypatch, bitext):
    """A model whose embeddings are made up, and which counts the texts that it embeds."""
    return counting(tiny_encoder, embedder(bitext), monkeypatch)


def counting(tiny_encoder, encode, monkeypatch):
    tiny_encoder.embedded = []

    def counted(texts, **kwargs):
        tiny_encoder.embedded += texts
        return encode(texts, **kwargs)

    tiny_encoder.encode = counted
    for module in (workflow, filtering):
        monkeypatch.setattr(module, "load_encoder", lambda name, **kwargs: tiny_encoder)
    return tiny_encoder


@pytest.fixture
def texts(bitext, tmp_path):
    """German and English sentences in another order, with a repeated, an empty and a copied line."""
    german = [row["source"] for row in bitext]
    english = [row["target"] for row in bitext][::-1]
    (tmp_path / "news.de").write_text("\n".join([*german, "", german[0], "OK 123"]) + "\n", encoding="utf-8")
    with gzip.open(tmp_path / "news.en.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join([*english, "ok 123"]) + "\n")
    return str(tmp_path / "news.de"), str(tmp_path / "news.en.gz")


def rows_of(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]]


def test_pairs_are_those_of_a_loop(encoder, texts, bitext, tmp_path, capsys):
    output = tmp_path / "out" / "mined.tsv"
    assert main(["mine", *texts, "-o", str(output), *SETTINGS]) == 0
    german = [*(row["source"] for row in bitext), "OK 123"]
    english = [*(row["target"] for row in bitext[::-1]), "ok 123"]
    expected = mine_loop(encoder.encode(german), encoder.encode(english), 2, "ratio", "max")
    expected = [(score, german[i], english[j]) for score, i, j in expected if english[j] != "ok 123" != german[i]]
    rows = rows_of(output)
    copies = [pair for pair in expected if pair[1].casefold() == pair[2].casefold()]
    expected = [pair for pair in expected if pair not in copies]
    np.testing.assert_allclose([float(row["score"]) for row in rows], [pair[0] for pair in expected], atol=1e-5)
    assert {(row["source"], row["target"]) for row in rows} == {pair[1:] for pair in expected}
    assert {(row["source_lang"], row["target_lang"]) for row in rows} == {("de", "en")}
    assert not output.with_name("mined.tsv.partial").exists()

    corpus = load_corpus(output, cleaning=None)
    assert len(corpus.dataset) == len(rows)
    assert corpus.dataset[0]["source"] == rows[0]["source"]
    error = capsys.readouterr().err
    assert "source: 25 sentences of 27 lines (1 repeated, 1 empty skipped)" in error
    assert "MB of disk in" in error
    assert "of memory in addition" in error
    assert error.index("MB of disk") < error.index("Wrote")


def test_summary_histogram_and_sample(encoder, texts, tmp_path):
    output = tmp_path / "mined.tsv"
    assert main(["mine", *texts, "-o", str(output), *SETTINGS]) == 0
    facts = json.loads((tmp_path / "mined.tsv.json").read_text())
    assert sum(facts["histogram"]["counts"]) == facts["pairs"] == len(rows_of(output))
    assert (facts["candidates"], facts["copies_dropped"]) == (facts["pairs"], 1)
    assert (facts["source"]["lang"], facts["source"]["sentences"], facts["source"]["repeated"]) == ("de", 25, 1)
    assert len(facts["source"]["sha256"]) == 64
    assert facts["settings"]["k"] == 2
    assert facts["quantiles"]["100"] == pytest.approx(float(rows_of(output)[0]["score"]))
    sheet = [line.split("\t") for line in (tmp_path / "mined.tsv.sample.txt").read_text().splitlines()]
    assert sheet[0] == ["around", "score", "source", "target"]
    assert {line[0] for line in sheet[1:]} >= {"best", "best 50 %", "best 90 %"}
    assert sheet[1][2] == rows_of(output)[0]["source"]
    assert (tmp_path / "mined.tsv.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["mined.parquet", "mined.jsonl.gz", "mined.tsv.gz"])
def test_every_format_is_a_corpus(encoder, texts, tmp_path, name):
    assert main(["mine", *texts, "-o", str(tmp_path / name), *SETTINGS, "--top", "5"]) == 0
    assert len(load_corpus(tmp_path / name, cleaning=None).dataset) == 5
    if name.endswith("parquet"):
        table = load_dataset("parquet", data_files=str(tmp_path / name), cache_dir=str(tmp_path / "hf"))["train"]
        assert table.column_names == ["score", "source", "target", "source_lang", "target_lang"]
        assert table["score"][:] == sorted(table["score"], reverse=True)


@pytest.mark.long
def test_threshold_and_top(encoder, texts, tmp_path):
    outputs = {name: tmp_path / f"{name}.tsv" for name in ("all", "some", "top", "copies")}
    main(["mine", *texts, "-o", str(outputs["all"]), *SETTINGS])
    rows = rows_of(outputs["all"])
    main(["mine", *texts, "-o", str(outputs["some"]), *SETTINGS, "--threshold", rows[3]["score"]])
    assert len(rows_of(outputs["some"])) in (3, 4)  # the score is rounded
    main(["mine", *texts, "-o", str(outputs["top"]), *SETTINGS, "--top", "3"])
    assert rows_of(outputs["top"]) == rows[:3]
    main(["mine", *texts, "-o", str(outputs["copies"]), *SETTINGS, "--copies"])
    assert [row["source"] for row in rows_of(outputs["copies"]) if row["target"] == "ok 123"] == ["OK 123"]
    assert all(row["target"] != "ok 123" or row["source"] != "OK 123" for row in rows)


def test_the_suggestion_is_called_a_guess(encoder, texts, tmp_path, capsys, monkeypatch):
    def suggest(pairs, *ways, **how):
        return Threshold(float(pairs.score_c[4]), 0.8, 0.7, 0.75, 5, 4.0), pairs.score_c

    monkeypatch.setattr(workflow, "suggest_threshold", suggest)
    main(["mine", *texts, "-o", str(tmp_path / "all.tsv"), *SETTINGS])
    error = " ".join(capsys.readouterr().err.split())
    assert "pairs. Expected: precision 80 %, recall 70 %, F1 75 %. This is a rough estimate" in error
    threshold, kept = re.search(r"Suggestion: --threshold (\S+) keeps (\d+) pairs", error).groups()  # it is rounded
    main(["mine", *texts, "-o", str(tmp_path / "suggested.tsv"), *SETTINGS, "--threshold", threshold])
    assert len(rows_of(tmp_path / "suggested.tsv")) == int(kept)
    capsys.readouterr()
    main(["mine", *texts, "-o", str(tmp_path / "auto.tsv"), *SETTINGS, "--threshold", "auto"])
    assert len(rows_of(tmp_path / "auto.tsv")) == 5
    assert json.loads((tmp_path / "auto.tsv.json").read_text())["expected"] == {
        "precision": 0.8,
        "recall": 0.7,
        "f1": 0.75,
    }
    assert "Expected among the pairs: precision 80 %" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(workflow, "suggest_threshold", lambda pairs, *ways, **how: (None, pairs.score_c))
    assert main(["mine", *texts, "-o", str(tmp_path / "none.tsv"), *SETTINGS, "--threshold", "auto"]) == 2
    assert "No threshold can be suggested" in capsys.readouterr().err


def test_a_threshold_above_all_scores_is_warned_of(encoder, texts, tmp_path, caplog):
    assert main(["mine", *texts, "-o", str(tmp_path / "none.tsv"), *SETTINGS, "--threshold", "9"]) == 0
    assert rows_of(tmp_path / "none.tsv") == []
    assert re.search(
        r"No pair was kept: the best of 2\d pairs scores [\d.]+, below --threshold 9. Lower it", caplog.text
    )


def test_copies_have_no_threshold(texts, tiny_encoder_dir, tmp_path, capsys, caplog):
    words = ["mine", texts[0], texts[0], "--target_lang", "en", "--model", str(tiny_encoder_dir), "-o"]
    assert main([*words, str(tmp_path / "auto.tsv"), "--threshold", "auto"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    count = len(set(Path(texts[0]).read_text(encoding="utf-8").split("\n")) - {""})
    assert (
        f"No threshold can be suggested: both sides are the same text in all pairs that were found ({count})" in error
    )
    assert "keep copies with --copies" in error
    assert main([*words, str(tmp_path / "all.tsv")]) == 0
    assert "No pair was kept: both sides are the same text in all pairs that were found" in caplog.text
    assert (
        f"No threshold is suggested: both sides are the same text in all pairs that were found ({count})"
        in " ".join(capsys.readouterr().err.split())
    )


def test_the_suggestion_does_not_count_copies_that_are_dropped(tiny_encoder, tmp_path, monkeypatch):
    """Texts of 400 sentences: 100 translations, some of them found by chance only, and 150 copies."""
    draw = np.random.default_rng(0).normal
    vectors = {f"copy {i}": draw(size=24) for i in range(150)}
    for i in range(250):
        vectors[f"quelle {i}"] = draw(size=24)
        vectors[f"target {i}"] = vectors[f"quelle {i}"] + 0.6 * draw(size=24) if i < 100 else draw(size=24)
    counting(
        tiny_encoder, lambda texts, **kwargs: np.array([vectors[text] for text in texts], np.float32), monkeypatch
    )
    for language, other in (("de", "target"), ("en", "quelle")):
        lines = [text for text in vectors if not text.startswith(other)]
        (tmp_path / f"news.{language}").write_text("\n".join(lines) + "\n")
    options = MiningOptions(*(str(tmp_path / f"news.{one}") for one in ("de", "en")), str(tmp_path / "mined.tsv"))
    result = workflow.mine_files(replace(options, threshold="auto"), SearchOptions(batch_size=64))
    rows = rows_of(tmp_path / "mined.tsv")
    correct = [row["source"].split()[1] == row["target"].split()[1] for row in rows]
    assert result.facts["copies_dropped"] == 150
    assert result.suggestion.kept == len(rows)
    assert result.suggestion.precision == pytest.approx(np.mean(correct), abs=0.06)
    assert result.suggestion.recall == pytest.approx(sum(correct) / 100, abs=0.15)


@pytest.mark.parametrize("step", [1, -1])
def test_a_copy_does_not_take_the_place_of_a_translation(tiny_encoder, tmp_path, monkeypatch, step):
    """English 0 is also untranslated in the German text, and similar to English 9; numbers are in both texts."""
    draw = np.random.default_rng(0).normal
    english = {f"english {i}": draw(size=24) for i in range(9)}
    english["english 9"] = english["english 0"] + 0.8 * draw(size=24)
    numbers = {f"1:{i}": english["english 8"] + 0.1 * draw(size=24) for i in range(2)}
    german = {f"deutsch {i}": english[f"english {i}"] + 0.3 * draw(size=24) for i in range(8)}
    german["English 0"] = english["english 0"]
    vectors = english | numbers | german
    counting(
        tiny_encoder, lambda texts, **kwargs: np.array([vectors[text] for text in texts], np.float32), monkeypatch
    )
    texts = {"news.de": german | numbers, "news.en": english | numbers}
    for name, lines in texts.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    output = tmp_path / "mined.tsv"
    result = workflow.mine_files(MiningOptions(*(str(tmp_path / name) for name in list(texts)[::step]), str(output)))
    pairs = [(row["source"], row["target"])[::step] for row in rows_of(output)]
    assert {(f"deutsch {i}", f"english {i}") for i in range(8)} <= set(pairs)
    assert not any(
        source == "English 0" or (source.startswith("1:") and target.startswith("1:")) for source, target in pairs
    )
    assert result.facts["copies_dropped"] == 3


@pytest.mark.parametrize(
    "extra",
    mostly_slow(
        [["--half"], ["--index", "ivf"], ["--index", "hnsw"], ["--search_device", "cpu"]],
        [["--half"], ["--index", "hnsw"]],
    ),
)
def test_other_ways_give_about_the_same(encoder, texts, tmp_path, extra, capsys):
    assert main(["mine", *texts, "-o", str(tmp_path / "exact.tsv"), *SETTINGS]) == 0
    capsys.readouterr()
    assert main(["mine", *texts, "-o", str(tmp_path / "other.tsv"), *SETTINGS, *extra]) == 0
    exact, other = (rows_of(tmp_path / f"{name}.tsv") for name in ("exact", "other"))
    best = {(row["source"], row["target"]) for row in exact[:5]}
    assert len(best & {(row["source"], row["target"]) for row in other}) >= 3
    if extra[0] == "--index":
        notes = capsys.readouterr().err
        assert notes.index("Index of targets: ") < notes.index("Neighbours of sources: ")
        assert f"The {extra[1]} index finds" in notes
        assert json.loads((tmp_path / "other.tsv.json").read_text())["settings"]["source_recall"] > 0.5


@pytest.mark.long
def test_kept_work_serves_other_margins(encoder, texts, tmp_path, capsys):
    arguments = ["mine", *texts, "-o", str(tmp_path / "mined.tsv"), *SETTINGS, "--keep_work"]
    assert main(arguments) == 0
    embedded = len(encoder.embedded)
    assert embedded == 50
    assert main([*arguments, "--margin", "distance", "--retrieval", "intersection", "--threshold", "0.01"]) == 0
    assert len(encoder.embedded) == embedded
    assert all(float(row["score"]) >= 0.01 for row in rows_of(tmp_path / "mined.tsv"))
    assert main([*arguments, "--k", "3"]) == 2
    assert "holds the work of another command, which differs in: k." in capsys.readouterr().err


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from metaphrase.cli import main
left, which, replace = int(sys.argv[1]), sys.argv[2], Path.replace
def counted(self, target):
    global left
    if which in str(target) and not (left := left - 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = counted
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "left"),
    [
        ("target/embeddings", 2),
        pytest.param("source/neighbours", 3, marks=pytest.mark.slow),
        pytest.param("mined.tsv.json", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on(tiny_encoder, texts, tiny_encoder_dir, tmp_path, monkeypatch, which, left):
    encoder = counting(tiny_encoder, tiny_encoder.encode, monkeypatch)
    whole, output = tmp_path / "whole.tsv", tmp_path / "mined.tsv"
    arguments = ["mine", *texts, "--model", str(tiny_encoder_dir), *SETTINGS]
    killed = run_python("-c", KILLED, left, which, *arguments, "-o", output)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    work = tmp_path / "mined.tsv.partial"
    done = {path: path.stat().st_mtime_ns for path in work.rglob("*.np[yz]")}
    assert done
    assert main([*arguments, "-o", str(output), "--keep_work"]) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    n_embedded = 50 - sum(len(np.load(path)) for path in done if path.parent.name == "embeddings")
    assert len(encoder.embedded) == n_embedded
    assert main([*arguments, "-o", str(whole)]) == 0
    assert output.read_text() == whole.read_text()


def test_columns_of_a_tsv(encoder, bitext_path, tmp_path, capsys):
    output = tmp_path / "mined.tsv"
    columns = ["--source_column", "source", "--target_column", "target", "--source_lang", "de", "--target_lang", "en"]
    assert main(["mine", str(bitext_path), str(bitext_path), "-o", str(output), *columns, *SETTINGS]) == 0
    assert "source: 24 sentences of 24 lines" in capsys.readouterr().err
    by_number = ["--source_column", "1", "--target_column", "2", *columns[4:]]
    assert (
        main(["mine", str(bitext_path), str(bitext_path), "-o", str(tmp_path / "same.tsv"), *by_number, *SETTINGS])
        == 0
    )
    assert (tmp_path / "same.tsv").read_text() == output.read_text()
    plain = tmp_path / "plain.tsv"
    plain.write_text("".join(bitext_path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]), encoding="utf-8")
    assert main(["mine", str(plain), str(plain), "-o", str(tmp_path / "other.tsv"), *by_number, *SETTINGS]) == 0
    assert (tmp_path / "other.tsv").read_text() == output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{de}"], "--target"),
        (["-o", "{d}/x.tsv", "{de}", "{en}"], "come first: metaphrase mine SOURCE TARGET [OPTIONS]. See"),
        (["{de}", "{en}"], "-o"),
        (["{de}", "{en}", "-o", "{d}/x.tsv", "--search_device", "gpu"], "--search_device gpu cannot be used"),
        (["{de}", "{en}", "{en}", "-o", "{d}/x.tsv"], "come first: metaphrase mine SOURCE TARGET [OPTIONS]. See"),
        (["{de}", "{en}", "-o", "{d}/x.csv"], "the format is unknown"),
        (["{d}/none.de", "{en}", "-o", "{d}/x.tsv"], "does not exist"),
        (["{d}/empty.de", "{en}", "-o", "{d}/x.tsv"], "The source contains no sentences, in 2 lines"),
        (["{d}/text.txt", "{en}", "-o", "{d}/x.tsv"], "pass --source_lang"),
        (["{de}", "{en}", "-o", "{d}/x.tsv", "--threshold", "high"], "must be a number that is finite or 'auto'"),
        (
            ["{de}", "{en}", "-o", "{d}/x.tsv", "--k", "0"],
            "--k must be a whole number from 1 to 2,147,483,647, but is 0",
        ),
        (
            ["{de}", "{en}", "-o", "{d}/x.tsv", "--top", "0"],
            "--top must be a whole number from 1 to 2,147,483,647, but is 0",
        ),
        (["{de}", "{en}", "-o", "{d}/x.tsv", "--source_column", "text"], "no column 'text'"),
        (["{de}", "{en}", "-o", "{d}/x.tsv", "--source_column", "3"], "column 3 is missing; the line has 1"),
        (
            ["{d}/x.de.tsv", "{en}", "-o", "{d}/x.tsv"],
            "de.tsv:1: the file has several columns. Name one (--source_column",
        ),
        (
            ["{d}/x.JSONL", "{en}", "-o", "{d}/x.tsv", "--source_lang", "de"],
            "is not text with one sentence per line, or TSV",
        ),
        (["{de}", "{en}", "-o", "{d}/x.tsv", "--margin", "best"], "--margin"),
        (["{de}", "{en}", "-o", "{d}/x.tsv", "--threshold", "auto", "--k", "1"], "requires --k 2 or more"),
    ],
)
def test_mistakes_are_one_clear_line(encoder, texts, tmp_path, capsys, arguments, message):
    (tmp_path / "empty.de").write_text("\n \n")
    (tmp_path / "text.txt").write_text("eins\n")
    (tmp_path / "x.de.tsv").write_text("1\teins\n")
    (tmp_path / "x.JSONL").write_text('{"text": "eins"}\n')
    names = {"de": texts[0], "en": texts[1], "d": tmp_path}
    assert main(["mine", *(argument.format(**names) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not list(tmp_path.glob("x.tsv*"))


def test_languages_come_from_file_names():
    options = MiningOptions(source="a/news.sw.gz", target="mono.eu.txt", output="x.tsv")
    assert options.languages == ("sw", "eu")
    assert replace(options, source="mono.sw.tsv.gz", target_lang="fi").languages == ("sw", "fi")
    with pytest.raises(ValueError, match=r"Cannot infer the language from the file name 'train\.src'"):
        _ = replace(options, source="train.src").languages  # not Sardinian


def test_too_little_disk_is_said_before_the_work(encoder, texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    assert main(["mine", *texts, "-o", str(tmp_path / "x.tsv"), *SETTINGS, "--shard_size", "5"]) == 2
    assert "Not enough disk space" in capsys.readouterr().err
    assert not encoder.embedded


@pytest.mark.parametrize("half", [False, True])
def test_needs_cover_what_is_written(encoder, texts, tmp_path, half):
    output = tmp_path / "mined.tsv"
    assert main(["mine", *texts, "-o", str(output), "--shard_size", "25", "--keep_work", *(["--half"] * half)]) == 0
    work = tmp_path / "mined.tsv.partial"
    arrays = sum(np.load(p).nbytes for p in work.rglob("embeddings/*.npy"))
    assert arrays == 50 * 32 * (2 if half else 4)
    needed = estimate_needs(25, 25, encoder, SearchOptions(half=half, shard_size=25), 2000)
    assert arrays < needed["disk"] < 20 * arrays
    weights = sum(p.numel() * 4 for p in encoder.parameters())
    assert weights < needed["memory"] < weights + 40_000


def test_sentences_on_disk(tmp_path):
    lines = ["ä b", "", None, "c", "ä b", "日本 " * 3]
    sentences = Sentences.write(tmp_path / "s", lambda: iter(lines))
    assert list(sentences) == ["ä b", "c", "日本 " * 3]
    assert sentences[1:3] == ["c", "日本 " * 3]
    assert sentences.facts == {"lines": 6, "empty": 1, "unreadable": 1, "repeated": 1, "sentences": 3}
    again = Sentences.write(tmp_path / "s", lambda: pytest.fail("read again"))
    assert list(again) == list(sentences)


def test_lines_that_cannot_be_read(tmp_path):
    path = tmp_path / "x.de"
    path.write_bytes(b"gut\n\xff\n" + b"x" * 20_000 + "\na\tb \u2028c\r\n".encode())
    assert list(read_sentences(path)) == ["gut", None, None, "a b \u2028c"]
    path.write_text("\ufeff\n \u200b\t\ufeff\r\n\u200fא\n", encoding="utf-8")
    assert list(read_sentences(path)) == ["", "", "\u200fא"]


@pytest.mark.parametrize(
    ("first", "is_header"),
    [("source\ttarget", True), ("sw\ten", True), ("english\tkiingereza", False), ("no\tla", False), ("en\ten", False)],
)
def test_only_a_header_is_skipped_by_the_number_of_a_column(tmp_path, first, is_header):
    path = tmp_path / "x.tsv"
    path.write_text(f"{first}\njambo\thello\n", encoding="utf-8")
    assert list(read_sentences(path, "1")) == [*[first.split("\t")[0]] * (not is_header), "jambo"]


def test_the_same_text_in_two_normal_forms_is_a_copy(encoder, bitext, tmp_path):
    """Diacritics are one character or two, and characters without width do not count."""
    (tmp_path / "a.de").write_text("\n".join(["Caf\u00e9", *(row["source"] for row in bitext)]), encoding="utf-8")
    (tmp_path / "a.en").write_text(
        "\n".join(["cafe\u0301\u200b", *(row["target"] for row in bitext)]), encoding="utf-8"
    )
    texts = [str(tmp_path / name) for name in ("a.de", "a.en")]
    for more, copies in ([], 0), (["--copies"], 1):
        output = tmp_path / f"{copies}.tsv"
        assert main(["mine", *texts, "-o", str(output), *SETTINGS, *more]) == 0
        assert sum(row["target"].startswith("cafe") for row in rows_of(output)) == copies


def test_histogram_counts_every_score():
    scores = np.concatenate([np.linspace(0.8, 1.3, 500), [50.0]])
    bins = histogram(scores)
    assert sum(bins["counts"]) == 501
    assert bins["edges"][-1] < 50
    assert histogram(np.full(3, 1.0))["counts"][0] == 3
    assert histogram(np.empty(0))["counts"] == [0]
    assert len(text_histogram(bins, 1.0)) == 24


def test_sample_of_few_and_of_no_pairs(tmp_path):
    texts = ["a\tb", "c"]
    pairs = Pairs(np.array([1.2, 1.1]), np.array([0, 1]), np.array([1, 0]))
    lines = write_sample(pairs, texts, texts, 1.15, tmp_path / "s.txt").read_text().splitlines()
    assert lines[1] == "best\t1.2000\ta b\tc"
    assert all(line.count("\t") == 3 for line in lines)
    empty = pairs.take(slice(0))
    assert len(write_sample(empty, texts, texts, None, tmp_path / "e.txt").read_text().splitlines()) == 1


def test_the_legend_of_the_histogram_is_not_placed_by_a_search(tmp_path, monkeypatch):
    """It takes long for many pairs, of which matplotlib warns."""
    search = "matplotlib.legend.Legend._find_best_position"
    monkeypatch.setattr(search, lambda *args: pytest.fail("the place is searched"))
    pairs = Pairs(np.array([1.5, 1.2, 1.0]), np.arange(3), np.arange(3))
    assert draw_histogram(pairs, np.array([1.0]), 1.1, None, tmp_path / "x.png") == [tmp_path / "x.png"]


def test_without_pairs_no_earlier_histogram_remains(tmp_path):
    pairs = Pairs(np.array([1.2, 1.1]), np.array([0, 1]), np.array([1, 0]))
    picture = tmp_path / "mined.tsv.png"
    assert draw_histogram(pairs, np.array([0.9]), 1.15, None, picture) == [picture]
    assert draw_histogram(pairs.take(slice(0)), np.empty(0), None, None, picture) == []
    assert not picture.exists()


# --- filter ---


@pytest.fixture
def corpus(bitext, tmp_path):
    """German and Swahili-labelled pairs, one of them of the wrong sentences, and one twice."""
    path = tmp_path / "corpus.tsv"
    rows = [(row["source"], row["target"], "de" if at % 3 else "sw") for at, row in enumerate(bitext)]
    rows[1] = (rows[1][0], rows[7][1], "de")
    rows.append(rows[4])
    lines = [f"{source}\t{target}\t{language}\ten\n" for source, target, language in rows]
    path.write_text("source\ttarget\tsource_lang\ttarget_lang\n" + "".join(lines), encoding="utf-8")
    return path, rows


def filter_loop(encoder, rows, k=2):
    """Margins within each language, neighbours being different texts."""
    scores = {}
    for language in ("de", "sw"):
        pairs = [(s, t) for s, t, code in rows if code == language]
        sources, targets = list(dict.fromkeys(s for s, _ in pairs)), list(dict.fromkeys(t for _, t in pairs))
        x, y = (np.asarray(encoder.encode(side), dtype=np.float64) for side in (sources, targets))
        x, y = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (x, y))
        cosines = x @ y.T
        mean_x, mean_y = (np.sort(c, axis=1)[:, -k:].mean(axis=1) for c in (cosines, cosines.T))
        for s, t in pairs:
            i, j = sources.index(s), targets.index(t)
            scores[s, t] = cosines[i, j], cosines[i, j] / ((mean_x[i] + mean_y[j]) / 2)
    return scores


@pytest.mark.parametrize("kind", ["margin", "cosine"])
def test_filter_adds_the_scores_of_a_loop(encoder, corpus, tmp_path, kind):
    path, rows = corpus
    output = tmp_path / "scored.tsv"
    assert main(["filter", str(path), "-o", str(output), *SETTINGS, "--score", kind]) == 0
    expected = filter_loop(encoder, rows)
    found = rows_of(output)
    assert [(row["source"], row["target"], row["source_lang"]) for row in found] == rows
    for row in found:
        score = expected[row["source"], row["target"]][kind == "margin"]
        assert float(row["score"]) == pytest.approx(score, abs=1e-5)
    assert not (tmp_path / "scored.tsv.partial").exists()
    assert json.loads((tmp_path / "scored.tsv.json").read_text())["kept"] == 25


def test_filter_keeps_the_good_ones_in_their_order(encoder, corpus, tmp_path):
    path, _ = corpus
    main(["filter", str(path), "-o", str(tmp_path / "all.tsv"), *SETTINGS])
    rows = rows_of(tmp_path / "all.tsv")
    main(["filter", str(path), "-o", str(tmp_path / "some.parquet"), *SETTINGS, "--threshold", "1.0"])
    kept = load_corpus(tmp_path / "some.parquet", cleaning=None).dataset
    assert kept["source"][:] == [row["source"] for row in rows if float(row["score"]) >= 1]
    assert 0 < len(kept) < 25
    main(["filter", str(path), "-o", str(tmp_path / "top.tsv"), *SETTINGS, "--top", "4"])
    best = sorted(rows, key=lambda row: -float(row["score"]))[:4]
    assert rows_of(tmp_path / "top.tsv") == [row for row in rows if row in best]


def test_filter_goes_on_after_a_failure(encoder, corpus, tmp_path, monkeypatch):
    path, rows = corpus
    output = tmp_path / "scored.tsv"
    with monkeypatch.context() as broken:
        broken.setattr(shards, "search_shards", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["filter", str(path), "-o", str(output), *SETTINGS]) == 130
    embedded = len(encoder.embedded)
    assert main(["filter", str(path), "-o", str(output), *SETTINGS]) == 0
    assert len(encoder.embedded) - embedded < embedded + 30
    assert not set(encoder.embedded[:embedded]) & set(encoder.embedded[embedded:])
    assert len(rows_of(output)) == len(rows)


def test_another_order_of_the_files_is_other_work(encoder, corpus, tmp_path, monkeypatch, capsys):
    """Embeddings are stored in the order of the pairs."""
    path, _ = corpus
    header, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    files = []
    for name, part in (("a", lines[:10]), ("b", lines[10:])):
        files.append(tmp_path / f"{name}.tsv")
        files[-1].write_text("".join([header, *part]), encoding="utf-8")
    with monkeypatch.context() as broken:
        broken.setattr(filtering, "write_corpus", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["filter", *map(str, files), "-o", str(tmp_path / "x.tsv"), *SETTINGS]) == 130
    assert main(["filter", *map(str, files[::-1]), "-o", str(tmp_path / "x.tsv"), *SETTINGS]) == 2
    assert "differs in: inputs" in " ".join(capsys.readouterr().err.split())
    assert main(["filter", *map(str, files), "-o", str(tmp_path / "x.tsv"), *SETTINGS]) == 0


def test_the_sample_shows_a_threshold_of_0(encoder, texts, tmp_path):
    command = ["mine", *texts, "-o", str(tmp_path / "o.tsv"), *SETTINGS, "--margin", "distance", "--threshold", "0"]
    assert main(command) == 0
    assert "\nthreshold 0.0000\t" in (tmp_path / "o.tsv.sample.txt").read_text()


def test_kept_work_belongs_to_the_settings_of_the_encoder(texts, tiny_encoder_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workflow, "draw_histogram", lambda *args: [])
    model = Path(shutil.copytree(tiny_encoder_dir, tmp_path / "model"))
    command = ["mine", *texts, "--model", str(model), "-o", str(tmp_path / "o.tsv"), *SETTINGS, "--keep_work"]
    assert main(command) == 0
    settings = model / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"prompts": {"query": "ja "}}))
    assert main(command) == 2
    assert "differs in: encoder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("commit", "more", "key"), [("b" * 40, [], "inputs"), ("a" * 40, ["--split", "test"], "split")]
)
def test_another_commit_or_split_of_the_hub_is_other_work(
    encoder, bitext, tmp_path, monkeypatch, capsys, commit, more, key
):
    rows = [
        {key: row[key] for key in ("source", "target")} | {"source_lang": "de", "target_lang": "en"} for row in bitext
    ]

    def at(commit):
        facts = {"path": "hf:me/x", "file": "hf:me/x", "sha256": None, "revision": commit}
        monkeypatch.setattr(
            FilterOptions, "load_bitext", lambda self, files: Corpus(Dataset.from_list(rows), CorpusReport(), [facts])
        )

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FilterOptions, "input_files", lambda self, files: [])
    at("a" * 40)
    command = ["filter", "hf:me/x", "-o", str(tmp_path / "o.tsv"), *SETTINGS]
    with monkeypatch.context() as broken:
        broken.setattr(shards, "search_shards", stop)
        assert main(command) == 130
    at(commit)
    assert main([*command, *more]) == 2
    assert f"differs in: {key}" in " ".join(capsys.readouterr().err.split())
