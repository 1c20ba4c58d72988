from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

FOLDERS = [str(Path(__file__).parents[2] / "scripts"), str(Path(__file__).parents[2] / "scripts" / "benchmarks")]


@pytest.fixture(scope="module")
def load_script() -> Iterator[Callable[[str], ModuleType]]:
    """Import a program by its name; it finds the modules in its folder, as when it is started."""
    before = set(sys.modules)
    sys.path[:0] = FOLDERS
    yield import_module
    for folder in FOLDERS:
        sys.path.remove(folder)
    for name in set(sys.modules) - before:
        if str(Path(getattr(sys.modules[name], "__file__", None) or "").parent) in FOLDERS:
            del sys.modules[name]


@pytest.fixture(scope="module")
def script(load_script, request) -> ModuleType:
    """The program that a module tests: ``scripts/x.py`` is tested by ``test_x.py``."""
    return load_script(request.module.__name__.rpartition("test_")[2])
