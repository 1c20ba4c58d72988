"""What the programs here share: stored results and their tables, folders of unfinished work, and how errors are reported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from metaphrase.exceptions import UsageError
from metaphrase.io.counts import counted
from metaphrase.io.environment import cores
from metaphrase.io.files import as_json, read_json, replace_text, write_json

_P = ParamSpec("_P")


def reports_errors(main: Callable[_P, int]) -> Callable[_P, int]:
    """Decorator of a program: an error of its options, data or files is printed without a traceback; the status is 2."""

    @wraps(main)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except (ValueError, OSError) as error:
            print(f"{Path(main.__code__.co_filename).stem}: {error}", file=sys.stderr)
            return 2

    return run


def refuse_less(path: Path, stored: Callable[[Any], Mapping[str, Any]], new: Mapping[str, Any]) -> None:
    """Refuse to replace stored results by results that cover less.

    ``stored`` returns what stored results cover, given the content of their file: by name, a set, or a number.
    """
    if not path.exists():
        return
    for name, covered in stored(read_json(path)).items():
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


def markdown(heads: Iterable[str], align: str, rows: Iterable[Iterable[Any]]) -> list[str]:
    """The lines of a Markdown table. ``align`` has ``l`` or ``r`` for each column; its last letter is repeated.

    >>> markdown(["", "n"], "lr", [["all", 3]])
    ['| | n |', '|---|--:|', '| all | 3 |']
    """
    heads = list(heads)
    align = align.ljust(len(heads), align[-1])[: len(heads)]
    marks = [{"l": "---", "r": "--:"}[letter] for letter in align]
    lines = ["".join(f"| {head} " if head else "| " for head in heads) + "|", f"|{'|'.join(marks)}|"]
    return lines + [f"| {' | '.join(map(str, cells))} |" for cells in rows]


def hardware_words(hardware: dict[str, Any]) -> str:
    """Format a description of the hardware."""
    return f"{cores(hardware)}, {counted(hardware['threads'], 'thread')}"


def machine_words(hardware: dict[str, Any]) -> str:
    """Name the GPU, or describe the CPU."""
    return hardware.get("gpu") or hardware_words(hardware)


def without_folders(command: str) -> str:
    """A command with names of files instead of absolute paths.

    >>> without_folders("metaphrase train --corpus /home/me/sw-en.tsv --output_dir runs/sw")
    'metaphrase train --corpus sw-en.tsv --output_dir runs/sw'
    """
    return re.sub(r"(?<=\s)/\S*/(?=\S)", "", command)


def fill(path: Path, tables: dict[str, str]) -> None:
    """Replace the text between the markers of a file; tables without a marker there are ignored."""
    text = path.read_text(encoding="utf-8")
    for name, content in tables.items():
        block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder of unfinished work that was made with other settings; an empty folder is marked with them."""
    path, own = folder / "settings.json", as_json(settings, default=str)
    if not path.exists():
        write_json(path, own)
    elif differing := [key for key, value in read_json(path).items() if own.get(key) != value]:
        raise UsageError(
            f"{folder} has work that was made with another value of {', '.join(differing)}. Choose another folder as "
            "--output, or delete this one."
        )
