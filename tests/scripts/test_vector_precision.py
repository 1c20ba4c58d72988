"""The precision of task vectors is measured on any run, and written as a table."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_each_precision_is_a_row(script, tiny_encoder, tiny_encoder_dir, bitext, tmp_path, monkeypatch):
    tuned = copy.deepcopy(tiny_encoder)
    with torch.no_grad():
        for parameter in tuned[0].auto_model.encoder.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    tuned.save_pretrained(str(tmp_path / "run"))
    (tmp_path / "run" / "run.json").write_text(json.dumps({"recipe": {"name": "tr"}, "steps": 3}))
    demo, stsb = tmp_path / "demo", tmp_path / "stsb"
    for folder in (demo, stsb):
        folder.mkdir()
    pairs = "".join(f"{row['source']}\t{row['target']}\n" for row in bitext)
    (demo / "de-en.dev.tsv").write_text(f"source\ttarget\n{pairs}", encoding="utf-8")
    rows = "".join(f"{row['source']},{bitext[at - 1]['source']},{at % 5}\n" for at, row in enumerate(bitext))
    (stsb / "stsb-de-dev.csv").write_text(rows, encoding="utf-8")
    monkeypatch.setattr(script, "DEMO", demo)
    content = script.measure(str(tiny_encoder_dir), str(tmp_path / "run"), [str(stsb)], 10)
    encoders = {row["encoder"]: row for row in content["rows"]}
    sizes = [encoders[f"{bits} bits"]["bytes"] for bits in (16, 8, 4)]
    assert sizes == sorted(sizes, reverse=True)
    assert encoders["16 bits"]["scores"] == pytest.approx(encoders["tuned"]["scores"], abs=1)
    assert encoders["16 bits"]["smallest_cosine"] >= encoders["4 bits"]["smallest_cosine"] > 0.9
    assert list(encoders["base"]["scores"]) == ["demo, accuracy", "stsb, Spearman", "structure, Spearman"]
    assert encoders["base"]["scores"]["structure, Spearman"] == pytest.approx(100)
    assert script.table(content).count("\n| ") == len(content["rows"])
