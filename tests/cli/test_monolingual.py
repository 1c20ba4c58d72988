import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from metaphrase.cli import main
from metaphrase.cli.runs import parse_run
from tests.processes import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bitext_file(tmp_path, bitext):
    path = tmp_path / "de-en.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{row['source']}\t{row['target']}\n" for row in bitext))
    return path


@pytest.fixture
def text_file(tmp_path, bitext):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(row["target"] for row in bitext))
    return path


@pytest.fixture
def run(tiny_encoder_dir, bitext_file, tmp_path):
    def run(*more, recipe="amber", output="out"):
        options = ["--model", str(tiny_encoder_dir), "--corpus", str(bitext_file)]
        small = [
            "--max_length",
            "24",
            "--max_steps",
            "3",
            "--per_device_train_batch_size",
            "8",
            "--logging_steps",
            "1",
        ]
        quiet = ["--output_dir", str(tmp_path / output), "--use_cpu", "--report_to", "none"]
        return main(["train", *options, *small, *quiet, "--recipe", str(recipe), *more]), tmp_path / output

    return run


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_amber_trains(run, text_file, streaming):
    status, output = run("--monolingual", str(text_file), "--monolingual_ratio", "0.5", *streaming)
    assert status == 0
    steps = [log for log in json.loads((output / "run.json").read_text())["log_history"] if "wa" in log]
    assert len(steps) == 3
    for step in steps:
        assert step["loss"] == pytest.approx(step["tlm"] + step["sa"] + step["wa"], abs=1e-3)
        assert 0 < step["wa"] < 1
    assert SentenceTransformer(str(output), device="cpu").encode("ja").shape == (32,)


def test_text_that_is_missing_is_asked_for_at_once(run, text_file, monkeypatch, capsys):
    def load_encoder(*args, **kwargs):
        raise AssertionError("loaded something heavy")

    monkeypatch.setattr("metaphrase.training.run.load_encoder", load_encoder)
    for more, message in (
        ([], "Recipe 'amber' reads monolingual text: pass --monolingual"),
        (["--monolingual", str(text_file.with_name("nowhere.txt"))], "does not exist"),
        (
            ["--monolingual", str(text_file), "--monolingual_ratio", "0"],
            "--monolingual_ratio must be a number above 0",
        ),
        (["--monolingual", str(text_file), "--recipe", "tr"], "Recipe 'tr' reads no monolingual text"),
    ):
        assert run(*more)[0] == 2
        assert message in capsys.readouterr().err
    assert not text_file.with_name("out").exists()


def test_amber_without_monolingual_text_is_a_recipe_of_ones_own(run, tmp_path):
    path = tmp_path / "parallel.yaml"
    path.write_text(
        "name: amber-parallel\npooling: mean\nterms:\n"
        "  - objective: tlm\n    args: {mask_rate: 0.15, positions: continuous, layout: pair, segments: true}\n"
        "  - objective: sa\n  - objective: wa\n"
    )
    status, output = run(recipe=path)
    assert status == 0
    assert (output / "modules.json").exists()


def test_the_papers_settings():
    own, paper = (
        parse_run(["--recipe", "amber", *more], prog="metaphrase train", description="", examples=())[0]
        for more in ([], ["--paper_training", "true"])
    )
    assert own.max_length is None
    assert paper.max_length == 128
    assert paper.temperature == 0.7
    assert paper.monolingual_ratio == 1.0
    assert (paper.learning_rate, paper.warmup_steps, paper.max_steps) == (1e-4, 10_000, 1_000_000)
    assert (paper.per_device_train_batch_size, paper.head_learning_rate) == (128, None)
    assert paper.lr_scheduler_type == "linear"


@pytest.mark.slow
def test_the_tutorial_runs(tiny_encoder_dir, bitext_file, text_file, tmp_path):
    done = run_python(ROOT / "trainers" / "amber.py", bitext_file, text_file, tmp_path / "out", tiny_encoder_dir, 3)
    assert done.returncode == 0, done.stderr
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").encode("ja").shape == (32,)
