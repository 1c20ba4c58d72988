import json

import pytest
import torch
import yaml

from metaphrase.cli import main
from metaphrase.cli.demo import parse, title_of
from metaphrase.io.files import PACKAGED_DATA as DATA
from metaphrase.training.baseline import read_test_sets, split_retention
from metaphrase.training.configuration import configured_recipe
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import list_recipes
from tests.conftest import small

UDHR = {path.name.removesuffix("-en.tsv.gz") for path in (DATA / "udhr").glob("*.tsv.gz")}
SAMPLE = set(yaml.safe_load((DATA / "demo.yaml").read_text(encoding="utf-8"))["retention_languages"])


@pytest.mark.long
def test_the_whole_way_with_a_tiny_encoder(tiny_encoder_dir, tmp_path, capsys):
    small = ["--max_steps", "2", "--per_device_train_batch_size", "8", "--languages", "sw", "tl", "--max_length", "24"]
    where = ["--model", str(tiny_encoder_dir), "--output_dir", str(tmp_path / "demo")]
    assert main(["demo", *where, *small, "--report_to", "none", "--use_cpu"]) == 0
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["comparisons"].keys() == {"demo", "udhr"}
    assert report["comparisons"]["demo"]["languages"].keys() == {"sw", "tl"}
    assert report["comparisons"]["udhr"]["languages"].keys() == {"sw", "tl"}
    retained = report["analysis"]["retention"]
    assert retained.keys() == {"udhr"}
    assert {row["language"] for row in retained["udhr"]["languages"]} == SAMPLE
    assert report["run"]["steps"] == 2
    assert sum(file["pairs"] for file in report["run"]["files"]) > 5900
    assert (tmp_path / "demo" / "report.html").exists()
    assert (tmp_path / "demo" / "modules.json").exists()
    printed = capsys.readouterr().out
    assert "model = SentenceTransformer(" in printed
    assert "udhr, 20 languages not trained on: " in printed
    card = (tmp_path / "demo" / "README.md").read_text(encoding="utf-8")
    results, retention = card.split("### Leakage")[0].split("### Retention")
    (row,) = [line for line in retention.splitlines() if line.startswith("| other languages")]
    assert row.startswith("| other languages: udhr | 20 | ")
    assert retained["udhr"]["verdict"] in row
    assert len([line for line in results.splitlines() if line.startswith(("| demo", "| udhr"))]) == 6


def test_the_demo_is_what_its_configuration_says():
    settings = yaml.safe_load((DATA / "demo.yaml").read_text())
    assert (settings["recipe"], settings["merge"], settings["debias"]) == ("metaphrase", 0.5, 20)
    assert settings["freeze_word_embeddings"] is True
    assert len(settings["languages"]) == 8
    assert len(SAMPLE) == 20
    assert UDHR - set(settings["languages"]) > SAMPLE


@pytest.mark.parametrize(
    ("arguments", "languages"),
    [([], "8 languages"), (["--languages", "sw"], "1 language"), (["--languages", "sw,tl"], "2 languages")],
)
def test_the_report_is_titled_with_its_languages(arguments, languages):
    assert title_of(parse(arguments)[0]) == f"metaphrase demo: metaphrase on {languages}"


def test_retention_can_be_measured_on_all_languages():
    config, _ = parse(["--retention_languages", "all"])
    sets = split_retention(read_test_sets(config), config, configured_recipe(config))
    assert sets.retention["udhr"].keys() == UDHR - set(config.languages)


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_the_demo_runs_with_every_recipe(name, tiny_encoder, tmp_path):
    chosen, _ = parse(["--recipe", name, "--output_dir", str(tmp_path)])
    recipe = small(configured_recipe(chosen))
    loss = AlignmentLoss(
        tiny_encoder, recipe, max_length=24, english_ids=torch.tensor([5, 6, 7]), languages=["en", "sw"]
    )
    assert loss.recipe.name == name
    assert (chosen.merge, chosen.debias) == ((0.5, 20) if name == "metaphrase" else (None, 0))
