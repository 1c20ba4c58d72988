"""The command line, in a process that gets a SIGTERM in its second step."""

import os
import signal
import sys

from metaphrase import cli
from metaphrase.training.trainer import AlignmentTrainer

step = AlignmentTrainer.training_step


def training_step(trainer, *args, **kwargs):
    if trainer.state.global_step + 1 == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(trainer, *args, **kwargs)


if __name__ == "__main__":
    AlignmentTrainer.training_step = training_step
    sys.exit(cli.main(sys.argv[1:]))
