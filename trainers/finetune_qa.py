"""Fine-tune an encoder on extractive question answering and report F1 and exact match in each language.

    python trainers/finetune_qa.py --config src/metaphrase/evaluation/transfer/small/xquad.yaml \
        --model out/sw --halves xquad --output_dir out/xquad
    python trainers/finetune_qa.py --config configs/finetune/ppa-mlqa.yaml \
        --model out/ppa --train hf:rajpurkar/squad@train --dev MLQA_V1/dev --test MLQA_V1/test --output_dir out/mlqa

Question and context are in the same language (XLT). ``evaluation.transfer.running`` documents modes and the selection of
checkpoints, ``evaluation.transfer.data`` the data. The papers' hyper-parameters are in ``configs/finetune``. If it is run
again, an interrupted program resumes and a finished one prints its table.
"""

from collections.abc import Sequence

from metaphrase.cli.finetuning import run, start
from metaphrase.evaluation.transfer import QuestionAnsweringOptions, finetune_question_answering

PROGRAM = "trainers/finetune_qa.py"


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table."""
    return run(PROGRAM, __doc__, QuestionAnsweringOptions, finetune_question_answering, argv)


if __name__ == "__main__":
    start(PROGRAM, main)
