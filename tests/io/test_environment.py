"""The set-up of a process, its device, and the command that installs an extra, from where the package was installed."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from metaphrase.io.environment import install_command, prepare_process
from metaphrase.io.training_ranges import select_device


@pytest.mark.parametrize(("rank", "level"), [(None, logging.INFO), ("0", logging.INFO), ("1", logging.WARNING)])
def test_of_several_processes_the_first_logs(monkeypatch, rank, level):
    logger = logging.getLogger("metaphrase")
    before = logger.level
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    try:
        prepare_process()
        assert logger.level == level
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(
    ("bf16", "processes", "gpu", "cpu"),
    [
        (False, "1", False, False),
        (True, "1", False, True),
        (False, "2", False, True),
        (True, "1", True, False),
        (False, "2", True, False),
    ],
)
def test_the_cpu_is_selected_where_transformers_requires_it(monkeypatch, bf16, processes, gpu, cpu):
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    arguments = SimpleNamespace(bf16=bf16, use_cpu=False)
    select_device(arguments)
    assert arguments.use_cpu is cpu


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'metaphrase[align]'"),
        ({"url": "file://{folder}", "dir_info": {}}, "pip install '{folder}[align]'"),
        ({"url": "file://{folder}", "dir_info": {"editable": True}}, "pip install '{folder}[align]'"),
        ({"url": "file://{folder}/It%27s", "dir_info": {}}, """pip install '{folder}/It'"'"'s[align]'"""),
        ({"url": "file:///gone/metaphrase", "dir_info": {}}, "pip install 'metaphrase[align]'"),
        (
            {"url": "https://example.org/m.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "pip install 'metaphrase[align] @ git+https://example.org/m.git'",
        ),
    ],
    ids=["index", "clone", "editable", "a quote", "a clone that is gone", "repository"],
)
def test_an_extra_is_installed_from_where_the_package_is_from(tmp_path, monkeypatch, origin, command):
    clone = tmp_path / "my clone"
    (clone / "It's").mkdir(parents=True)
    place = tmp_path / "site" / "metaphrase-9.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: metaphrase\nVersion: 9\n")
    if origin is not None:
        url = origin["url"].replace("{folder}", str(clone).replace(" ", "%20"))
        (place / "direct_url.json").write_text(json.dumps(origin | {"url": url}))
    monkeypatch.syspath_prepend(str(place.parent))
    assert install_command("align") == command.replace("{folder}", str(clone))
