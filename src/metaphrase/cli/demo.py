"""``metaphrase demo``: train, measure and report on the packaged bitext."""

from __future__ import annotations

from collections.abc import Sequence

from metaphrase.cli.runs import execute_and_print, parse_run
from metaphrase.io.configuration import split_list
from metaphrase.io.counts import counted
from metaphrase.io.environment import prepare_process
from metaphrase.training.configuration import RunConfig
from metaphrase.training.demo import demo_settings
from metaphrase.training.run import TrainingRun

DESCRIPTION = (
    "Train an encoder on the packaged bitext of eight languages, and measure it before and after training, in these and in "
    "20 other languages. Takes the options of `metaphrase train`, except --seeds."
)
EXAMPLES = (
    "metaphrase demo",
    "metaphrase demo --recipe dap --vocabulary english --output_dir runs/dap",
    "metaphrase demo --languages sw tl --retention none",
)


def parse(argv: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Parse the demo's options."""
    return parse_run(argv, demo_settings, prog="metaphrase demo", description=DESCRIPTION, examples=EXAMPLES)[:2]


def title_of(config: RunConfig) -> str:
    """Heading of the demo's report."""
    languages = counted(len(split_list(config.languages)), "language") if config.languages else "all languages"
    return f"metaphrase demo: {config.recipe} on {languages}"


def run(argv: Sequence[str]) -> int:
    """Train on the packaged bitext, measure before and after, write a report."""
    config, command = parse(argv)
    prepare_process()
    execute_and_print(TrainingRun(config, command=command, title=title_of(config)))
    return 0
