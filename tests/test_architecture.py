"""What keeps the layout readable; `make check` adds the layers (import-linter) and private access (ruff)."""

import ast
from pathlib import Path

import pytest

import metaphrase

SOURCE = Path(metaphrase.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 600
#: Modules that readers open first, and that stay shorter.
SHORTER = {"training/trainer.py": 350}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_is_not_too_long(path):
    limit = SHORTER.get(path.relative_to(SOURCE).as_posix(), MAX_LINES)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_shorter_modules_exist():
    assert [name for name in SHORTER if not (SOURCE / name).is_file()] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_private_name_is_imported_from_another_module(path):
    imports = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    private = [
        f"{node.module}.{alias.name}"
        for node in imports
        if str(node.module).startswith("metaphrase")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not private
