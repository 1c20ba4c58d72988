"""Runs of the command line on the tiny encoder. Nothing below the package's root is imported here."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path

import pytest

from metaphrase.cli import main
from tests.conftest import with_every_column
from tests.contracts.shapes import FOLDER, differences, shape_of


@pytest.fixture
def contract(request):
    """Return the differences between the shape of a JSON document and the one that is checked in."""

    def check(name: str, document) -> list[str]:
        path, found = FOLDER / f"{name}.json", shape_of(document)
        if request.config.getoption("--update-contracts"):
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
        return differences(json.loads(path.read_text(encoding="utf-8")), found)

    return check


def command(*arguments: object, status: int = 0) -> str:
    """Run a command in this process.

    Returns:
        What it printed to stdout.
    """
    printed, remarks = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(remarks):
        found = main([str(argument) for argument in arguments])
    assert found == status, remarks.getvalue()
    return printed.getvalue()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, bitext) -> Path:
    """A bitext with every column that any recipe reads."""
    path = tmp_path_factory.mktemp("contract-corpus") / "de-en.train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in with_every_column(bitext)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def test_sets(tmp_path_factory, bitext) -> Path:
    """A folder of test sets in three languages."""
    folder = tmp_path_factory.mktemp("contract-sets") / "held-out"
    folder.mkdir()
    for language, rows in (("de", bitext[:12]), ("fr", bitext[4:16]), ("sw", bitext[8:20])):
        with gzip.open(folder / f"{language}-en.tsv.gz", "wt", encoding="utf-8", newline="\n") as out:
            out.write("source\ttarget\n")
            out.writelines(f"{row['source']} {language}\t{row['target']}\n" for row in rows)
    return folder


@pytest.fixture(scope="session")
def training(tiny_encoder_dir, corpus):
    """The options of a short run."""

    def options(output: Path, recipe: str, **more: object) -> list[str]:
        given = {
            "model": tiny_encoder_dir,
            "corpus": corpus,
            "output_dir": output,
            "recipe": recipe,
            "languages": "de",
            "max_length": 24,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "use_cpu": "true",
            "report_to": "none",
            "retention": "none",
            **more,
        }
        return ["train", *(str(token) for name, value in given.items() for token in (f"--{name}", value))]

    return options
