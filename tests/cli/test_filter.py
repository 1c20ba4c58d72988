import json
import re

import numpy as np
import pytest
from datasets import Dataset

from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.encoders.loading import load_encoder
from metaphrase.mining import filtering
from metaphrase.mining.search import Neighbours, unit_rows


def test_what_it_takes_is_said_before_the_work(tiny_encoder_dir, bitext, tmp_path, capsys, monkeypatch):
    pairs = [f"{row['source']}\t{row['target']}" for row in bitext]
    (tmp_path / "pairs.tsv").write_text("\n".join(["source\ttarget", *pairs, pairs[0]]) + "\n", encoding="utf-8")
    seen = []
    needs = filtering.estimate_needs

    def counted(sources, targets, *arguments):
        seen.append((sources, targets))
        return needs(sources, targets, *arguments)

    monkeypatch.setattr(filtering, "estimate_needs", counted)
    command = ["filter", str(tmp_path / "pairs.tsv"), "--source_lang", "de", "--model", str(tiny_encoder_dir)]
    assert main([*command, "-o", str(tmp_path / "scored.tsv")]) == 0
    error = capsys.readouterr().err
    assert re.search(r"This requires [\d.]+ MB of disk in .* and [\d.]+ MB of memory", " ".join(error.split()))
    assert error.index("MB of") < error.index("Embedding de-en/sources")
    assert seen == [tuple(len({row[side] for row in bitext}) for side in ("source", "target"))]  # distinct ones

    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    assert main([*command, "-o", str(tmp_path / "other.tsv")]) != 0
    assert "Not enough disk space" in capsys.readouterr().err
    assert not list(tmp_path.rglob("other.tsv.partial/**/*.npy"))


def test_hard_negatives_are_mined_and_trained_on(tiny_encoder_dir, bitext, tmp_path, monkeypatch):
    """They are the most similar targets of other pairs that are clearly less similar than the translation."""
    pairs = [(row["source"], row["target"]) for row in bitext]
    pairs.append((pairs[0][0], pairs[1][1]))  # a second translation of the first source
    pairs.append(("Trennzeichen", "separator ||| of negatives"))
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in [("source", "target"), *pairs]), encoding="utf-8")
    monkeypatch.setattr(filtering, "MOST_SIMILAR", 1.001)  # the tiny encoder finds all sentences similar
    output = tmp_path / "mined.jsonl"
    command = ["filter", str(path), "--source_lang", "de", "--model", str(tiny_encoder_dir), "-o", str(output)]
    assert main([*command, "--negatives", "2"]) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    model = load_encoder(tiny_encoder_dir, device="cpu")
    sources, targets = (
        {text: unit_rows(model.encode([text]))[0] for text in side} for side in zip(*pairs, strict=True)
    )
    plain = tmp_path / "plain.jsonl"
    assert main([*command[:-1], str(plain)]) == 0
    scores = [json.loads(line)["score"] for line in plain.read_text(encoding="utf-8").splitlines()]
    assert [row["score"] for row in rows] == scores  # of the nearest four neighbours, not of all that were searched
    for row in rows:
        right = {b for a, b in pairs if a == row["source"]}
        limit = 1.001 * sources[row["source"]] @ targets[row["target"]]
        cosines = {
            text: sources[row["source"]] @ one
            for text, one in targets.items()
            if text not in right and "|||" not in text
        }
        near = sorted((text for text, one in cosines.items() if one <= limit), key=lambda text: -cosines[text])
        found = [text for text in row["negatives"].split(" ||| ") if text]
        assert len(found) == min(2, len(near))
        assert not set(found) & right
        assert [cosines[text] for text in found] == pytest.approx([cosines[text] for text in near[:2]], abs=1e-5)
    recipe = tmp_path / "tr.yaml"
    recipe.write_text("name: x\nterms: [{objective: tr, args: {negatives: 2}}]\n", encoding="utf-8")
    options = ["--corpus", str(output), "--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--use_cpu"]
    command = ["train", "--model", str(tiny_encoder_dir), "--recipe", str(recipe), *options, "--report_to", "none"]
    assert main([*command, "--per_device_train_batch_size", "8"]) == 0


