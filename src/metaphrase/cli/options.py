"""Options of commands: the fields of dataclasses, as flags or in a YAML file.

The parser is not transformers' ``HfArgumentParser`` because importing that takes more than a second, even for
``metaphrase recipes``; tests compare the two option by option.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from metaphrase.cli.output import configure, result_stream
from metaphrase.exceptions import ConfigError, UsageError
from metaphrase.io.arguments import check_value, describe_type, hints_of, is_limited, is_of_type
from metaphrase.io.configuration import Keys, default_of, did_you_mean, place, plain, read_yaml
from metaphrase.io.files import PACKAGED_DATA, as_json
from metaphrase.io.outputs import check_files

#: Flags that every command has, with their help.
FLAGS = {
    "--json": "Print the result as JSON on stdout, and tables and text on stderr.",
    "--quiet": "Print only errors and the result.",
    "--print-config": "Print the options as YAML for --config, and exit.",
    "--traceback": "Show the traceback of an error. METAPHRASE_DEBUG=1 does the same.",
}

#: Meaning of the exit status.
EXIT_CODES = """\
exit status:
  0    done
  1    done, but problems were found, or nothing was worth writing
  2    failed: an invalid option, a missing file, no network, …; the reason is on stderr
  70   a bug in metaphrase
  129  ended by SIGHUP (a closed terminal)
  130  interrupted (Ctrl-C)
  143  ended by SIGTERM"""

#: Options of these libraries are printed by --print-config only if they are set.
_LIBRARIES = ("transformers", "sentence_transformers")


def _in_help(default: Any) -> str:
    """A default as help texts show it: values as they are typed, or the names of packaged data."""
    values = default if isinstance(default, list | tuple) else [default]
    if values and all(Path(str(one)).is_relative_to(PACKAGED_DATA) for one in values):
        return "packaged: " + ", ".join(Path(one).name for one in values)
    return " ".join(map(str, values)).replace("%", "%%")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of examples, shows one spelling of an option, and adds defaults that the text does not mention."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "", [], argparse.SUPPRESS) or "efault" in (action.help or ""):
            return action.help
        is_optional = action.option_strings or action.nargs in (argparse.OPTIONAL, argparse.ZERO_OR_MORE)
        return f"{action.help or ''} (default: {_in_help(action.default)})" if is_optional else action.help

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spellings = {name.replace("-", "_"): name for name in reversed(action.option_strings)}
        shown = [name for name in action.option_strings if name in spellings.values()]
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        value = f" [{value.strip()}]" if action.nargs == "?" else f"{value} ..." if action.nargs == "+" else value
        return ", ".join(shown) + value


class _ShortHelp(_Help):
    """Leaves room for the longest leading option next to its text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=35)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.default in (None, "", [], False, -1, argparse.SUPPRESS)
        return action.help if is_plain else f"{action.help} ({_in_help(action.default)})"


class Parser(argparse.ArgumentParser):
    """Raises :class:`UsageError` instead of exiting.

    Attributes:
        first: Names of the options whose values may come first, without a flag.
    """

    first: Sequence[str] = ()

    def error(self, message: str) -> Any:
        """Refuse the command line; arguments without a flag are only read before the first flag."""
        order = ""
        if self.first and re.match(r"the following arguments are required|unrecognized arguments: [^-]", message):
            names = " ".join(name.upper() for name in self.first)
            order = f" Positional arguments come first: {self.prog} {names} [OPTIONS]."
        raise UsageError(f"{message}.{order} See `{self.prog} --help`.")

    def options(self) -> list[argparse.Action]:
        """The options added so far."""
        return list(self._actions)

    def given(self, arguments: Iterable[str]) -> set[str]:
        """Names of the options on a command line."""
        known = self._option_string_actions
        return {known[flag].dest for flag in map(_flag, arguments) if flag in known}

    def check_flags(self, arguments: Sequence[str], known: Iterable[str]) -> None:
        """Refuse unknown flags, and repeated ones of lists and of values without a flag: argparse would keep the last."""
        given = set()
        for token in arguments:
            flag = _flag(token)
            action = self._option_string_actions.get(flag)
            if token.startswith("--") and action is None:
                near = did_you_mean(flag[2:].replace("-", "_"), [*known, "config", *(name[2:] for name in FLAGS)])
                raise UsageError(f"Unknown option {flag}{near}. See `{self.prog} --help`.")
            if action is not None and (action.nargs == "+" or action.dest in self.first):
                if action.dest in given:
                    name = action.option_strings[0]
                    once = "it once, with the option or without"
                    if action.nargs == "+":
                        once = f"all values after one {name}, separated by spaces"
                    raise UsageError(f"{name} is given twice. Pass {once}.")
                given.add(action.dest)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}; choices are {', '.join(known)}")


