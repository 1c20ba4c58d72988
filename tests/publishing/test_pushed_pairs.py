"""Pairs that `mine` and `filter` push to a Hub."""

import json
import re
import shlex

import pytest

from metaphrase.cli import main
from metaphrase.mining import workflow
from tests.cli.test_mine import texts  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def mine(texts, tiny_encoder_dir, tmp_path, monkeypatch):  # noqa: F811
    """Mines with further options, and returns the status."""
    monkeypatch.setattr(workflow, "draw_histogram", lambda *args: [])
    command = ["mine", *texts, "--model", str(tiny_encoder_dir), "-o", str(tmp_path / "mined.parquet")]
    return lambda *options: main([*command, *options])


def pushed(hub):
    """The data set of the Hub, and its file of pairs."""
    repository = hub.repositories["dataset", "acme/pairs"]
    return repository, hub.blobs[repository.resolve("main").tree["data/train.parquet"].blob]


def test_mined_pairs_are_pushed(mine, online, tmp_path, capsys):
    assert mine("--push_to_hub", "acme/pairs", "--private", "--license", "cc0-1.0", "--json") == 0
    repository, pairs = pushed(online)
    assert repository.private
    assert pairs == (tmp_path / "mined.parquet").read_bytes()
    card = online.blobs[repository.resolve("main").tree["README.md"].blob].decode()
    assert "license: cc0-1.0" in card
    assert "| score | Score of the pair |" in card
    printed = json.loads(capsys.readouterr().out)
    assert printed["pushed"].startswith(f"{online.url}/datasets/acme/pairs/commit/")
    assert printed["pairs"] > 0


def test_filtered_pairs_are_pushed(online, bitext, tiny_encoder_dir, tmp_path):
    lines = "".join(f"{row['source']}\t{row['target']}\n" for row in bitext)
    (tmp_path / "de-en.tsv").write_text(lines, encoding="utf-8")
    output = tmp_path / "scored.parquet"
    command = ["filter", str(tmp_path / "de-en.tsv"), "--model", str(tiny_encoder_dir), "-o", str(output)]
    assert main([*command, "--score", "cosine", "--push_to_hub", "acme/pairs"]) == 0
    repository, pairs = pushed(online)
    assert pairs == output.read_bytes()
    assert not repository.private


def test_a_failed_push_loses_nothing(mine, online, tmp_path, capsys, fault):
    online.faults.append({"path": "/commit/", "status": 503, "times": 4})
    assert mine("--push_to_hub", "acme/pairs", "--private") == 2
    message = " ".join(capsys.readouterr().err.split())
    mined = (tmp_path / "mined.parquet").read_bytes()
    command = re.search(r"Nothing is lost; push it later with `metaphrase (push [^`]+)`", message)
    assert main(shlex.split(command[1])) == 0
    repository, pairs = pushed(online)
    assert pairs == mined
    assert repository.private
    fault("G3", "the push of mined pairs fails", tried=1, survived=1)


def test_what_cannot_be_pushed_is_refused_before_the_work(mine, online, tmp_path, capsys, monkeypatch):
    slurm = [
        "--executor",
        "slurm",
        "--storage",
        str(tmp_path / "s"),
        "--executor_args",
        "partition=cpu",
        "time=1:00:00",
    ]
    for options, message in [
        (["--push_to_hub", "acme/pairs", "--output", str(tmp_path / "mined.tsv")], "requires an --output that ends in .parquet"),
        (["--push_to_hub", "acme/pairs", *slurm], "push the pairs when they are written: metaphrase push"),
        (
            ["--push_to_hub", "acme/pairs", *slurm, "--output", "my pairs.parquet", "--license", "mit"],
            "metaphrase push 'my pairs.parquet' --repo acme/pairs --license mit",
        ),
        (["--private"], "--private requires --push_to_hub."),
        (["--license", "mit"], "--license requires --push_to_hub."),
        (["--push_to_hub", "pairs of me"], "A repository is named"),
    ]:  # fmt: skip
        assert mine(*options) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    missing = ["none.de", "none.en", "--output", str(tmp_path / "mined.parquet"), "--push_to_hub", "acme/pairs"]
    assert main(["mine", *missing]) == 2
    assert "The file none.de does not exist." in " ".join(capsys.readouterr().err.split())
    assert online.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    assert mine("--push_to_hub", "acme/pairs") == 2
    assert "does not allow HF_TOKEN to write to acme/pairs (403)" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("mined*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.tsv", "-o", "x.parquet"], "No such file"),
        (["{d}", "-o", "x.parquet", "--storage", "s"], "--storage requires --executor"),
    ],
)
def test_no_data_set_is_made_for_a_filter_that_cannot_start(online, bitext_path, capsys, options, message):
    options = [option.format(d=bitext_path) for option in options]
    assert main(["filter", *options, "--push_to_hub", "acme/pairs"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert online.requests == []


def test_work_goes_on_while_the_hub_is_down(mine, online, tmp_path, capsys):
    online.faults.append({"path": "/repos/create", "status": 503, "times": 2})
    assert mine("--push_to_hub", "acme/pairs") == 0
    assert "The work continues, and the push tries again." in " ".join(capsys.readouterr().err.split())
    assert pushed(online)[1] == (tmp_path / "mined.parquet").read_bytes()
