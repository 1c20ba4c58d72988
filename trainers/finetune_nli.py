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

from collections.abc import Sequence

from metaphrase.cli.finetuning import run, start
from metaphrase.evaluation.transfer import ClassificationOptions, finetune_classification

PROGRAM = "trainers/finetune_nli.py"


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table."""
    return run(PROGRAM, __doc__, ClassificationOptions, finetune_classification, argv)


if __name__ == "__main__":
    start(PROGRAM, main)
