"""Fine-tune an encoder on part-of-speech tagging and report chunk F1 and accuracy in each language.

    python trainers/finetune_tagging.py --config src/metaphrase/evaluation/transfer/small/ud.yaml \
        --model out/sw --train ud@dev --test ud@test --output_dir out/pos
    python trainers/finetune_tagging.py --config configs/finetune/amber-pos.yaml \
        --model out/amber --train UD_English-EWT --dev UD_English-EWT --test ud-treebanks --output_dir out/pos

F1 is seqeval's on plain tags, as in XTREME; ``evaluation.transfer.tag_scores`` explains it.
``evaluation.transfer.running`` documents the selection of checkpoints, ``evaluation.transfer.data`` the data. The papers'
hyper-parameters are in ``configs/finetune``. If it is run again, an interrupted program resumes and a finished one prints its
table.
"""

from collections.abc import Sequence

from metaphrase.cli.finetuning import run, start
from metaphrase.evaluation.transfer import TaggingOptions, finetune_tagging

PROGRAM = "trainers/finetune_tagging.py"


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table."""
    return run(PROGRAM, __doc__, TaggingOptions, finetune_tagging, argv)


if __name__ == "__main__":
    start(PROGRAM, main)
