"""``metaphrase train``: from a bitext to a released encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metaphrase.cli.output import emit
from metaphrase.cli.runs import execute, execute_and_print, parse_run
from metaphrase.cli.tables import runs_table
from metaphrase.encoders.names import model_folder
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import Seed, checked
from metaphrase.io.configuration import option
from metaphrase.io.environment import prepare_process
from metaphrase.io.outputs import check_folder, check_writable
from metaphrase.publishing.run_comparison import compare_runs
from metaphrase.training.configuration import RunConfig
from metaphrase.training.resuming import FALSE, TRUE, checkpoint_to_resume
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
        UsageError: There are no test sets, all runs would be pushed to one repository or resumed from one checkpoint, or the
            output folder of a run is the encoder's or holds files that this library did not write.
        CheckpointError: The output folder of a run holds checkpoints, and is not resumed.
    """
    if config.push_to_hub:
        raise UsageError("--seeds trains several encoders: omit --push_to_hub, and push one with `metaphrase push`.")
    if not (config.test and config.output_dir):
        raise UsageError("--seeds compares runs: pass --output_dir and test sets with --test.")
    folders = {seed: str(Path(config.output_dir) / f"seed-{seed}") for seed in seeds}
    settings: list[dict[str, Any]] = [{"seed": seed, "output_dir": folder} for seed, folder in folders.items()]
    runs = [replace(config, **own) for own in settings]
    _check_folders(runs)
    for one in runs:
        execute(TrainingRun(one))
    if config.training_arguments().process_index == 0:
        rows = compare_runs([*folders.values()])
        emit({"runs": [*folders.values()], "rows": rows}, runs_table(rows))
    return 0


def _check_folders(runs: Sequence[RunConfig]) -> None:
    """Refuse output folders that cannot be used before the first run is trained."""
    resume = str(runs[0].resume_from_checkpoint or "false").lower()
    if resume not in (*TRUE, *FALSE):
        raise UsageError("With --seeds, --resume_from_checkpoint is true or false: a checkpoint belongs to one seed.")
    for one in runs:
        check_folder(str(one.output_dir), model=model_folder(one.model))
        check_writable(Path(str(one.output_dir)))
        if resume in FALSE:
            checkpoint_to_resume(TrainingRun(one).arguments)
