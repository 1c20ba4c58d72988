"""The reference lists every public name, command, option and key, and nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import metaphrase
import metaphrase.exceptions
from metaphrase.cli import COMMANDS
from metaphrase.cli.options import options_of
from metaphrase.evaluation.transfer import ClassificationOptions, FineTuningArguments
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import parameters_of
from metaphrase.training.configuration import RunConfig
from metaphrase.training.recipe import SETTINGS, Recipe

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
LISTED = [name for page in PAGES.values() for name in re.findall(r"^::: (metaphrase\.[\w.]+)$", page, re.MULTILINE)]


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return {name: part() for name, part in runpy.run_path(str(ROOT / "docs" / "generated.py"))["GENERATED"].items()}


# --------------------------------------------------------------------------------------------------------------- Python


def test_only_public_names_are_listed():
    assert len(LISTED) == len(set(LISTED)) > 200
    assert [name for name in LISTED if "._" in name or name.startswith("metaphrase.cli")] == []
    assert [name for name in LISTED if not inspect.getdoc(resolve_name(name))] == []


def imported(source: str, modules: str) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and re.match(modules, str(node.module)):
            yield from (
                (alias.name, getattr(importlib.import_module(node.module), alias.name)) for alias in node.names
            )


def signatures(named: Any) -> Iterator[Any]:
    """A function, or the attributes, constructor, methods and properties of a class."""
    yield named
    if inspect.isclass(named):
        yield named.__init__
        for name, value in vars(named).items():
            if not name.startswith("_"):
                value = getattr(value, "fget", getattr(value, "__func__", value))
                yield from [value] if inspect.isfunction(value) else []


def classes(hint: Any) -> Iterator[type]:
    """The classes of this package in a type hint."""
    if inspect.isclass(hint) and hint.__module__.startswith("metaphrase."):
        yield hint
    for part in hint if isinstance(hint, list) else get_args(hint):
        yield from classes(part)


def test_every_public_name_is_listed():
    """Public are the names of the package, of the pages, of objectives and commands, and the classes in their signatures."""
    public = {name: getattr(metaphrase, name) for name in metaphrase.__all__ if name != "OBJECTIVES"}
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            public |= {name: found for name, found in imported(code, "metaphrase[.]") if callable(found)}
    public |= {cls.__name__: cls for cls in OBJECTIVES.values()}
    for name in COMMANDS:
        source = (ROOT / "src" / "metaphrase" / "cli" / f"{name}.py").read_text(encoding="utf-8")
        options = imported(source, r"metaphrase\.(?!cli|io)")
        public |= {name: found for name, found in options if re.search("(Options|Config)$", name)}
    listed = [resolve_name(name) for name in LISTED]
    for named in filter(callable, listed):
        for signature in signatures(named):
            try:
                hints = get_type_hints(signature)
            except NameError:  # imported for type checkers only
                continue
            shown = [hint for name, hint in hints.items() if not name.startswith("_")]
            public |= {cls.__name__: cls for hint in shown for cls in classes(hint)}
    public = {name: cls for name, cls in public.items() if cls.__module__ != "metaphrase.exceptions"}
    found = {id(one) for one in listed}
    assert sorted(f"{cls.__module__}.{name}" for name, cls in public.items() if id(cls) not in found) == []


# ------------------------------------------------------------------------------------------------------- generated parts


def test_every_generated_part_is_on_a_page(generated):
    marked = [name for page in PAGES.values() for name in re.findall(r"^<!-- generated: (\w+) -->$", page, re.M)]
    assert sorted(marked) == sorted(generated)


def test_the_site_replaces_the_marks(monkeypatch):
    monkeypatch.setattr(runpy, "run_path", lambda path: {"GENERATED": {"commands": lambda: f"from {Path(path).name}"}})
    hook = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(hook)
    hook.loader.exec_module(module)
    page = type("Page", (), {"file": type("File", (), {"src_uri": "reference/commands.md"})})
    given = "a\n<!-- generated: commands -->\nb"
    assert module.on_page_markdown(given, page=page, config=None, files=None) == "a\nfrom generated.py\nb"


def test_every_command_has_every_option(generated):
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", generated["commands"], re.DOTALL | re.MULTILINE))
    assert list(sections) == list(COMMANDS)
    seen = 0
    for name, text in sections.items():
        assert f"usage: metaphrase {name}" in text
        module = importlib.import_module(f"metaphrase.cli.{name}")
        source = Path(module.__file__).read_text(encoding="utf-8")
        types = {cls for key, cls in vars(module).items() if re.search("(Options|Config)$", key) and key in source}
        for option in {one.name for cls in types for one in options_of(cls)}:
            assert re.search(rf"^  (-\w, )?--{option}\b", text, re.MULTILINE), (name, option)
            seen += 1
    assert seen > 400


def choices(hint: Any) -> list[str]:
    """The words and numbers that a type hint allows."""
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    return [word for part in get_args(hint) for word in choices(part)]


def test_the_help_of_every_option_names_its_choices():
    """``--help`` shows no list of them."""
    unnamed = []
    for name in COMMANDS:
        module = importlib.import_module(f"metaphrase.cli.{name}")
        types = {cls for key, cls in vars(module).items() if re.search("(Options|Config)$", key)}
        for cls in filter(is_dataclass, types):
            hints = get_type_hints(cls)
            for one in options_of(cls):
                words = [word for word in choices(hints[one.name]) if word not in one.metadata.get("help", "")]
                unnamed += [f"{name} --{one.name} {word}" for word in words]
    assert unnamed == []


def test_every_key_of_yaml_files_is_explained(generated):
    objectives = {key for cls in OBJECTIVES.values() for key in parameters_of(cls)}
    options = {one.name for one in options_of(RunConfig)}
    keys = {"recipe_keys": set(Recipe.__dataclass_fields__), "training_keys": set(SETTINGS)}
    for part, expected in (keys | {"objective_keys": objectives, "run_keys": options}).items():
        rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .*? \| (.*) \|$", generated[part], re.MULTILINE)
        assert expected <= {name for name, _, _ in rows}
        assert [name for name, kind, meaning in rows if not (kind and meaning)] == []


#: Names of languages, test sets, files and quantiles, which are keys too.
NAMES = re.compile(
    r"\d+|ar|de|en|fi|fr|hi|ru|sw|th|zh|de-en|.*\..*|held-out.*|sts\w+|xnli.*|similarity structure|without English"
)


def keys_of(shape: Any) -> Iterator[str]:
    for item in shape if isinstance(shape, list) else []:
        yield from keys_of(item)
    for key, value in shape.items() if isinstance(shape, dict) else []:
        name = key.removesuffix("?")
        yield from [] if NAMES.fullmatch(name) else [name]
        yield from [] if name in ("recipe", "args", "terms", "transforms") else keys_of(value)


def test_every_document_and_key_of_json_is_explained(generated):
    shapes = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "tests/contracts").glob("*.json")
    }
    above, _, keys = PAGES["json"].partition("## Keys")
    documents = {name for cell in re.findall(r"^\| (`.*?) \|", above, re.MULTILINE) for name in cell.split("`")[1::2]}
    assert documents == shapes.keys() == set(re.findall(r"^### `(.*)`$", generated["documents"], re.MULTILINE))
    explained = {name for cell in re.findall(r"^\| (`.*?) \|", keys, re.MULTILINE) for name in cell.split("`")[1::2]}
    options = {one.name for cls in (ClassificationOptions, FineTuningArguments) for one in fields(cls)}
    for name in COMMANDS:
        module = importlib.import_module(f"metaphrase.cli.{name}")
        for key, cls in vars(module).items():
            options |= {one.name for one in options_of(cls)} if re.search("(Options|Config)$", key) else set()
    found = {key for name, shape in shapes.items() if not name.startswith("recipes") for key in keys_of(shape)}
    assert sorted(found - explained - options) == []
    assert sorted(explained - found) == []
