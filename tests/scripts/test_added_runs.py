"""The sums of what two runs changed are measured with several weights, and the best are shown."""

import json
from argparse import Namespace
from copy import deepcopy

import pytest
import torch

from metaphrase.exceptions import UsageError
from metaphrase.merging import TaskVector

RUN = {"recipe": {"name": "tr"}, "steps": 100, "batch_size": 64, "seed": 1, "model": "starter"}


@pytest.mark.parametrize("finish", [{"merge": {"alpha": 0.5}}, {"debias": {"directions": 20}}])
def test_runs_must_be_released_as_trained(script, tmp_path, finish):
    run = RUN | {"corpus": {"languages": {"sw": 3, "et": 4}}, "merge": {"alpha": 1.0}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert script.facts_of(tmp_path) | {"recipe": RUN["recipe"]} == RUN | {"languages": 2}
    (tmp_path / "run.json").write_text(json.dumps(run | finish))
    with pytest.raises(UsageError, match="is merged or debiased"):
        script.facts_of(tmp_path)


def test_a_sum_has_the_changes_of_both_runs(script, tiny_encoder, tmp_path, monkeypatch):
    """The measure is the value of one weight, which both runs move."""
    monkeypatch.setattr(script, "load_encoder", lambda name: tiny_encoder)
    name = next(iter(dict(tiny_encoder.named_parameters())))

    def moved(by):
        model = deepcopy(tiny_encoder)
        with torch.no_grad():
            dict(model.named_parameters())[name].add_(by)
        return TaskVector.between(tiny_encoder, model)

    def weight(model):
        return {"x": [dict(model.named_parameters())[name].detach().mean().numpy()]}

    class Data:
        def embed(self, model):
            return weight(model)

        def measures(self, embedded, original, directions):
            return {"moved": float(embedded["x"][0] - original["x"][0])}

    options = Namespace(output=tmp_path, bf16=False)
    for weights, wanted in (((0.0, 0.0), 0.0), ((1.0, 0.0), 1.0), ((0.5, 0.35), 0.5 + 0.35 * 0.2)):
        rows = script.measured(weights, [moved(1.0), moved(0.2)], Data(), options)
        assert [row["moved"] for row in rows] == pytest.approx([wanted] * len(script.DIRECTIONS), abs=1e-5)
        assert rows[0]["weights"] == list(weights)
    monkeypatch.setattr(script, "load_encoder", lambda name: pytest.fail("it was measured again"))
    assert script.measured((1.0, 0.0), [], Data(), options)[0]["moved"] == pytest.approx(1.0, abs=1e-5)


def test_the_table_has_the_best_number_of_directions_of_each_sum(script):
    start = {"weights": [0, 0], "directions": 0, "hardware": {"cpus": 2, "machine": "x86_64"}}
    start |= dict.fromkeys(script.COLUMNS, 50.0)
    kept = start | {"weights": [0.5, 0.5], "directions": 20, "pairs": 60.0}
    gained = start | {"weights": [0.5, 0.5], "directions": 30, "pairs": 70.0, "similarity": 49.0}
    best = start | {"weights": [0.7, 0.35], "directions": 40, "answers": 60.0}
    runs = [{"recipe": "tr", "steps": steps, "batch_size": 64, "languages": 8, "seed": 1} for steps in (3000, 100)]
    content = {
        "runs": runs,
        "bf16": True,
        "rows": [start, kept, gained, kept | {"directions": 0, "pairs": 55.0}, best],
    }
    lines = script.table(content).splitlines()
    assert [line.split(" | ")[:3] for line in lines if line.startswith("| 0")] == [
        ["| 0", "0", "0"],
        ["| 0.5", "0.5", "20"],
        ["| 0.5", "0.5", "30"],
        ["| 0.7", "0.35", "40"],
    ]
    assert "The first run is 3,000 steps of 64 pairs in 8 languages (recipe tr, seed 1)" in lines[0]
    assert "in bfloat16" in lines[0]
