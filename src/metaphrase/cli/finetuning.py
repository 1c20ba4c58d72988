"""What the programs ``trainers/finetune_*.py`` share: they parse options, train, evaluate, and print a table."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from metaphrase.cli.options import parse
from metaphrase.evaluation.transfer import FineTuningArguments, results_table
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.environment import prepare_process


def run(
    program: str,
    description: str,
    options: type,
    finetune: Callable[[Any, FineTuningArguments], Mapping[str, Any]],
    argv: Sequence[str],
    table: Callable[[Mapping[str, Any]], Table] = results_table,
) -> int:
    """Train, evaluate and print the table; ``results.json`` contains all results."""
    task, arguments = parse(program, [options, FineTuningArguments], argv, description=description.splitlines()[0])
    prepare_process()
    results = finetune(task, arguments)
    if results:
        Console().print(table(results))
    return 0


def start(program: str, main: Callable[[Sequence[str]], int]) -> None:
    """Run a program's ``main``, and exit with its status or, without a traceback, with the error of an option or file."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (MetaphraseError, ValueError, OSError, ImportError) as error:
        sys.exit(f"{program}: {error}")
