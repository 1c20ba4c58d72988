import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def test_half_of_the_simulated_lines_are_translations(script, tmp_path):
    gold = script.write_texts(100, tmp_path)
    sides = [(tmp_path / name).read_text().splitlines() for name in ("news.sw", "news.en")]
    assert [len(side) for side in sides] == [100, 100]
    assert len(gold) == 50
    for source, target in gold:
        assert (source in sides[0], target in sides[1]) == (True, True)
    shared = [len({w[1:] for w in s.split()} & {w[1:] for w in t.split()}) / len(s.split()) for s, t in gold]
    assert 0.5 < sum(shared) / 50 < 0.9


def test_faiss_by_hand_finds_the_same_pairs(script, tmp_path):
    peers = sys.modules["mining_peers"]
    rng = np.random.default_rng(0)
    source_nh = rng.normal(size=(300, 16)).astype(np.float32)
    target_nh = source_nh[::-1] + rng.normal(size=source_nh.shape).astype(np.float32)
    for side, rows_nh in (("source", source_nh), ("target", target_nh)):
        np.save(tmp_path / f"{side}.npy", rows_nh / np.linalg.norm(rows_nh, axis=1, keepdims=True))
    ours, theirs, approximate = (
        peers.ENGINES[engine](tmp_path) for engine in ("metaphrase, exact", "faiss, exact", "faiss, stopes' index")
    )
    assert len(ours[0]) > 200
    assert {*zip(*ours[1:], strict=True)} == {*zip(*theirs[1:], strict=True)} == {*zip(*approximate[1:], strict=True)}
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)


def test_durations_are_estimated_from_the_largest_row(script):
    stages = {"embed": 30.0, "search": 40.0}
    rows = [
        {"index": "exact", "size": 1000, "seconds": 1.0, "task_seconds": {"search": 0.1}},
        {"index": "exact", "size": 10_000, "seconds": 100.0, "task_seconds": stages},
    ]
    assert script.estimate(rows, 100_000, 2) == 80 * 10 + 20 * 100
    assert script.estimate([{"engine": "metaphrase, ivf", "size": 100, "seconds": 1.0}], 10_000, 2) == 1000
    assert script.estimate([], 100_000, 2) == pytest.approx(30 + 500 + 4e10 * 384 / 1e11)


def test_long_rows_are_skipped(script, tmp_path, capsys):
    options = script.Options(sizes=[], results=str(tmp_path), most_hours=0)
    script.Program(options).run(1000, script.SIMULATED, lambda: pytest.fail("the texts were embedded"))
    assert "1,000 lines, faiss, exact: skipped, about 0.0 hours (--most_hours)" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_kept_rows_are_shown_and_not_measured_again(script, tmp_path):
    options = script.Options(sizes=[], indexes=["exact"], results=str(tmp_path), plots=str(tmp_path / "plots"))
    program = script.Program(options)
    row = {"size": 20_000, "seconds": 8.0, "memory": 2e9, "f1": 0.9}
    stages = {"embed": 1.0, "search": 2.0}
    own = {"index": "exact", "task_seconds": stages, "disk": 1e9, "index_bytes": 0, "recall": None, "pairs": 10}
    program.content["rows"].append(row | own)
    for engine, seconds in zip(script.ENGINES, (4.0, 2.0, 6.0, 8.0), strict=True):
        program.content["peers"].append(row | {"texts": script.SIMULATED, "engine": engine, "seconds": seconds})
    script.keep(program.content, options)
    again = script.Program(options)
    assert again.missing(20_000, script.SIMULATED) == []
    assert [name for _, name, _ in again.missing(10_000, script.SIMULATED)] == ["exact", *list(script.ENGINES)[:3]]
    table = (tmp_path / "mining-peers.md").read_text()
    assert "| simulated | 20,000 | metaphrase, exact | 4.0 |  | 2.00 | 0.900 |" in table
    assert "| simulated | 20,000 | faiss, exact | 6.0 | 1.50 | 2.00 | 0.900 |" in table
    assert "| simulated | 20,000 | faiss, stopes' index | 8.0 | 4.00 | 2.00 | 0.900 |" in table
    assert "| 20,000 | exact | 0.1 |" in (tmp_path / "mining-scale.md").read_text()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"mining.svg", "mining-peers.svg"}


def test_rows_of_another_machine_or_setting_are_not_joined(script, tmp_path, capsys):
    kept = {"facts": script.facts("cpu", 1) | {"date": "2020-01-01"}, "tasks": 8, "workers": 2}
    kept |= {"rows": [{"size": 10_000, "index": "exact"}], "peers": []}
    path = tmp_path / "mining-scale.json"
    path.write_text(json.dumps(kept))
    script.Program(script.Options(results=str(tmp_path)))
    before = path.write_text(json.dumps(kept | {"facts": kept["facts"] | {"device": "another CPU"}}))
    assert script.main(["--results", str(tmp_path), "--workers", "1"]) == 2
    assert "measured with device another CPU, workers 2, which differs here" in capsys.readouterr().err
    assert path.stat().st_size == before


def test_plots_of_a_trial_do_not_replace_those_of_the_page(script, tmp_path):
    options = script.Options(results=str(tmp_path))
    row = {"size": 20, "index": "exact", "seconds": 8.0, "memory": 2e9, "f1": 0.9, "task_seconds": {}}
    row |= {"disk": 1e9, "index_bytes": 0, "recall": None, "pairs": 10}
    script.keep({"rows": [row], "peers": [], "facts": script.facts("cpu", 1), "workers": 2}, options)
    assert (tmp_path / "mining.svg").is_file()


@pytest.mark.slow
def test_rows_are_measured_once(script, tmp_path, capsys):
    options = ["--results", str(tmp_path), "--plots", str(tmp_path), "--work", str(tmp_path / "work")]
    options += ["--tasks", "3", "--workers", "1", "--sizes"]  # one task has no shard
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
    assert [row["engine"] for row in content["peers"] if row["size"] == 300] == list(script.ENGINES)[:3]
    assert all(row["f1"] > 0.9 for row in content["peers"])
    assert "| simulated | 400 | faiss, exact |" in (tmp_path / "mining-peers.md").read_text()
    for name in ("mining.svg", "mining-peers.svg"):
        assert (tmp_path / name).read_text().startswith("<?xml")
    assert not [*(tmp_path / "work").glob("*-embedded")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_processes_share_counts_once(script):
    code = (
        "import os, time; data = b'x' * 200_000_000; child = os.fork(); time.sleep(2); child and print(os.wait()[1])"
    )
    printed, peak = script.measured([sys.executable, "-c", code])
    assert printed == "0\n"
    assert 200_000_000 < peak < 300_000_000
