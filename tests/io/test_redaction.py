import os
from pathlib import Path

import pytest

from metaphrase.io.redaction import redact

TEXT = "Sentences of https://example.org/home/lin. See /home/lin/data, /home/linda and /root."


def test_the_home_folder_is_taken_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/lin")
    assert redact("in /home/lin/data, /home/linda and /home/lin") == "in ~/data, /home/linda and ~"


@pytest.mark.skipif(os.name == "nt", reason="Windows names the home folder in USERPROFILE, not HOME")
@pytest.mark.parametrize("home", ["/", "//", "", ".", "data"])
def test_a_home_that_is_nobodys_own_takes_nothing_out(monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    assert redact(TEXT) == TEXT


def test_nobody_needs_a_home(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert redact(f"{TEXT} hf_0123456789abcdefghij") == f"{TEXT} hf_***"
