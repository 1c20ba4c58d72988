"""Options of commands, and strict reading of YAML files with the position of every key for error messages.

Python objects, duplicate keys (of which YAML silently keeps the last) and aliases that expand without bound are errors.
``5e-5`` is a number.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import MISSING, Field, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from metaphrase.exceptions import ConfigError, MissingFileError
from metaphrase.io.arguments import python_number

#: Limits of a file: bytes, values after alias expansion, and nesting depth.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 1_000_000, 50_000, 50


class Keys(dict[Any, Any]):
    """A mapping from a YAML file with the positions of its keys.

    ``places`` has ``"path:line:column"`` of each key, one-based; ``words`` the text of each scalar, such as ``012`` for
    10, and the texts of each list of scalars.
    """

    places: Mapping[Any, str] = MappingProxyType({})
    words: Mapping[Any, Any] = MappingProxyType({})


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without Python types, with the numbers of YAML 1.2."""

    path: Path
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, up to the maximum nesting depth."""
        if self.depth == MAX_DEPTH:
            raise _invalid(self.peek_event(), "the file is nested too deeply")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_yaml_int(self, node: Any) -> int:
        """Construct an integer that fits into 64 bits."""
        number = int(super().construct_yaml_int(node))
        if not -(2**63) <= number < 2**63:
            raise _invalid(node, "the number is too large")
        return number

    def construct_yaml_str(self, node: Any) -> str:
        """Construct text without unpaired surrogates, which cannot be encoded."""
        text = str(super().construct_yaml_str(node))
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise _invalid(node, "the text contains an unpaired surrogate")
        return text


#: Names of an encoder that every command accepts, for help texts.
ENCODER = "'starter', a folder, a Hub id, an installed model, or 'BASE + VECTOR.safetensors'"


def _invalid(node: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _construct_keys(loader: _Loader, node: yaml.MappingNode) -> Any:
    keys = Keys()
    yield keys
    written: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, list | dict | set):
            raise _invalid(key_node, "a key must be a scalar, not a list")
        if key in written:
            raise _invalid(key_node, f"duplicate key {key!r}")
        written.add(key)
    loader.flatten_mapping(node)
    keys.update(loader.construct_mapping(node, deep=True))
    nodes = [(loader.construct_object(key, deep=True), key, value) for key, value in node.value]
    keys.places = {key: f"{loader.path}:{_place(node.start_mark)}" for key, node, _ in nodes}
    keys.words = {key: value.value for key, _, value in nodes if isinstance(value, yaml.ScalarNode)}
    keys.words |= {
        key: [item.value for item in value.value]
        for key, _, value in nodes
        if isinstance(value, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in value.value)
    }


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_keys)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file. Mappings are returned as `Keys`.

    Python objects, duplicate keys and aliases that expand without bound are errors, with line and column.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path} is not a file." if path.exists() else f"The file {path} does not exist.")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} exceeds the maximum size of {MAX_BYTES:,} bytes for a configuration file.")
    try:
        loader = _Loader(path.read_text(encoding="utf-8-sig"))
        loader.path = path
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MAX_VALUES:
            raise ConfigError(f"{path} has aliases that expand to more than {MAX_VALUES:,} values.")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{_place(mark)}" if mark else ""
        raise ConfigError(f"{path}{at}: not valid YAML: {error.problem or error.context}.") from error
    except ConfigError:
        raise
    except (yaml.YAMLError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        # PyYAML raises these, for example for `!!bool maybe`.
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from error


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Count the values below a node with aliases expanded; infinite if a node contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        parts: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.MappingNode):
            parts = (part for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _place(mark: yaml.Mark) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"


def check_keys(given: Mapping[Any, Any], known: Iterable[str], where: str, error: type[ConfigError]) -> None:
    """Reject unknown keys."""
    known = list(known)
    for key in given:
        if key not in known:
            raise error(
                f"{place(given, key)}Unknown key {key!r} in {where}{did_you_mean(str(key), known)}. "
                f"Known keys are {', '.join(known) or 'none'}."
            )


def place(given: Mapping[Any, Any], key: Any) -> str:
    """Return ``path:line:column: `` of a key, or an empty string if the position is unknown."""
    at = getattr(given, "places", {}).get(key)
    return f"{at}: " if at else ""


def plain(content: Any) -> Any:
    """Convert mappings and sequences to plain dictionaries and lists, and NumPy's numbers to Python's."""
    if isinstance(content, Mapping):
        return {key: plain(value) for key, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list | tuple) else python_number(content)


def option(default: Any = MISSING, help: str = "", **metadata: Any) -> Any:
    """Declare an option: a field of a dataclass, with its text for ``--help``.

    An option without a default is required. Further arguments of argparse, such as ``aliases``, are metadata; ``first`` marks
    the options of a command whose values may come first, without a flag: one value each, and the rest for the last.
    """
    metadata["help"] = help
    if isinstance(default, list | dict):
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(option: Field[Any]) -> Any:
    """The default of a dataclass field; ``MISSING`` if it is required."""
    return option.default_factory() if option.default_factory is not MISSING else option.default


def split_list(items: Iterable[str]) -> list[str]:
    """Split items at commas and spaces.

    >>> split_list(["sw,te", "ne"])
    ['sw', 'te', 'ne']
    """
    return [part for item in items for part in item.replace(",", " ").split()]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)``, or an empty string if no known word is similar.

    >>> did_you_mean("lerning_rate", ["learning_rate", "seed"])
    " (did you mean 'learning_rate'?)"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
