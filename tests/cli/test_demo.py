import json

import yaml

from metaphrase.cli import main
from metaphrase.cli.demo import DATA


def test_the_whole_way_with_a_tiny_encoder(tiny_encoder_dir, tmp_path, capsys):
    small = ["--max_steps", "2", "--per_device_train_batch_size", "8", "--languages", "sw", "tl", "--max_length", "24"]
    where = ["--model", str(tiny_encoder_dir), "--output_dir", str(tmp_path / "demo")]
    assert main(["demo", *where, *small, "--report_to", "none", "--use_cpu"]) == 0
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["comparisons"].keys() == {"demo", "udhr"}
    assert report["comparisons"]["demo"]["languages"].keys() == {"sw", "tl"}
    assert report["run"]["steps"] == 2
    assert sum(file["pairs"] for file in report["run"]["files"]) > 5900
    assert (tmp_path / "demo" / "report.html").exists()
    assert (tmp_path / "demo" / "modules.json").exists()
    printed = capsys.readouterr().out
    assert "model = SentenceTransformer(" in printed


def test_the_demo_is_what_its_configuration_says():
    settings = yaml.safe_load((DATA / "demo.yaml").read_text())
    assert settings["recipe"] == "dap"
    assert settings["vocabulary"] == "english"
    assert settings["freeze_word_embeddings"] is True
    assert len(settings["languages"]) == 8
