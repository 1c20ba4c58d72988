"""``metaphrase train``: from a bitext to a released encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metaphrase.cli.output import emit
from metaphrase.cli.runs import execute, execute_and_print, parse_run
from metaphrase.cli.tables import runs_table
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import Seed, checked
from metaphrase.io.configuration import option
from metaphrase.io.environment import prepare_process
from metaphrase.publishing.run_comparison import BEFORE, compare_runs
from metaphrase.training.configuration import RunConfig
from metaphrase.training.run import TrainingRun

EXAMPLES = (
    "metaphrase train --corpus sw-en.tsv.gz --languages sw --output_dir runs/sw --max_steps 300 --test my-test-sets/",
    "metaphrase train --recipe wacse --corpus a-folder/ --temperature 0.7 --output_dir runs/all",
    "metaphrase train --recipe tr --corpus a-folder/ --test my-test-sets/ --output_dir runs/tr --seeds 1 2 3",
    "torchrun --nproc_per_node 8 -m metaphrase train --config run.yaml",
)


@checked
@dataclass
class SeedOptions:
    """Several runs of one configuration."""

    seeds: list[Seed] = option(
        [], "Train once with each seed, into OUTPUT_DIR/seed-N, and compare all runs with the encoder before training."
    )


def run(argv: Sequence[str]) -> int:
    """Train, release and measure; print the results and their location."""
    config, command, (several,) = parse_run(
        argv,
        prog="metaphrase train",
        description="Train an encoder with a recipe and release it.",
        examples=EXAMPLES,
        also=[SeedOptions],
    )
    prepare_process()
    if several.seeds:
        return train_seeds(config, several.seeds)
    execute_and_print(TrainingRun(config, command=command))
    return 0


def train_seeds(config: RunConfig, seeds: Sequence[int]) -> int:
    """Train with each seed, and compare the runs with the encoder before training.

    Raises:
        UsageError: There are no test sets, or all runs would be pushed to one repository.
    """
    if config.push_to_hub:
        raise UsageError("--seeds trains several encoders: omit --push_to_hub, and push one with `metaphrase push`.")
    if not (config.test and config.output_dir):
        raise UsageError("--seeds compares runs: pass --output_dir and test sets with --test.")
    folders = {seed: str(Path(config.output_dir) / f"seed-{seed}") for seed in seeds}
    for seed, folder in folders.items():
        settings: dict[str, Any] = {"seed": seed, "output_dir": folder}
        execute(TrainingRun(replace(config, **settings)))
    if config.training_arguments().process_index == 0:
        rows = compare_runs([*folders.values()])
        emit({"runs": [*folders.values()], "rows": rows}, runs_table(rows, BEFORE))
    return 0
