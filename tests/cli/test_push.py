import json

import pytest

from metaphrase.cli import main
from metaphrase.cli.push import run
from metaphrase.publishing import hub


@pytest.fixture
def pushed(monkeypatch, tmp_path) -> list[tuple]:
    calls = []
    (tmp_path / "out" / "sw").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def push(folder, repo_id, **options):
        calls.append((folder, repo_id, options))
        return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr(hub, "push", push)
    monkeypatch.setattr(hub, "push_corpus", push)
    return calls


DEFAULTS = {"private": False, "revision": None, "commit_message": None, "with_heads": False, "check": True}


def test_the_folder_comes_first(pushed, capsys):
    assert run(["out/sw", "--repo", "acme/sw", "--private", "--revision", "next", "--message", "First"]) == 0
    given = {"private": True, "revision": "next", "commit_message": "First"}
    assert pushed == [("out/sw", "acme/sw", DEFAULTS | given)]
    assert "https://hub/acme/sw/commit/1" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--repo", "--to"])
def test_options_have_defaults(pushed, flag):
    run(["out/sw", flag, "acme/sw"])
    assert pushed == [("out/sw", "acme/sw", DEFAULTS)]


def test_heads_and_checks_are_chosen(pushed):
    run(["out/sw", "--repo", "acme/sw", "--with-heads", "--no-check"])
    assert pushed == [("out/sw", "acme/sw", DEFAULTS | {"with_heads": True, "check": False})]


def test_a_file_is_a_corpus(pushed, tmp_path, capsys):
    path = tmp_path / "aligned.parquet"
    path.touch()
    assert main(["push", str(path), "--repo", "acme/corpus", "--license", "cc0-1.0", "--json"]) == 0
    options = {"private": False, "revision": None, "commit_message": None, "license": "cc0-1.0"}
    assert pushed == [(str(path), "acme/corpus", options)]
    assert json.loads(capsys.readouterr().out)["url"] == "https://hub/acme/corpus/commit/1"
    assert main(["push", str(path), "--repo", "acme/corpus", "--with_heads"]) == 2
    assert main(["push", str(path), "--repo", "acme/corpus", "--no_check"]) == 2
    assert "--no_check applies to releases and task vectors" in capsys.readouterr().err
    assert main(["push", str(tmp_path), "--repo", "acme/sw", "--license", "mit"]) == 2
    assert len(pushed) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--repo", "acme/sw"], "come first: metaphrase push PATH"),
        (["out/sw"], "--repo"),
        (["out/sw", "--repo", "acme/sw", "--bits", "4"], "--bits applies to --vector"),
        (["out/sw", "--repo", "acme/sw", "--vector", "--with_heads"], "--with_heads applies to releases"),
        (["aligned.parqet", "--repo", "acme/corpus", "--license", "cc0-1.0"], "aligned.parqet does not exist. Name"),
        (["vector.safetensors", "--repo", "acme/v"], "vector.safetensors does not exist. Name"),
        (["out/sw", "--repo", "acme/sw", "--token", "hf_x"], "Unknown option --token"),
    ],
)
def test_what_is_missing_or_unknown_is_said(pushed, argv, message, capsys):
    assert main(["push", *argv]) == 2
    assert message in capsys.readouterr().err
    assert pushed == []


@pytest.mark.parametrize(
    ("folder", "options", "reason"),
    [
        ("", [], "is not a release folder"),
        ("runs/sw", [], "does not exist"),
        ("runs/sw", ["--vector"], "does not exist"),
        ("", ["--vector"], "has no readable run.json"),
    ],
)
def test_a_folder_without_a_release_is_one_line(tmp_path, folder, options, reason, capsys):
    (tmp_path / "run.json").write_text('{"model": null}')
    assert main(["push", str(tmp_path / folder), "--to", "acme/sw", *options]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1
    assert reason in lines[0]


def test_help_says_where_the_token_comes_from(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    assert ended.value.code == 0
    assert "HF_TOKEN" in capsys.readouterr().out
