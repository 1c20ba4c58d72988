"""Parts of the reference that are written when the site is built: commands, keys of YAML files, shapes of JSON documents."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from metaphrase.cli import COMMANDS, main
from metaphrase.cli.options import options_of
from metaphrase.io.arguments import describe_type, hints_of
from metaphrase.io.configuration import default_of
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import parameters_of
from metaphrase.training.configuration import RunConfig
from metaphrase.training.recipe import SETTINGS, Recipe, Schedule, Term

CONTRACTS = Path(__file__).parents[1] / "tests" / "contracts"


def commands() -> str:
    """The help of every command, with all of its options."""
    parts = []
    for name, summary in COMMANDS.items():
        text = _help(name, "--help")
        text = _help(name, "--help-all") if "--help-all" in text else text
        parts.append(f"## {name}\n\n{summary}.\n\n```text\n{text}```\n")
    return "\n".join(parts)


def recipe_keys() -> str:
    """The keys of a recipe, a term and a schedule."""
    parts = []
    for title, cls in (("A recipe", Recipe), ("A term", Term), ("A weight that changes", Schedule)):
        hints, texts = hints_of(cls), described(cls)
        rows = [(one.name, hints[one.name], default_of(one), texts[one.name]) for one in fields(cls)]
        parts.append(f"### {title}\n\n{_table(rows)}")
    return "\n".join(parts)


def training_keys() -> str:
    """The settings that the ``training`` section of a recipe may contain."""
    options = {one.name: one for one in options_of(RunConfig)}
    return _table((name, hint, MISSING, options[name].metadata["help"]) for name, hint in SETTINGS.items())


def objective_keys() -> str:
    """The ``args`` of every objective."""
    parts = []
    for name in sorted(OBJECTIVES):
        cls = OBJECTIVES[name]
        hints, texts = parameters_of(cls), described(cls)
        defaults = {one.name: one.default for one in inspect.signature(cls).parameters.values()}
        rows = [(key, hint, defaults.get(key, MISSING), texts.get(key, "")) for key, hint in hints.items()]
        parts.append(f"### `{name}`\n\n{_table(rows)}")
    return "\n".join(parts)


def run_keys() -> str:
    """The keys of a run's configuration."""
    hints = hints_of(RunConfig)
    return _table((one.name, hints[one.name], default_of(one), one.metadata["help"]) for one in options_of(RunConfig))


def documents() -> str:
    """The keys and types of every JSON document, of which equal parts are shown once."""
    parts = []
    for path in sorted(CONTRACTS.glob("*.json")):
        shape = yaml.safe_dump(_once(json.loads(path.read_text(encoding="utf-8"))), sort_keys=False, width=100)
        parts.append(f"### `{path.stem}`\n\n```yaml\n{shape}```\n")
    return "\n".join(parts)


#: What replaces the line ``<!-- generated: NAME -->`` of a page.
GENERATED: Mapping[str, Callable[[], str]] = {
    one.__name__: one for one in (commands, recipe_keys, training_keys, objective_keys, run_keys, documents)
}


def described(cls: type) -> dict[str, str]:
    """The texts of the attributes and arguments in the docstrings of a class, its constructor and its bases."""
    texts: dict[str, str] = {}
    for doc in [inspect.cleandoc(one.__doc__ or "") for base in cls.__mro__ for one in (base, base.__init__)]:
        for section in re.findall(r"^(?:Args|Attributes):\n((?: +.*\n?|\n)+)", doc, re.MULTILINE):
            for name, text in re.findall(r"^    (\w+)(?: \([^)]*\))?: (.*(?:\n {8}.*)*)", section, re.MULTILINE):
                texts.setdefault(name, " ".join(text.split()))
    return texts


def _help(*argv: str) -> str:
    printed = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "100"}), redirect_stdout(printed), suppress(SystemExit):
        main(argv)
    return printed.getvalue()


def _table(rows: Iterable[tuple[str, Any, Any, str]]) -> str:
    """A table of keys with type, default and meaning."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, hint, default, text in rows:
        shown = "" if default is MISSING or default is inspect.Parameter.empty else f"`{_plain(default)}`"
        kind = "a list" if hint == tuple[Term, ...] else describe_type(hint) or "set in Python only"
        cells = (f"`{name}`", kind, shown, " ".join(text.replace("%%", "%").split()))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return re.sub(r":(?:attr|class|func|meth):`~?", "`", "\n".join(lines)) + "\n"


def _plain(value: Any) -> str:
    return json.dumps(getattr(value, "value", value), ensure_ascii=False, default=str)


def _once(shape: Any) -> Any:
    """A shape without siblings that equal an earlier one and are themselves mappings."""
    if isinstance(shape, list):
        return [_once(item) for item in shape]
    if not isinstance(shape, dict):
        return shape
    kept: dict[str, Any] = {}
    for key, value in shape.items():
        if not (isinstance(value, dict) and value and value in [shape[other] for other in kept]):
            kept[key] = value
    return {key: _once(value) for key, value in kept.items()}
