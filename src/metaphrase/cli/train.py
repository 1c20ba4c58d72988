"""``metaphrase train``: from a bitext to a released encoder."""

from __future__ import annotations

from collections.abc import Sequence

from metaphrase.cli.runs import execute_and_print, parse_run
from metaphrase.io.environment import prepare_process
from metaphrase.training.run import TrainingRun

EXAMPLES = (
    "metaphrase train --corpus sw-en.tsv.gz --languages sw --output_dir runs/sw --max_steps 300 --test my-test-sets/",
    "metaphrase train --recipe wacse --corpus a-folder/ --temperature 0.7 --output_dir runs/all",
    "torchrun --nproc_per_node 8 -m metaphrase train --config run.yaml",
)


def run(argv: Sequence[str]) -> int:
    """Train, release and measure; print the results and their location."""
    config, command = parse_run(
        argv,
        prog="metaphrase train",
        description="Train an encoder with a recipe and release it.",
        examples=EXAMPLES,
    )
    prepare_process()
    execute_and_print(TrainingRun(config, command=command))
    return 0
