"""What the programs here share: results that are stored in the repository, their tables, and folders of unfinished work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from metaphrase.exceptions import UsageError
from metaphrase.io.files import replace_text, write_json


def refuse_less(path: Path, stored: Callable[[Any], Mapping[str, Any]], new: Mapping[str, Any]) -> None:
    """Refuse to replace stored results by results that cover less.

    Args:
        path: File of the stored results.
        stored: Returns what stored results cover, given the content of the file: by name, a set, or a number.
        new: What the new results cover.

    Raises:
        UsageError: The stored results cover more.
    """
    if not path.exists():
        return
    for name, covered in stored(json.loads(path.read_text(encoding="utf-8"))).items():
        if isinstance(covered, set) and (missing := sorted(covered - new[name])):
            lacking = f"{name} {', '.join(map(str, missing))}, which the new results lack"
        elif not isinstance(covered, set) and covered > new[name]:
            lacking = f"{covered:,} {name}, the new results of {new[name]:,}"
        else:
            continue
        raise UsageError(f"{path} has results of {lacking}. To replace the stored results, delete this file first.")


def write_results(path: Path, content: Any, covers: Callable[[Any], Mapping[str, Any]]) -> None:
    """Store results, unless stored ones cover more, see :func:`refuse_less`."""
    refuse_less(path, covers, covers(content))
    replace_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def fill(path: Path, tables: dict[str, str]) -> None:
    """Replace the text between the markers of a file; tables without a marker there are ignored."""
    text = path.read_text(encoding="utf-8")
    for name, content in tables.items():
        block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder of unfinished work that was made with other settings; an empty folder is marked with them.

    Raises:
        UsageError: The settings differ.
    """
    path, own = folder / "settings.json", json.loads(json.dumps(settings, default=str))
    if not path.exists():
        write_json(path, own)
    elif differing := [key for key, value in json.loads(path.read_text("utf-8")).items() if own.get(key) != value]:
        raise UsageError(
            f"{folder} has work that was made with another value of {', '.join(differing)}. Choose another folder as "
            "--output, or delete this one."
        )
