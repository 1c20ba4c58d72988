"""The shape of a JSON document: its keys with the types of their values, without the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

#: Keys whose content depends on the machine.
OPAQUE = ("hardware", "versions")


def shape_of(value: Any) -> Any:
    """Keys and types of a JSON value; the shapes of a list's items are merged.

    >>> shape_of({"n": 3, "names": ["a", None]})
    {'n': 'number', 'names': ['null | string']}
    >>> shape_of([{"a": 1}, {"a": "x", "b": True}])
    [{'a': 'number | string', 'b?': 'boolean'}]
    """
    if isinstance(value, dict):
        names = {key: Path(key).name if Path(key).is_absolute() else key for key in sorted(value)}
        return {name: "object" if key in OPAQUE else shape_of(value[key]) for key, name in names.items()}
    if isinstance(value, list):
        merged = merge([shape_of(item) for item in value])
        return [] if merged is None else [merged]
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "string"


def merge(shapes: list[Any]) -> Any:
    """One shape for all items of a list; a key that some items lack ends in ``?``."""
    if not shapes:
        return None
    if all(isinstance(shape, dict) for shape in shapes):
        keys = sorted({key.removesuffix("?") for shape in shapes for key in shape})
        merged = {}
        for key in keys:
            found = [shape[name] for shape in shapes for name in (key, f"{key}?") if name in shape]
            optional = len(found) < len(shapes) or any(f"{key}?" in shape for shape in shapes)
            merged[f"{key}?" if optional else key] = merge(found)
        return merged
    if all(isinstance(shape, list) for shape in shapes):
        merged = merge([item for shape in shapes for item in shape])
        return [] if merged is None else [merged]
    names = {name for shape in shapes if isinstance(shape, str) for name in shape.split(" | ")}
    others = [shape for shape in shapes if not isinstance(shape, str)]
    return " | ".join(sorted({*names, *(json.dumps(other, sort_keys=True) for other in others)}))


def differences(expected: Any, found: Any, at: str = "") -> list[str]:
    """Where two shapes differ, as paths of keys."""
    if isinstance(expected, dict) and isinstance(found, dict):
        lines = [f"missing {at}.{key}" for key in expected.keys() - found.keys()]
        lines += [f"new {at}.{key}" for key in found.keys() - expected.keys()]
        for key in expected.keys() & found.keys():
            lines += differences(expected[key], found[key], f"{at}.{key}")
        return sorted(lines)
    if isinstance(expected, list) and isinstance(found, list):  # an empty list has no shape to compare
        return differences(expected[0], found[0], f"{at}[]") if expected and found else []
    return [] if expected == found else [f"{at}: {json.dumps(expected)} became {json.dumps(found)}"]
