"""Try an installed wheel: its commands, and the data that it must contain. Run by ``make package`` in a new environment."""

from __future__ import annotations

import sys
from pathlib import Path

import metaphrase
from metaphrase.cli import main
from metaphrase.io.files import PACKAGED_DATA

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "metaphrase"


def check_files() -> None:
    """Exit if the wheel lacks a file of the sources, or the sources themselves were imported."""
    installed = Path(metaphrase.__file__).parent
    if installed == SOURCE:
        raise SystemExit(f"{installed} is the source folder. Install the wheel in a new environment first.")
    files = (
        path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    if missing := sorted(str(file) for file in files if not (installed / file).is_file()):
        raise SystemExit(f"The wheel lacks {len(missing)} files: {', '.join(missing[:5])}.")


def check_commands() -> None:
    """Exit if a command fails."""
    diagnose = ["diagnose", "--corpus", str(PACKAGED_DATA / "demo"), "--languages", "sw"]
    for command in (["recipes"], ["recipes", "dap"], diagnose):
        status = main(command)
        if status not in (0, 1):
            raise SystemExit(f"metaphrase {' '.join(command)} ended with status {status}.")


if __name__ == "__main__":
    check_files()
    check_commands()
    print(f"metaphrase {metaphrase.__version__} works from {Path(metaphrase.__file__).parent}.", file=sys.stderr)
