"""Training, measuring and reporting on a machine without a network."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from metaphrase.io.files import PACKAGED_DATA as DATA
from metaphrase.publishing.release import release, verify

ROOT = Path(__file__).parents[2]
RUNNER = "tests.faults.without_network"


@pytest.fixture
def offline(tmp_path):
    """Run commands where nothing can be reached; gives the process and what it tried to reach."""

    def offline(*commands, **environment):
        log = tmp_path / "attempts"
        log.write_text("")
        given = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        done = subprocess.run(
            [sys.executable, "-m", RUNNER, str(log), json.dumps(commands)],
            env={**given, "HF_HOME": str(tmp_path / "hf"), **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return done, log.read_text().splitlines()

    return offline


@pytest.fixture
def pairs(tmp_path):
    """Two hundred pairs to train on and twenty of a test set."""
    found = {}
    for split, count in (("train", 200), ("test", 20)):
        lines = gzip.decompress((DATA / "demo" / f"sw-en.{split}.tsv.gz").read_bytes()).decode().split("\n")
        found[split] = tmp_path / split
        found[split].mkdir()
        (found[split] / "sw-en.tsv").write_text("\n".join(lines[: count + 1]) + "\n", encoding="utf-8")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["1", ""], ids=["HF_HUB_OFFLINE", "no flag"])
def test_train_evaluate_and_report_without_a_network(offline, pairs, tiny_encoder_dir, tmp_path, fault, flag):
    corpus, tests, run = str(pairs["train"] / "sw-en.tsv"), str(pairs["test"]), str(tmp_path / "run")
    model = str(tiny_encoder_dir)
    train = ["train", "--model", model, "--recipe", "dap", "--corpus", corpus, "--test", tests, "--output_dir", run]
    train += ["--max_length", "24", "--max_steps", "3", "--save_steps", "2", "--per_device_train_batch_size", "8"]
    evaluate = ["evaluate", run, "--data", tests, "--baseline", model, "--resamples", "50"]
    done, attempts = offline(
        [*train, "--use_cpu"],
        [*evaluate, "--output_dir", f"{run}/evaluation"],
        ["report", run, "--data", tests, "--resamples", "50"],
        HF_HUB_OFFLINE=flag,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "SentenceTransformer(" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    result = json.loads((tmp_path / "run" / "evaluation" / "results.json").read_text())
    assert result["comparisons"]["test"]["languages"].keys() == {"sw"}
    assert (tmp_path / "run" / "report" / "report.html").stat().st_size > 10_000
    what = "training, card, evaluation and report, every connection refused"
    fault("G6", what + (", HF_HUB_OFFLINE set" if flag else ""), tried=1, survived=int(attempts == []))


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["1", ""], ids=["HF_HUB_OFFLINE", "no flag"])
def test_a_push_without_a_network_says_how_to_push_later(offline, tiny_encoder, tmp_path, fault, flag):
    folder = release(tiny_encoder, tmp_path / "my run", recipe=None)
    push = ["push", str(folder), "--repo", "acme/tiny", "--no_check"]
    done, attempts = offline(push, HF_HUB_OFFLINE=flag, HF_TOKEN="hf_write")
    assert done.returncode == 2, done.stderr[-3000:]
    assert ("HF_HUB_OFFLINE is set" if flag else "could not be reached") in done.stderr
    assert f"push it later with `metaphrase push '{folder}' --repo acme/tiny`" in " ".join(done.stderr.split())
    assert bool(attempts) != bool(flag)
    what = "a push, every connection refused" + (", HF_HUB_OFFLINE set" if flag else "")
    fault("G6", what, tried=1, survived=int(verify(folder, device="cpu") == 0))


def test_the_guard_refuses_what_it_should(tmp_path):
    """The runner sees and refuses a connection, by name and by number, and leaves Unix sockets alone."""
    script = """
import socket, sys, urllib.request
from pathlib import Path
from tests.faults.without_network import refuse
refuse(Path(sys.argv[1]))
with socket.socket() as one:
    for reach in (lambda: urllib.request.urlopen("http://localhost:9"), lambda: one.connect(("127.0.0.1", 9))):
        try:
            reach()
        except OSError as error:
            print(error)
with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
    server.bind(sys.argv[1] + ".socket")
    server.listen()
    client.connect(sys.argv[1] + ".socket")
    print("connected")
"""
    log = tmp_path / "attempts"
    done = subprocess.run(
        [sys.executable, "-c", script, str(log)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("Network is unreachable") == 2
    assert done.stdout.endswith("connected\n")
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["socket.getaddrinfo", "socket.connect"]
