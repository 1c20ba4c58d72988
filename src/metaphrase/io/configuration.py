"""YAML that people write: read with the place of every key, and nothing in it that could surprise.

No Python objects, no key twice (YAML keeps the last and says nothing), aliases that expand to no more than a reader could
have written out, and ``5e-5`` is a number.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from metaphrase.exceptions import ConfigError, MissingFileError

#: The longest file, in bytes, the most values once aliases are written out, and how deep they may be nested.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 1_000_000, 50_000, 50


class Keys(dict[Any, Any]):
    """A mapping of a YAML file that knows where its keys stand.

    Attributes:
        places: ``"path:line:column"`` of each key, from 1.
    """

    places: Mapping[Any, str]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without Python's types, with the numbers of YAML 1.2."""

    path: Path
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, no deeper than people nest."""
        if self.depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "this is nested too deeply", self.peek_event().start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_yaml_int(self, node: Any) -> int:
        """A number that others than Python can hold too."""
        number = int(super().construct_yaml_int(node))
        if not -(2**63) <= number < 2**63:
            raise yaml.constructor.ConstructorError(None, None, "this number is too large", node.start_mark)
        return number

    def construct_yaml_str(self, node: Any) -> str:
        """Text that can be written down again, which half of a surrogate pair cannot."""
        text = str(super().construct_yaml_str(node))
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise yaml.constructor.ConstructorError(None, None, "this is half a character", node.start_mark)
        return text


def _construct_keys(loader: _Loader, node: yaml.MappingNode) -> Any:
    keys = Keys()
    yield keys
    written: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, list | dict | set):
            raise yaml.constructor.ConstructorError(None, None, "a key is a word, not a list", key_node.start_mark)
        if key in written:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", key_node.start_mark)
        written.add(key)
    loader.flatten_mapping(node)
    keys.update(loader.construct_mapping(node, deep=True))
    keys.places = {
        loader.construct_object(key_node, deep=True): f"{loader.path}:{_place(key_node.start_mark)}"
        for key_node, _ in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_keys)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds; its mappings are :class:`Keys`.

    Raises:
        MissingFileError: There is no such file.
        ConfigError: It is not YAML, or holds Python objects, a key twice, or aliases that expand without end; the message
            has the line and the column.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"There is no file {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_BYTES:,} bytes; this is no file of settings.")
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
        # PyYAML raises these, of `!!bool maybe` for one.
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from error


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Values below a node, aliases written out; without end where one holds itself."""
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
    """Refuse keys that nothing reads.

    Args:
        given: The keys, with their places if they come from :func:`read_yaml`.
        known: The keys that there are.
        where: What holds them, for the message.
        error: What to raise.

    Raises:
        ConfigError: A key is unknown; the message names the nearest.
    """
    known = list(known)
    for key in given:
        if key not in known:
            raise error(
                f"{place(given, key)}Unknown key {key!r} in {where}{did_you_mean(str(key), known)}. "
                f"Known keys are {', '.join(known)}."
            )


def place(given: Mapping[Any, Any], key: Any) -> str:
    """``path:line:column: `` of a key, nothing where it is not known."""
    at = getattr(given, "places", {}).get(key)
    return f"{at}: " if at else ""


def plain(content: Any) -> Any:
    """The same as dicts and lists of Python."""
    if isinstance(content, Mapping):
        return {key: plain(value) for key, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list | tuple) else content


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no known word is near.

    >>> did_you_mean("lerning_rate", ["learning_rate", "seed"])
    " (did you mean 'learning_rate'?)"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
