"""The command line: ``metaphrase COMMAND``. One module each; this one finds them and parses their options."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

#: Commands with what they do, in the order of their use. The module of each is imported only when it is called.
COMMANDS = {
    "demo": "Train DAP on the bundled bitext, measure before and after, write a report",
    "recipes": "List the recipes, or print one",
    "align": "Link the words of a bitext, as a corpus step or as a filter",
    "train": "Train an encoder with a recipe",
    "evaluate": "Measure an encoder, alone or against a baseline",
    "mine": "Find the translations in two monolingual texts",
    "filter": "Score the pairs of a bitext, and keep the good ones",
    "push": "Push a released encoder to the Hub",
}

USAGE = f"""usage: metaphrase COMMAND [OPTIONS]

Train cross-lingual sentence encoders by aligning the sentences and words of a bitext.

commands:
{chr(10).join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())}

`metaphrase COMMAND --help` lists a command's options. Options can also stand in a YAML file, given as --config FILE;
what the command line says wins.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The command and its options; None takes those of the process.

    Returns:
        The exit status: 0, or 2 where an option or a file is wrong; the reason is printed on one line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        from metaphrase import __version__

        print(__version__)
        return 0
    name = arguments.pop(0)
    try:
        if name not in COMMANDS:
            raise ValueError(f"There is no command {name!r}{did_you_mean(name, COMMANDS)}. See `metaphrase --help`.")
        return int(import_module(f"metaphrase.cli.{name}").run(arguments))
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"metaphrase {name}: {error}", file=sys.stderr)
        return 2


def parse(
    prog: str,
    types: Sequence[type],
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    description: str | None = None,
) -> tuple[Any, ...]:
    """Parse options into dataclasses; flags, YAML and Python share one set of names.

    Args:
        prog: Name in the help text, e.g. ``"metaphrase evaluate"``.
        types: Dataclasses whose fields are the options.
        argv: The command line; ``--config FILE.yaml`` reads options from a file.
        defaults: Values that stand in for the dataclasses' own; the file wins over them, the command line over both.
        description: One line above the options in the help text.

    Returns:
        One instance of each dataclass.

    Raises:
        ValueError: An option is unknown (the message names the nearest), or has a value of the wrong kind.
        SystemExit: ``--help`` was asked for.
    """
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(f"{message}. See `{prog} --help`.")

    parser = Parser(tuple(types), prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of options; the command line wins over it.")
    known = {action.dest for action in parser._actions} - {"help", "config"}
    arguments = list(argv)
    given: dict[str, Any] = {}
    if path := _config_path(arguments):
        given = _read_config(Path(path), known)
    for key in defaults or {}:
        if key not in known:
            raise ValueError(f"The recipe has an unknown training option {key!r}{did_you_mean(key, known)}.")
    options = dict(defaults or {}) | given
    for action in parser._actions:
        if action.dest in options:
            action.required = False
            if options[action.dest] is not None and action.nargs == "+" and not isinstance(options[action.dest], list):
                options[action.dest] = [options[action.dest]]
            if isinstance(options[action.dest], list):  # an unquoted `no`, Norwegian, is false to YAML
                options[action.dest] = ["no" if item is False else str(item) for item in options[action.dest]]
            if (
                action.type is not None
                and isinstance(options[action.dest], int | float)
                and not isinstance(options[action.dest], bool)
            ):
                options[action.dest] = str(options[action.dest])
    parser.set_defaults(**options)
    for token in arguments:
        if token.startswith("--"):
            flag = token[2:].split("=")[0].replace("-", "_")
            if flag not in known | {"help", "config"} and f"no_{flag}" not in known and not flag.startswith("no_"):
                raise ValueError(f"There is no option --{flag}{did_you_mean(flag, known)}. See `{prog} --help`.")
    return tuple(parser.parse_args_into_dataclasses(arguments, look_for_args_file=False))[: len(types)]


def _config_path(arguments: Sequence[str]) -> str | None:
    for at, token in enumerate(arguments):
        if token.startswith("--config="):
            return token.removeprefix("--config=")
        if token == "--config":
            if at + 1 == len(arguments):
                raise ValueError("--config needs the path of a YAML file.")
            return arguments[at + 1]
    return None


def _read_config(path: Path, known: Iterable[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold options as keys and values, but holds {type(content).__name__}.")
    for key in content:
        if key not in known:
            raise ValueError(f"{path} has an unknown option {key!r}{did_you_mean(str(key), known)}.")
    return content


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
