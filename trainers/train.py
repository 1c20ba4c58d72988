"""Train an encoder with any recipe, from Python: a configuration in, a release out.

Run it on one machine, or on several processes with torchrun::

    python trainers/train.py --recipe dap --model starter --corpus sw-en.tsv.gz --languages sw --output_dir out/sw
    torchrun --nproc_per_node 8 trainers/train.py --recipe dap --paper_training true --model xlm-roberta-base \
        --corpus corpus/ --output_dir out/dap

It has the options of ``metaphrase train``, which adds YAML files and tables. For other changes, start from
``trainers/dap.py``.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from transformers import HfArgumentParser

from metaphrase import RunConfig, TrainingRun
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, release, and print where the results are."""
    parser = HfArgumentParser(RunConfig, usage="python trainers/train.py [OPTIONS]", allow_abbrev=False)
    # Only what is given reaches the configuration: other settings come from the recipe.
    namespace = argparse.Namespace(**dict.fromkeys((option.name for option in fields(RunConfig)), ...))
    given = vars(parser.parse_args(list(argv), namespace))
    config = RunConfig(**{name: value for name, value in given.items() if value is not ...})
    prepare_process()
    result = TrainingRun(config).execute()
    if result is not None:
        print(result.report or result.output)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (MetaphraseError, ValueError, OSError, ImportError) as error:
        sys.exit(f"trainers/train.py: {error}")
