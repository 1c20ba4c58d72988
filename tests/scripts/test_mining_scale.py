import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "benchmarks")
    yield import_module("mining_scale")
    for name in ("mining_scale", "measuring"):
        del sys.modules[name]


def test_half_of_the_simulated_lines_are_translations(script, tmp_path):
    gold = script.write_texts(100, tmp_path)
    sides = [(tmp_path / name).read_text().splitlines() for name in ("news.sw", "news.en")]
    assert [len(side) for side in sides] == [100, 100]
    assert len(gold) == 50
    for source, target in gold:
        assert (source in sides[0], target in sides[1]) == (True, True)
    shared = [len({w[1:] for w in s.split()} & {w[1:] for w in t.split()}) / len(s.split()) for s, t in gold]
    assert 0.5 < sum(shared) / 50 < 0.9


@pytest.mark.slow
def test_rows_are_measured_once(script, tmp_path, capsys):
    options = ["--results", str(tmp_path), "--plot", str(tmp_path / "plot.svg"), "--work", str(tmp_path / "work")]
    options += ["--tasks", "2", "--workers", "1", "--sizes"]
    script.main([*options, "300"])
    first = json.loads((tmp_path / "mining-scale.json").read_text())["rows"]
    assert [(row["size"], row["index"]) for row in first] == [(300, "exact"), (300, "ivf")]
    for row in first:
        assert row["f1"] > 0.9
        assert row["seconds"] > row["task_seconds"]["embed"] > 0
        assert 2 * 300 * 384 * 2 < row["disk"] < 20e6
        assert row["memory"] > 100e6
    assert first[0]["recall"] is None
    assert 0.5 < first[1]["recall"] <= 1
    script.main([*options, "300", "400", "--indexes", "exact"])
    content = json.loads((tmp_path / "mining-scale.json").read_text())
    assert [row for row in content["rows"] if row["size"] == 300] == first
    assert len(content["rows"]) == 3
    assert "| 400 | exact |" in (tmp_path / "mining-scale.md").read_text()
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
