"""``metaphrase demo``: the whole way on the bundled bitext, in twenty minutes on two cores."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import yaml

from metaphrase.checkpoints.folders import checkpoint_folders
from metaphrase.cli import emit
from metaphrase.cli.train import parse_options, train_and_report
from metaphrase.io.files import PACKAGED_DATA

DESCRIPTION = (
    "Train DAP, or another recipe, on the bundled bitext of eight languages; measure it there, on the Declaration of Human "
    "Rights in these languages and in 86 others, before and after; write a report. Takes all options of `metaphrase train`."
)
EXAMPLES = (
    "metaphrase demo",
    "metaphrase demo --recipe tr --max_steps 40 --output_dir runs/tr",
    "metaphrase demo --languages sw tl --retention none",
)

#: Real translations from the interfaces of free software, in eight languages, and the Declaration of Human Rights.


def defaults() -> dict[str, Any]:
    """The demo's settings, in place of those of ``metaphrase train``."""
    settings = yaml.safe_load((PACKAGED_DATA / "demo.yaml").read_text(encoding="utf-8"))
    return settings | {
        "corpus": [str(PACKAGED_DATA / "demo")],
        "test": [str(PACKAGED_DATA / "demo"), str(PACKAGED_DATA / "udhr")],
        "retention": [str(PACKAGED_DATA / "udhr")],
        "output_dir": "runs/demo",
    }


def parse(argv: Sequence[str]) -> tuple[Any, ...]:
    """The demo's options. Its vocabulary was chosen for the demo's own recipe; other recipes keep theirs."""
    settings = defaults()
    about: dict[str, Any] = {"prog": "metaphrase demo", "description": DESCRIPTION, "examples": EXAMPLES}
    options = parse_options(argv, settings, **about)
    if options[2].recipe == settings["recipe"]:
        return options
    others = {name: value for name, value in settings.items() if name not in ("vocabulary", "transform")}
    return parse_options(argv, others, **about)


def run(argv: Sequence[str]) -> int:
    """Train DAP, or another recipe, on the bundled bitext; measure in its domain and out of it, before and after; report."""
    options = parse(argv)
    arguments = options[3]
    if not arguments.resume_from_checkpoint:
        for checkpoint in checkpoint_folders(arguments.output_dir):  # of an earlier demo
            shutil.rmtree(checkpoint)
    title = f"metaphrase demo: {options[2].recipe} on eight languages"
    result, shown = train_and_report(options, command=["metaphrase", "demo", *argv], title=title)
    if result:
        emit(result, *shown)
    return 0