def test_a_negative_contains_no_separator_of_negatives():
    near = Neighbours(np.array([[0.8, 0.7, 0.6]], dtype=np.float32), np.array([[1, 2, 0]], dtype=np.int32))
    targets = ["the translation", "one ||| two", "another"]
    number, cosine = np.array([0]), np.array([0.9])
    assert filtering.hard_negatives(near, number, number, cosine, targets, 2) == [["another"]]


@pytest.mark.parametrize("name", ["negatives", "negative"])
def test_negatives_are_read_as_lists_and_as_text(tmp_path, name):
    values = [["one ", "two"], "one|||two", [], None]
    rows = [{"source": f"a{at}", "target": f"b{at}", name: value} for at, value in enumerate(values)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = load_corpus(tmp_path / "pairs.jsonl", languages=["de"]).dataset
    assert corpus["negatives"][:] == ["one ||| two", "one|||two", "", ""]
    Dataset.from_list(rows[:1]).to_parquet(tmp_path / "lists.parquet")
    assert load_corpus(tmp_path / "lists.parquet", languages=["de"]).dataset["negatives"][:] == ["one ||| two"]


def test_the_neighbours_of_hard_negatives_are_counted(tiny_encoder_dir, bitext, tmp_path, monkeypatch):
    seen, needs = [], filtering.estimate_needs
    monkeypatch.setattr(filtering, "estimate_needs", lambda *args: seen.append(args[3].k) or needs(*args))
    (tmp_path / "p.tsv").write_text("".join(f"{row['source']}\t{row['target']}\n" for row in bitext), encoding="utf-8")
    command = ["filter", str(tmp_path / "p.tsv"), "--source_lang", "de", "--model", str(tiny_encoder_dir)]
    assert main([*command, "-o", str(tmp_path / "o.tsv"), "--negatives", "1"]) == 0
    assert seen == [filtering.NEGATIVE_NEIGHBOURS]


def test_a_margin_that_is_not_computed_is_refused(tmp_path, capsys):
    (tmp_path / "p.tsv").write_text("paka\tcat\n", encoding="utf-8")
    command = ["filter", str(tmp_path / "p.tsv"), "--source_lang", "sw", "-o", str(tmp_path / "o.tsv")]
    assert main([*command, "--score", "cosine", "--margin", "distance"]) == 2
    assert "--margin distance is not used with --score cosine" in " ".join(capsys.readouterr().err.split())


def test_a_threshold_that_is_read_from_a_file_keeps_its_pair(tiny_encoder_dir, bitext, tmp_path, caplog):
    path, output = tmp_path / "pairs.tsv", tmp_path / "out.jsonl"
    lines = ["source\ttarget", *(f"{row['source']}\t{row['target']}" for row in bitext)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["filter", str(path), "--source_lang", "de", "--model", str(tiny_encoder_dir), "-o", str(output)]
    assert main(command) == 0
    scores = [json.loads(line)["score"] for line in output.read_text(encoding="utf-8").splitlines()]
    for threshold in sorted(scores)[::5]:
        output.unlink()
        assert main([*command, "--threshold", str(threshold)]) == 0
        assert len(output.read_text(encoding="utf-8").splitlines()) == sum(score >= threshold for score in scores)
    assert "No pair was kept" not in caplog.text
    assert main([*command, "--threshold", "9"]) == 0
    assert f"No pair was kept: the best of 24 pairs scores {max(scores):.6f}, below --threshold 9." in caplog.text


def test_other_options_replace_work_of_which_no_part_is_finished(
    tiny_encoder_dir, bitext, tmp_path, monkeypatch, capsys
):
    path, output = tmp_path / "pairs.tsv", tmp_path / "out.jsonl"
    lines = ["source\ttarget", *(f"{row['source']}\t{row['target']}" for row in bitext)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["filter", str(path), "--source_lang", "de", "--model", str(tiny_encoder_dir), "-o", str(output)]
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
        assert main(command) != 0
    assert main([*command, "--half"]) == 0
    output.unlink()
    with monkeypatch.context() as killed:
        killed.setattr(filtering, "write_corpus", lambda *_: next(iter(())))
        assert main([*command, "--negatives", "1"]) != 0
    capsys.readouterr()
    assert main(command) != 0
    assert "holds the work of another command, which differs in: negatives." in capsys.readouterr().err