def parse(
    prog: str,
    types: Sequence[type],
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    description: str | None = None,
    examples: Sequence[str] = (),
    leading: Mapping[str, Mapping[str, str]] | None = None,
    replaced: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """Parse options into dataclasses; flags, YAML and Python share one set of names.

    Args:
        prog: Name in the help text, e.g. ``"metaphrase evaluate"``.
        types: Dataclasses whose fields are the options.
        argv: The command line; ``--config FILE.yaml`` reads options from a file.
        defaults: Values that replace the dataclasses' own; the file overrides them, and the command line overrides both.
        description: One line above the options in the help text.
        examples: Whole command lines, below the options in the help text.
        leading: Options that ``--help`` lists, by group, with a short text each; ``--help-all`` lists the rest too, with
            their whole texts. None lists all.
        replaced: For options that replace another one, its name: if the option is given, and the other is not, a default of
            the other does not count.

    Returns:
        One instance of each dataclass.

    Raises:
        UsageError: An option is unknown (the message names the nearest), or its value is of the wrong type.
        ConfigError: The same in the file; the message has line and column.
        SystemExit: ``--help`` or ``--print-config`` was given.
    """
    first = [option.name for cls in types for option in options_of(cls) if option.metadata.get("first")]
    argv = _with_flags(argv, first)
    is_command = prog.startswith("metaphrase ")
    parser = Parser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description=description and fill(description, max(40, get_terminal_size().columns - 2)),
        epilog=_epilog(examples, is_command),
        formatter_class=_Help if leading is None or "--help-all" in argv else _ShortHelp,
        allow_abbrev=False,
        add_help=False,
    )
    parser.first = first
    groups = _add_groups(parser, leading or {})
    for cls in types:
        add_options(parser, cls, groups)
    own = parser.options()
    _add_flags(parser, is_command, with_all=leading is not None)
    if leading and "--help-all" not in argv:
        _shorten(own, {name: text for group in leading.values() for name, text in group.items()})
    parser.check_flags(argv, [action.dest for action in own])
    path = _config_path(prog, argv)
    hints = {name: hint for cls in types for name, hint in hints_of(cls).items()}
    content = {} if path is None else _read_config(Path(_home(path)), own, hints)
    given = {*(name for name, value in content.items() if value is not None), *parser.given(argv)}
    dropped = {name for option, name in (replaced or {}).items() if option in given} - given
    options = {name: value for name, value in {**(defaults or {}), **content}.items() if name not in dropped}
    numbers = {action.dest for action in own if action.type is float}  # 1 is recorded as 1.0, as on the command line
    options |= {name: float(options[name]) for name in numbers & options.keys() if type(options[name]) is int}
    for action in own:
        action.required &= action.dest not in options
    parser.set_defaults(**options)
    namespace = parser.parse_args(list(argv))
    for name, hint in hints.items():
        if hasattr(namespace, name) and is_limited(hint):
            check_value(getattr(namespace, name), hint, f"--{name}")
    for action in own:  # a shell expands ~ only where a word starts with it
        setattr(namespace, action.dest, _with_home(getattr(namespace, action.dest, None)))
    if is_command:
        configure(as_json=hasattr(namespace, "flag --json"), quiet=hasattr(namespace, "flag --quiet"))
    if hasattr(namespace, "flag --print-config"):
        yaml.safe_dump(effective(types, namespace), result_stream(), sort_keys=False, allow_unicode=True, width=120)
        raise SystemExit(0)
    check_files([getattr(namespace, name, None) for name in ("output", "summary", "phrase_table")], [path])
    return tuple(cls(**{option.name: getattr(namespace, option.name) for option in options_of(cls)}) for cls in types)


def _flag(token: str) -> str:
    """The flag of a word of the command line: ``--name`` of ``--name=value``, ``-n`` of ``-nvalue``."""
    return token.split("=")[0] if token.startswith("--") else token[:2]


