"""Each packaged recipe with results has a card that shows all of them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from metaphrase.io.work_folders import write_part
from metaphrase.training.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("evidence_cards")


@pytest.fixture
def results(tmp_path) -> Path:
    folder, machine = tmp_path / "results", {"cpus": 2, "machine": "x86_64", "threads": 1}

    def measured(path: Path, level: float, **settings) -> None:
        scores = {
            "score": level,
            "lower_is_better": path.stem == "alignment-gold enfr",
            "blocks": " ".join([f"{level}"] * 9),
        }
        write_part(path, {"settings": settings, "hardware": machine, "scores": {path.stem: scores}})

    for recipe in ("dap", "tr", "tr+anchor"):
        settings = {"terms": Recipe.load("dap").to_dict()["terms"], "max_length": 32}
        facts = {
            "steps": 100,
            "batch_size": 64,
            "languages": {"sw": 3},
            "versions": {"torch": "2"},
            "settings": settings,
        }
        for seed in range(3 if recipe == "dap" else 2):
            cell = folder / recipe / f"seed{seed}"
            write_part(cell / "train.json", facts | {"vector": "abc", "hardware": machine})
            for name, level in (("tatoeba", 82.0), ("stsb", 70.0), ("alignment-gold enfr", 9.0)):
                measured(cell / "raw" / f"{name}.json", level, vector="abc")
    for name, level in (("tatoeba", 80.0), ("stsb", 75.0), ("alignment-gold enfr", 8.0)):
        measured(folder / "starter" / "plain" / f"{name}.json", level)
    return folder


def test_a_card_shows_gains_and_losses(script, results, tmp_path):
    (path,) = script.write_cards(results, tmp_path)
    assert path.name == "multilingual-e5-small-dap.md"  # tr has too few seeds, tr+anchor is no packaged recipe
    card = ModelCard.load(path)
    assert card.data.to_dict()["metaphrase"]["task_vectors_sha256"] == dict.fromkeys(range(3), "abc")
    for row in (
        "| Tatoeba 36 | 80.0 | 82.0 | +2.0 [+2.0, +2.0] | 3 | better |",
        "| STS-B | 75.0 | 70.0 | -5.0 [-5.0, -5.0] | 3 | worse |",
        "| AER en–fr ↓ | 8.0 | 9.0 | +1.0 [+1.0, +1.0] | 3 | worse |",
    ):
        assert row in card.text.replace("\\", "")
    assert "better than the starter on 1 of 3 scores, and worse on 2." in card.text
    assert "--only dap --seeds 0 1 2" in card.text
    assert "@inproceedings" in card.text


def test_the_cards_are_up_to_date(script, tmp_path):
    """`python scripts/evidence.py --write` writes them."""
    made = script.write_cards(ROOT / "scripts" / "results" / "evidence" / script.SETTING, tmp_path)
    kept = {path.name: path.read_text() for path in (ROOT / "model_cards").glob("multilingual-e5-small-*.md")}
    assert {path.name: path.read_text() for path in made} == kept
