"""A release, and a Hub on loopback to push it to."""

from __future__ import annotations

import copy
import shutil
import time
from pathlib import Path

import pytest

from metaphrase.publishing.release import release
from tests.hub_server import Hub, reach, serve_hub

RECIPE = {"name": "tr", "terms": [{"objective": "tr", "weight": 1.0}]}


@pytest.fixture(scope="module")
def template(tmp_path_factory, _encoder) -> Path:
    return release(copy.deepcopy(_encoder), tmp_path_factory.mktemp("template") / "out", recipe=RECIPE)


@pytest.fixture
def released(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "out"))


@pytest.fixture
def hub():
    with serve_hub() as server:
        yield server


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds of each sleep; nothing sleeps."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.fixture
def online(hub: Hub, monkeypatch, tmp_path, waits) -> Hub:
    """Connects this process to the loopback Hub, without Xet, with the token of `tester`."""
    reach(hub, monkeypatch.setattr, tmp_path / "client")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    return hub
