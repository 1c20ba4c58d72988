"""``metaphrase demo``: the whole way on the bundled bitext, in a quarter of an hour on two cores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from metaphrase.cli.train import parse_options, train_and_report

#: Real translations from the interfaces of free software, in eight languages, and the Declaration of Human Rights.
DATA = Path(__file__).parents[1] / "data"

TITLE = "metaphrase demo: DAP on eight languages"


def run(argv: Sequence[str]) -> int:
    """Train DAP on the bundled bitext; measure in its own domain and out of it, before and after; write a report."""
    given = {"--config": str(DATA / "demo.yaml"), "--corpus": str(DATA / "demo"), "--output_dir": "runs/demo"}
    named = {token.split("=")[0].replace("-", "_").replace("__", "--", 1) for token in argv if token.startswith("--")}
    arguments = [word for flag, value in given.items() if flag not in named for word in (flag, value)]
    if "--test" not in named:
        arguments += ["--test", str(DATA / "demo"), str(DATA / "udhr")]
    options = parse_options([*arguments, *argv])
    return train_and_report(options, command=["metaphrase", "demo", *argv], title=TITLE)
