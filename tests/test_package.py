import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import metaphrase
from metaphrase.io.environment import prepare_process

SOURCE = Path(metaphrase.__file__).parent
ROOT = Path(__file__).parents[1]
MODULES = sorted(
    "metaphrase" + "".join(f".{part}" for part in path.relative_to(SOURCE).with_suffix("").parts if part != "__init__")
    for path in SOURCE.rglob("*.py")
)


def test_every_public_name_can_be_imported():
    assert metaphrase.__all__ == sorted(metaphrase.__all__)
    for name in metaphrase.__all__:
        assert getattr(metaphrase, name).__doc__ or name == "OBJECTIVES", name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        metaphrase.nothing  # noqa: B018


def test_the_type_checkers_view_is_the_same():
    source = (SOURCE / "__init__.py").read_text()
    for name, home in metaphrase._HOMES.items():
        line = next(line for line in source.splitlines() if f"from metaphrase.{home} import" in line and name in line)
        assert line


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    """Each module is imported in a fork of a process that has imported the libraries, but nothing of this package."""
    program = """
import importlib, os, sys
for library in ("torch", "transformers", "sentence_transformers", "datasets", "matplotlib", "mteb", "scipy.stats"):
    importlib.import_module(library)
for module in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        importlib.import_module(module)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(module)
"""
    command = [sys.executable, "-c", program, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_bundled_data_is_small_and_noted():
    data = SOURCE / "data"
    assert sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) < 2_500_000
    assert (data / "demo" / "NOTICE.md").exists()
    assert (data / "udhr" / "NOTICE.md").exists()


@pytest.mark.parametrize(
    "path",
    [
        *(SOURCE / "cli" / name for name in ("__init__.py", "align.py", "mine.py", "push.py")),
        *(path for path in (ROOT / "trainers").glob("*.py") if path.stem != "train"),
        *(
            path
            for path in (ROOT / "scripts").glob("*.py")
            if re.search(r"^import torch$.*__main__", path.read_text(), re.M | re.S)
        ),
    ],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_whoever_starts_a_process_keeps_it_out_of_denormal_numbers(path):
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert called & {"torch.set_flush_denormal", "flush_denormals", "prepare_process", "main", "run"}


def test_a_process_is_kept_out_of_denormal_numbers():
    assert torch.set_flush_denormal(False)
    assert torch.tensor([1e-39]) * 1 > 0
    prepare_process()
    assert torch.tensor([1e-39]) * 1 == 0


def test_a_process_keeps_few_kernels_of_bfloat16_unless_told_otherwise(monkeypatch):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    prepare_process()
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    prepare_process()
    assert os.environ[name] == "64"


def test_the_container_installs_and_runs_the_demo():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    steps = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    image = re.fullmatch(r"python:(\d+\.\d+)-slim", next(value for name, value in steps if name == "FROM"))
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {name for name, _ in steps} == {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    assert f'requires-python = ">={image[1]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert steps.index(["COPY", ". ."]) < steps.index(["RUN", "make install"])
    assert steps[-1] == ["CMD", '["make", "demo"]']
    assert {"install", "demo"} <= targets
    assert not {"Makefile", "README.md", "configs", "src", "scripts"} & set(ignored)  # setuptools reads the README
