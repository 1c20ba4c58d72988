"""Fine-tune an encoder on natural language inference or paraphrases and report its accuracy in each language.

    python trainers/finetune_nli.py --config src/metaphrase/evaluation/transfer/small/xnli.yaml \
        --model out/sw --halves xnli@dev --output_dir out/xnli
    torchrun --nproc_per_node 8 trainers/finetune_nli.py --config configs/finetune/xtreme-xnli.yaml \
        --model out/dap --train hf:facebook/xnli:{language}@train --dev hf:facebook/xnli:{language}@validation \
        --test hf:facebook/xnli:{language}@test --output_dir out/xnli

``evaluation.transfer.running`` documents modes and the selection of checkpoints, ``evaluation.transfer.data`` the data.
The papers' hyper-parameters are in ``configs/finetune``. If it is run again, an interrupted program resumes and a
finished one prints its table.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from metaphrase.cli import parse
from metaphrase.evaluation.transfer import (
    ClassificationOptions,
    FineTuningArguments,
    finetune_classification,
    results_table,
)
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table; ``results.json`` contains all results."""
    options, arguments = parse(
        "trainers/finetune_nli.py",
        [ClassificationOptions, FineTuningArguments],
        argv,
        description=(__doc__ or "").splitlines()[0],
    )
    prepare_process()
    results = finetune_classification(options, arguments)
    if results:
        Console().print(results_table(results))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (MetaphraseError, ValueError, OSError, ImportError) as error:
        sys.exit(f"trainers/finetune_nli.py: {error}")
