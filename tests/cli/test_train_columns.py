"""Recipes that read more of a corpus than its two sentences, from the command line."""

from __future__ import annotations

import json

import pytest
import yaml
from datasets import Dataset

from metaphrase.cli import main

MIX = {
    "name": "three-papers",
    "terms": [
        {"objective": "tr"},
        {"objective": "rtl", "weight": 0.5, "args": {"layers": 1}},
        {"objective": "wtr", "weight": 0.2, "args": {"similarity": "pooled"}},
        {"objective": "wa", "weight": 0.1},
        {"objective": "moco", "weight": 0.1, "args": {"queue_size": 16, "projection_size": 8}},
        {"objective": "word-contrast", "weight": 0.1, "args": {"kind": "soft"}},
    ],
}


@pytest.fixture
def corpus(tmp_path, bitext):
    """The bitext with or without its links."""

    def write(*columns):
        path = tmp_path / "corpus.tsv"
        lines = ["\t".join(columns), *("\t".join(row[column] for column in columns) for row in bitext)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def train(tiny_encoder_dir, tmp_path):
    def run(path, recipe, *more):
        options = ["--model", tiny_encoder_dir, "--corpus", path, "--output_dir", tmp_path / "out", "--recipe", recipe]
        small = ["--max_length", "24", "--max_steps", "4", "--save_steps", "2", "--per_device_train_batch_size", "8"]
        arguments = ["train", *options, *small, "--use_cpu", "--report_to", "none", "--logging_steps", "1", *more]
        return main([str(argument) for argument in arguments]), tmp_path / "out"

    return run


LINKED = ("source", "target", "source_lang", "target_lang", "alignment")


@pytest.mark.long
def test_a_mix_of_papers_needs_nothing_but_yaml(train, corpus, tmp_path):
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(yaml.safe_dump(MIX), encoding="utf-8")
    status, output = train(corpus(*LINKED), recipe)
    assert status == 0
    steps = [log for log in json.loads((output / "run.json").read_text())["log_history"] if "loss" in log]
    assert all(any(log[term["objective"]] > 0 for log in steps) for term in MIX["terms"])


@pytest.mark.long
def test_a_corpus_without_links_is_aligned_once(train, corpus, capsys, caplog):
    path = corpus(*LINKED[:4])
    with caplog.at_level("INFO", logger="metaphrase"):
        status, output = train(path, "wacse")
    assert status == 0
    assert "aligning 24 pairs first, with fast_align" in caplog.text
    (kept,) = output.glob("alignment-*.parquet")
    links = Dataset.from_parquet(str(kept))["alignment"]
    assert len(links) == 24
    assert sum(map(bool, links)) > 12
    written = kept.stat().st_mtime_ns
    caplog.clear()
    with caplog.at_level("INFO", logger="metaphrase"):
        status, _ = train(path, "wacse", "--max_steps", "6", "--resume_from_checkpoint", "true")
    assert status == 0
    assert "aligning" not in caplog.text
    assert kept.stat().st_mtime_ns == written


def test_links_of_the_corpus_are_used_as_they_are(train, corpus, caplog):
    with caplog.at_level("INFO", logger="metaphrase"):
        status, output = train(corpus(*LINKED), "wacse")
    assert status == 0
    assert not list(output.glob("alignment-*"))
    assert "aligning" not in caplog.text


def test_a_stream_must_come_aligned(train, corpus, capsys):
    status, _ = train(corpus(*LINKED[:4]), "wacse", "--streaming")
    assert status == 2
    assert "metaphrase align CORPUS" in " ".join(capsys.readouterr().err.split())
    status, _ = train(corpus(*LINKED), "wacse", "--streaming")
    assert status == 0


def test_back_translations_that_are_missing_are_asked_for(train, corpus, tmp_path, capsys):
    recipe = tmp_path / "bt.yaml"
    terms = [{"objective": "sentence-contrast", "args": {"back_translation": "sample"}}]
    recipe.write_text(yaml.safe_dump({"name": "bt", "terms": terms}), encoding="utf-8")
    status, _ = train(corpus(*LINKED), recipe)
    assert status == 2
    assert "back_translate.py" in " ".join(capsys.readouterr().err.split())