def _with_flags(argv: Sequence[str], first: Sequence[str]) -> Sequence[str]:
    """The command line with flags for the values that come first: one value for each option, and the rest for the last."""
    flags = (at for at, token in enumerate(argv) if token.startswith("-") and token != "-")
    end = next(flags, len(argv)) if first else 0
    values, rest = argv[:end], argv[end:]
    last = len(first) - 1
    each = [*([value] for value in values[:last]), values[last:]]
    named = [[f"--{name}", *words] for name, words in zip(first, each, strict=False) if words]
    return [*chain.from_iterable(named), *rest]


def _with_home(value: Any) -> Any:
    """Replace the ``~`` of paths by the home folder, also in ``~/x.sw,~/x.en`` and ``BASE + ~/v.safetensors``."""
    if isinstance(value, list):
        return [_with_home(item) for item in value]
    if not isinstance(value, str) or "~" not in value:
        return value
    return re.sub(r"(^|,| \+ )~(?=/)", lambda match: match[1] + _home("~"), value)


def _home(path: str) -> str:
    """A path without ``~``, which stays if the home folder is unknown."""
    return os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises a RuntimeError


def _add_groups(parser: Parser, leading: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Add the groups of the leading options. Returns the group of each; the group of the others has an empty name."""
    groups = {title: parser.add_argument_group(title) for title in leading}
    homes = {name: groups[title] for title, names in leading.items() for name in names}
    return homes | {"": parser.add_argument_group("other options" if leading else "options")}


def _add_flags(parser: Parser, is_command: bool, *, with_all: bool) -> None:
    """Add ``--help``, ``--config`` and the flags that every command has."""
    group = parser.add_argument_group("options of every command" if is_command else "general options")
    group.add_argument("-h", "--help", action="help", default=argparse.SUPPRESS, help="Print this help and exit.")
    if with_all:
        group.add_argument("--help-all", action="help", default=argparse.SUPPRESS, help="List all options and exit.")
    group.add_argument("--config", help="YAML file of options; the command line overrides it.")
    for flag, text in FLAGS.items():
        if is_command or flag == "--print-config":
            names = [flag, *(["--print_config"] if flag == "--print-config" else ["-q"] if flag == "--quiet" else [])]
            group.add_argument(
                *names,
                dest=f"flag {flag}",
                action="store_true",
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
            )


def _shorten(actions: Iterable[argparse.Action], texts: Mapping[str, str]) -> None:
    """Give the leading options a short text, and hide the others."""
    for action in actions:
        action.help = texts.get(action.dest, argparse.SUPPRESS)
        if not action.choices:
            kinds = {int: "N", float: "X"}
            action.metavar = "BOOL" if action.nargs == "?" else kinds.get(action.type, "NAME")  # type: ignore[call-overload]


def _epilog(examples: Sequence[str], is_command: bool) -> str | None:
    parts = ["\n".join(["examples:", *(f"  {example}" for example in examples)])] if examples else []
    return "\n\n".join([*parts, *([EXIT_CODES] if is_command else [])]) or None


def _config_path(prog: str, arguments: Sequence[str]) -> str | None:
    reader = Parser(prog, add_help=False, allow_abbrev=False)
    reader.add_argument("--config", action="append", default=[])
    paths = reader.parse_known_args(arguments)[0].config
    if len(paths) > 1:
        raise UsageError(f"--config is given {len(paths)} times: {', '.join(paths)}. Merge the files into one.")
    return paths[0] if paths else None


def _read_config(path: Path, actions: Sequence[argparse.Action], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file, converted and checked."""
    content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, Keys):
        raise ConfigError(f"{path} should hold options as keys and values, but holds {type(content).__name__}.")
    known = {action.dest: action for action in actions if action.nargs != 0}  # without --no_x, which takes no value
    for key in content:
        if key not in known:
            raise ConfigError(f"{place(content, key)}unknown option {key!r}{did_you_mean(str(key), known)}.")
    return {name: _read_option(content, known[name], hints.get(name, Any)) for name in content}


def _read_option(content: Keys, action: argparse.Action, hint: Any) -> Any:
    """Convert the words of an option in a file as on the command line: ``no`` is a language, and ``012`` is a text."""
    value, words = content[action.dest], content.words.get(action.dest)
    is_empty = value is None or (isinstance(value, list) and None in value)  # as after a dash without a word
    if words is not None and not is_empty and not isinstance(value, bytes):
        convert: Any = action.type
        with suppress(ValueError, TypeError, argparse.ArgumentTypeError):  # the original value is refused below
            if action.nargs == "+":
                value = [convert(word) for word in ([words] if isinstance(words, str) else words)]
            else:
                value = words if isinstance(words, list) else convert(words)
    choices = list(map(str, action.choices or ()))
    if not is_of_type(value, hint) or (choices and value is not None and str(value) not in choices):
        wanted = f"one of {', '.join(choices)}" if choices else describe_type(hint)
        found = f"{reprlib.repr(plain(value))}{did_you_mean(str(value), choices)}"
        raise ConfigError(f"{place(content, action.dest)}{action.dest!r} must be {wanted}, but is {found}.")
    return value


