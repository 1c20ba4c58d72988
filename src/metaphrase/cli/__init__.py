"""The command line: ``metaphrase COMMAND``, one module per command. This module dispatches, and reports errors.

Nothing heavy is imported here: ``metaphrase --help`` and ``metaphrase recipes`` need neither torch nor transformers.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TextIO

from metaphrase.cli.options import EXIT_CODES, FLAGS, parse
from metaphrase.cli.output import result_stream, session
from metaphrase.exceptions import MetaphraseError, UsageError
from metaphrase.io.configuration import did_you_mean
from metaphrase.io.environment import flush_denormals, set_variables, versions
from metaphrase.io.redaction import redact, visible, without_tokens

__all__ = ["COMMANDS", "main", "parse"]

#: Commands with a summary, in the order of their use. Their modules are imported only when they are called.
COMMANDS = {
    "adapt": "Adapt an encoder to your language: check the corpus, train, measure, and print a verdict",
    "demo": "Train an encoder on the packaged bitext, measure it before and after, and write a report",
    "recipes": "List the recipes, or print one",
    "align": "Link the words of a bitext, from files or line by line from stdin",
    "train": "Train an encoder with a recipe",
    "evaluate": "Measure encoders, alone or against a baseline",
    "compare": "Compare training runs with each other, or with the encoder before training",
    "report": "Write a report of a run: scores before and after, retention, word maps, margins, errors",
    "diagnose": "Find problems in a corpus, or in a model on a corpus",
    "mine": "Find translations in two monolingual texts",
    "filter": "Score the pairs of a bitext, and keep those above a threshold",
    "merge": "Merge a tuned encoder with its base, or store their difference in a small file",
    "debias": "Remove language identity from the embeddings of an encoder, without training",
    "export": "Reduce the size of an encoder, and measure the cost",
    "pull": "Write an encoder as a plain folder that Sentence Transformers loads",
    "push": "Push a release, a task vector or a bitext to the Hub",
}

USAGE = f"""usage: metaphrase COMMAND [OPTIONS]

Train cross-lingual sentence encoders by aligning the sentences and words of a bitext.

commands:
{chr(10).join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())}

options of every command:
{chr(10).join(f"  {flag:<15} {text}" for flag, text in FLAGS.items())}
  --config FILE   Read options from a YAML file; the command line overrides it.
  --help          List the command's options, with examples.

examples:
  metaphrase demo
  metaphrase recipes dap > mine.yaml
  metaphrase train --corpus pairs.tsv --languages sw --recipe mine.yaml --output_dir runs/sw

{EXIT_CODES}
"""

ISSUES = "https://github.com/metaphrase/metaphrase/issues"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The command and its options; None reads ``sys.argv``.

    Returns:
        The exit status: of the command (0, or 1 if problems were found or nothing was worth writing); 2 if an option or
        file is invalid or a resource is missing, with the reason on one line of stderr; 70 for a bug, with its traceback;
        130 if interrupted, or 128 plus the number of another signal.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    flags = [token for token in given if token in (*FLAGS, "-q")]
    arguments = [token for token in given if token not in flags]
    name = arguments.pop(0) if arguments else "--help"
    _open_closed_streams()
    stdout = sys.stdout  # a command redirects it
    set_variables()
    if argv is None:
        os.environ["MPLBACKEND"] = "agg"  # `!metaphrase` inherits that of a notebook, which may be unknown here
    with session(), _interrupted_by_signals() as received:
        try:
            return _run(name, [*arguments, *flags])
        except KeyboardInterrupt:
            with suppress(OSError):  # of a closed terminal
                print("Terminated." if received else "Interrupted.", file=sys.stderr)
            return 128 + (received or [signal.SIGINT])[0]
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _is_reader_gone(stdout):
                status = 0
            else:
                show = "--traceback" in flags or os.environ.get("METAPHRASE_DEBUG", "0") not in ("", "0")
                status = _report_error(error, name, show=show)
            try:
                stdout.flush()
            except OSError:  # the rest cannot be written when Python exits either
                os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
            return status


@contextmanager
def _interrupted_by_signals() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP interrupt the command as Ctrl-C does, so that it removes its temporary files.

    Yields a list to which the received signal is added. A second signal ends the process immediately. Signals that the
    caller ignores, as ``nohup`` does, or handles keep their effect, and so do those of one process of several: it may wait
    for the others where no interrupt reaches it.
    """
    received: list[int] = []
    pid = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != pid:  # a worker
            signal.raise_signal(number)
            return
        received.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread() and os.environ.get("WORLD_SIZE", "1") == "1"
    names = ("SIGTERM", "SIGHUP")  # Windows lacks the latter
    numbers = [number for name in names if (number := getattr(signal, name, None))]
    handled = [number for number in numbers if is_main and signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _run(name: str, arguments: Sequence[str]) -> int:
    """Run a command, or print the help or the version. Errors of stdout are raised here, not when Python exits."""
    if name in ("-h", "--help", "--version"):
        from metaphrase import __version__

        print(__version__ if name == "--version" else USAGE.rstrip("\n"), flush=True)
        return 0
    if name.startswith("-"):
        near = did_you_mean(name, ["--help", "--version"])
        raise UsageError(f"Expected a command first, got {name!r}{near}. See `metaphrase --help`.")
    if name not in COMMANDS:
        raise UsageError(f"Unknown command {name!r}{did_you_mean(name, COMMANDS)}. See `metaphrase --help`.")
    command = import_module(f"metaphrase.cli.{name}")
    if "torch" in sys.modules:  # commands that import it later call the function themselves
        flush_denormals()
    try:
        return int(command.run(arguments))
    except SystemExit as end:
        if not end.code:  # after --help
            result_stream().flush()
        raise


def _is_reader_gone(stdout: TextIO) -> bool:
    """Whether the process that reads stdout has closed it; otherwise, another pipe is broken, such as a worker's."""
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    try:
        poll.register(stdout.fileno(), 0)
    except (OSError, ValueError):  # in memory, or closed
        return False
    return bool(poll.poll(0))


def _open_closed_streams() -> None:
    """Open the standard streams that the caller has closed: they are None, and the next files would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def _is_http_error(error: Exception) -> bool:
    """Whether the Hub's HTTP client raised the error, such as for a broken connection. These errors are not OSErrors."""
    return any(cls.__module__.split(".")[0] == "httpx2" for cls in type(error).__mro__)


def _report_error(error: Exception, name: str, *, show: bool) -> int:
    """Report an error, without tokens, and return the exit status."""
    if isinstance(error, MetaphraseError | ValueError | OSError | ImportError) or _is_http_error(error):
        message = str(error) or type(error).__name__
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        message = f"Out of memory. Use smaller batches. {str(error).partition(chr(10))[0]}".rstrip()
    else:
        environment = [platform.platform(), *(f"{package} {version}" for package, version in versions().items())]
        print(
            f"metaphrase {name}: this is a bug in metaphrase. Please report it, with all of the following, at {ISSUES}\n"
            f"{', '.join(environment)}\n{redact(''.join(traceback.format_exception(error)))}",
            end="",
            file=sys.stderr,
        )
        return 70
    if show:
        print(without_tokens("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    print(visible(without_tokens(f"metaphrase {name}: {message}")), file=sys.stderr)
    return 2
