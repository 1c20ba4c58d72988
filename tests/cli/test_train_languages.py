"""WACSE from the command line and as a program: links are found first, and languages have vectors where asked for."""

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from metaphrase.cli import main
from tests.processes import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bitext_file(tmp_path, bitext):
    path = tmp_path / "de-en.train.tsv"
    rows = [f"{row['source']}{end}\t{row['target']}{end}\n" for end in ("", " .") for row in bitext]
    path.write_text("source\ttarget\n" + "".join(rows), encoding="utf-8")
    return path


@pytest.fixture
def held_out(tmp_path, bitext):
    folder = tmp_path / "held-out"
    folder.mkdir()
    rows = "".join(f"{row['source']}\t{row['target']}\n" for row in bitext[:15])
    (folder / "de-en.tsv").write_text("source\ttarget\n" + rows, encoding="utf-8")
    return folder


@pytest.fixture
def run(tiny_encoder_dir, bitext_file, tmp_path):
    def run(*more):
        options = {
            "--model": tiny_encoder_dir,
            "--corpus": bitext_file,
            "--output_dir": tmp_path / "out",
            "--recipe": "wacse-language",
            "--max_length": 24,
            "--max_steps": 4,
            "--per_device_train_batch_size": 8,
            "--report_to": "none",
        }
        flat = [str(part) for option in options.items() for part in option]
        return main(["train", *flat, "--use_cpu", *map(str, more)]), tmp_path / "out"

    return run


@pytest.mark.long
def test_one_release_per_language_measured_side_by_side(run, held_out, bitext_file, bitext, capsys):
    status, output = run("--test", held_out, "--dev", bitext_file, "--save_steps", 2, "--head_learning_rate", 0.01)
    assert status == 0
    assert not (output / "modules.json").exists()
    models = {language: SentenceTransformer(str(output / language), device="cpu") for language in ("de", "en")}
    types = [model[0].auto_model.embeddings.token_type_embeddings.weight.detach() for model in models.values()]
    assert (types[0][0] - types[1][0]).abs().max() > 0.05
    assert torch.equal(types[0][1], types[1][1])
    report = json.loads((output / "report.json").read_text())
    after = report["after"]["held-out"]["languages"]["de"]
    embeddings = [
        models[language].encode([row[side] for row in bitext[:15]], convert_to_tensor=True, normalize_embeddings=True)
        for language, side in (("de", "source"), ("en", "target"))
    ]
    found = (embeddings[0] @ embeddings[1].T).argmax(dim=1)
    hits = "".join("01"[int(at == row)] for row, at in enumerate(found.tolist()))
    assert after["source_to_target"]["hits"] == hits
    assert "1" in hits
    assert "held-out" in (output / "en" / "README.md").read_text()
    assert 'SentenceTransformer(f"{folder}/de")' in capsys.readouterr().out
    history = json.loads((output / "run.json").read_text())["log_history"]
    assert sum("eval_dev_mean_accuracy" in log for log in history) == 2


def test_a_test_set_in_an_unlearned_language_is_refused_before_training(run, held_out, capsys):
    (held_out / "sw-en.tsv").write_text("source\ttarget\nmoja\tone\n", encoding="utf-8")
    status, output = run("--test", held_out)
    assert status == 2
    assert "no sw, so the model learns no vector" in capsys.readouterr().err
    assert not list(output.glob("checkpoint-*"))


def test_the_tutorial_runs(tiny_encoder_dir, bitext_file, tmp_path):
    done = run_python(ROOT / "trainers" / "wacse.py", bitext_file, tmp_path / "out", tiny_encoder_dir, 3)
    assert done.returncode == 0, done.stderr
    assert "links per pair on average" in done.stdout
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").encode("ja").shape == (32,)
