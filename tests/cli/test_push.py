import pytest

from metaphrase import hub
from metaphrase.cli import main
from metaphrase.cli.push import run


@pytest.fixture
def pushed(monkeypatch) -> list[tuple]:
    calls = []

    def push(folder, repo_id, **options):
        calls.append((folder, repo_id, options))
        return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr(hub, "push", push)
    return calls


def test_the_folder_comes_first(pushed, capsys):
    assert run(["out/sw", "--to", "acme/sw", "--private", "--revision", "next", "--message", "First"]) == 0
    assert pushed == [("out/sw", "acme/sw", {"private": True, "revision": "next", "commit_message": "First"})]
    assert "https://hub/acme/sw/commit/1" in capsys.readouterr().out


def test_options_have_defaults(pushed):
    run(["out/sw", "--to", "acme/sw"])
    assert pushed == [("out/sw", "acme/sw", {"private": False, "revision": None, "commit_message": None})]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--to", "acme/sw"], "Name its folder first"),
        (["out/sw"], "--to"),
        (["out/sw", "--to", "acme/sw", "--token", "hf_x"], "no option --token"),
    ],
)
def test_what_is_missing_or_unknown_is_said(pushed, argv, message, capsys):
    assert main(["push", *argv]) == 2
    assert message in capsys.readouterr().err
    assert pushed == []


def test_a_folder_without_a_release_is_one_line(tmp_path, capsys):
    assert main(["push", str(tmp_path), "--to", "acme/sw"]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1
    assert "is no release" in lines[0]


def test_help_says_where_the_token_comes_from(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    assert ended.value.code == 0
    assert "HF_TOKEN" in capsys.readouterr().out
