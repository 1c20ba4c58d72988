import gzip
import json

import pytest

from metaphrase.cli import main
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation import diagnosis_workflow
from metaphrase.io.files import PACKAGED_DATA as DATA


def rows_of(language, split="train"):
    with gzip.open(DATA / "demo" / f"{language}-en.{split}.tsv.gz", "rt", encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\n").split("\t")[:2] for line in lines][1:]


def written(path, rows):
    path.write_text("source\ttarget\n" + "".join(f"{s}\t{t}\n" for s, t in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def rows():
    return rows_of("sw")[:600]


def run(*arguments):
    return main(["diagnose", *arguments, "--languages", "sw", "--lines", "60"])


def test_a_sound_corpus(rows, tmp_path, capsys):
    assert run("--corpus", written(tmp_path / "pairs.tsv", rows), "--test", str(DATA / "demo")) == 0
    assert "No problems found." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda rows: [row[::-1] for row in rows], "The sides are swapped"),
        (lambda rows: rows_of("fi")[:600], "Finnish (fi), not Swahili (sw)"),
        (lambda rows: list(zip([s for s, _ in rows[1:]], [t for _, t in rows], strict=False)), "1 line below"),
        (lambda rows: rows + rows_of("sw", "test"), "have a side in the training corpus"),
        (lambda rows: [(s, s) for s, _ in rows], "the same file or column"),
    ],
)
def test_a_fault_is_an_error_and_exit_status_1(rows, tmp_path, capsys, fault, message):
    corpus = written(tmp_path / "pairs.tsv", fault(rows))
    assert run("--corpus", corpus, "--test", str(DATA / "demo"), "--json") == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert any(message in finding["message"] for finding in found if finding["severity"] == "error")


def test_a_test_set_with_another_code_of_the_language_is_searched(rows, tmp_path, capsys):
    (tmp_path / "test").mkdir()
    other = [(source, f"Other text {at}.") for at, (source, _) in enumerate(rows[:20])]
    written(tmp_path / "test" / "swh-en.tsv", other)
    assert run("--corpus", written(tmp_path / "pairs.tsv", rows), "--test", str(tmp_path / "test"), "--json") == 1
    codes = [finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert "leakage" in codes


@pytest.mark.parametrize("first", [0, 4])
def test_sixty_pairs_of_moses_that_are_shifted(rows, tmp_path, capsys, fault, first):
    """A line is missing in one file, and one too many stands at its end: the numbers of lines are equal."""
    sources, targets = zip(*rows[:60], strict=True)
    (tmp_path / "x.sw").write_text("\n".join(sources) + "\n", encoding="utf-8")
    (tmp_path / "x.en").write_text(
        "\n".join([*targets[:first], *targets[first + 1 :], rows[60][1]]) + "\n", encoding="utf-8"
    )
    assert run("--corpus", f"{tmp_path}/x.sw,{tmp_path}/x.en", "--json") == 1
    (found,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["code"] == "shifted-sides"]
    assert "1 line above" in found["message"]
    assert found["of"] > 45
    fault(
        "C2",
        "a Moses pair of 60 lines that is shifted, found by diagnose",
        tried=1,
        survived=found["severity"] == "error",
    )


def test_one_test_pair_in_the_corpus_is_an_error_where_that_is_asked_for(rows, tmp_path):
    corpus = written(tmp_path / "pairs.tsv", [*rows, rows_of("sw", "test")[0]])
    assert run("--corpus", corpus, "--test", str(DATA / "demo")) == 0
    assert run("--corpus", corpus, "--test", str(DATA / "demo"), "--strict") == 1


def test_the_model_too(rows, tmp_path, capsys, tiny_encoder, monkeypatch):
    monkeypatch.setattr(diagnosis_workflow, "load_encoder", lambda name, **kwargs: tiny_encoder)
    corpus, output = written(tmp_path / "pairs.tsv", rows[:60]), tmp_path / "diagnosis.json"
    arguments = ("tiny", "--corpus", corpus, "--baseline", "tiny", "--sample", "40", "--output", str(output))
    assert run(*arguments) == 1
    result = json.loads(output.read_text(encoding="utf-8"))
    assert {"unchanged"} <= {finding["code"] for finding in result["findings"]}
    assert result["languages"]["sw"]["pairs"] == 40
    assert result["pairs"] == {"sw": 60}
    out = capsys.readouterr().out
    assert "unchanged" in out
    assert f"Wrote {output}" in out.replace("\n", "")


def test_a_baseline_without_pooling_has_that_of_the_model(rows, tmp_path, capsys, tiny_bert_dir):
    load_encoder(tiny_bert_dir, pooling="cls", device="cpu").save_pretrained(str(tmp_path / "model"))
    words = (
        str(tmp_path / "model"),
        "--corpus",
        written(tmp_path / "pairs.tsv", rows[:60]),
        "--sample",
        "40",
        "--json",
    )
    run(*words, "--baseline", str(tiny_bert_dir))
    found = json.loads(capsys.readouterr().out)
    assert found["geometry"]["distance"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--baseline", "starter"], "--baseline requires a model"),
        (["--sample", "1"], "--sample must be a whole number from 2"),
        (["--tset", "x"], "did you mean 'test'"),
        (["--test", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_bad_options_are_exit_status_2(rows, tmp_path, capsys, options, message):
    assert run("--corpus", written(tmp_path / "pairs.tsv", rows[:30]), *options) == 2
    assert message in capsys.readouterr().err
