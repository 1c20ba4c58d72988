"""The commands that an installation of the package makes."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from metaphrase.cli import main

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "scripts"
]


@pytest.mark.parametrize("name", ["metaphrase", "hf-metaphrase"])
def test_both_scripts_are_the_command(name, capsys):
    script = EntryPoint(name, SCRIPTS[name], "console_scripts").load()
    assert script is main
    assert script(["--help"]) == 0
    assert "usage: metaphrase COMMAND" in capsys.readouterr().out