def effective(types: Sequence[type], namespace: argparse.Namespace) -> dict[str, Any]:
    """The options and their values, without library options that are not set."""
    options = {}
    for cls in types:
        for option in options_of(cls):
            home = next(base for base in cls.__mro__ if option.name in inspect.get_annotations(base))
            value = getattr(namespace, option.name, None)
            default = default_of(option)
            is_default = value == default or (value is None and default == "")  # "" for no list
            if not (home.__module__.split(".")[0] in _LIBRARIES and is_default):
                options[option.name] = value
    return dict(as_json(options, default=str))


def options_of(cls: type) -> list[Field[Any]]:
    """The fields that are options; those with ``internal`` in their metadata are arguments in Python only."""
    return [one for one in fields(cls) if one.init and "internal" not in one.metadata]


# ---------------------------------------------------------------------------------------------------- fields as options


def add_options(parser: Any, cls: type, groups: Mapping[str, Any] | None = None) -> None:
    """Add an option for each field of a dataclass, as transformers' ``HfArgumentParser`` does.

    Options of the groups come first, in their order, and inherited ones last.
    """
    assert is_dataclass(cls)
    hints = get_type_hints(cls)
    homes = groups or {"": parser}
    places = {name: place for place, name in enumerate(homes)}
    own = inspect.get_annotations(cls)
    for option in sorted(
        options_of(cls), key=lambda option: (places.get(option.name, len(places)), option.name not in own)
    ):
        _add_option(homes.get(option.name, homes[""]), option, _scalar(hints[option.name]))


def _scalar(kind: Any) -> Any:
    """Reduce a union to the type that the command line parses: text if the default may be None, else the other type.

    A number or a word is parsed as a number if possible.
    """
    if get_origin(kind) not in (Union, UnionType):
        return kind
    parts = [part for part in get_args(kind) if part is not NoneType]
    numbers = [part for part in (float, int) if part in parts]
    if numbers and any(get_origin(part) is Literal for part in parts):
        return partial(_number_or_word, number=numbers[0])
    if NoneType in get_args(kind):
        return str if str in parts else parts[0]
    return next(part for part in parts if part is not str)


def _add_option(parser: Any, option: Field[Any], kind: Any) -> None:
    names = [f"--{name}" for name in dict.fromkeys([option.name, option.name.replace("_", "-")])]
    settings = dict(option.metadata)
    names += settings.pop("aliases", [])
    settings.pop("first", None)
    default = default_of(option)
    if get_origin(kind) is list and not isinstance(default, list) and default is not MISSING:
        default = None  # "" for no list
    settings |= {"required": True} if default is MISSING else {"default": default}
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = tuple(member.value for member in kind)
    if choices:
        parser.add_argument(*names, choices=list(choices), type=_choice(choices), **settings)
    elif kind is bool:
        if default is not None:
            settings |= {"nargs": "?", "const": True, "default": default is not MISSING and default, "required": False}
        parser.add_argument(*names, type=_truth, **settings)
        if default is True:
            opposite = [f"--no_{option.name}", f"--no-{option.name.replace('_', '-')}"]
            settings = {"help": f"Turn {names[0]} off.", "default": argparse.SUPPRESS}
            parser.add_argument(*opposite, action="store_false", dest=option.name, **settings)
    elif get_origin(kind) is list:
        parser.add_argument(*names, type=get_args(kind)[0], nargs="+", **settings)
    else:
        parser.add_argument(*names, type=kind, **settings)


def _number_or_word(text: str, number: Callable[[str], float]) -> float | str:
    with suppress(ValueError):
        return number(text)
    return text


def _choice(choices: Sequence[Any]) -> Callable[[str], Any]:
    by_text = {str(choice): choice for choice in choices}
    return lambda text: by_text.get(text, text)


def _truth(text: str | bool) -> bool:
    if isinstance(text, bool):
        return text
    if text.lower() in ("yes", "true", "t", "y", "1", "on"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
