"""Fine-tune an encoder on questions with answers in a text; measure F1 and exact match in each language.

    python trainers/finetune_qa.py --config src/metaphrase/finetuning/small/xquad.yaml \
        --model out/sw --halves xquad --output_dir out/xquad
    python trainers/finetune_qa.py --config configs/finetune/ppa-mlqa.yaml \
        --model out/ppa --train hf:rajpurkar/squad@train --dev MLQA_V1/dev --test MLQA_V1/test --output_dir out/mlqa

Question and context are of the same language (XLT). ``evaluation.transfer.running`` tells of modes and of the choice of
checkpoints, ``evaluation.transfer.data`` of data; the papers' hyper-parameters are in ``configs/finetune``. Called again,
an interrupted program goes on where it was, and a finished one prints its table.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from metaphrase.cli import parse
from metaphrase.evaluation.transfer import (
    FineTuningArguments,
    QuestionAnsweringOptions,
    finetune_question_answering,
    results_table,
)
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, measure, print the table; ``results.json`` holds the rest."""
    options, arguments = parse(
        "trainers/finetune_qa.py",
        [QuestionAnsweringOptions, FineTuningArguments],
        argv,
        description=(__doc__ or "").splitlines()[0],
    )
    prepare_process()
    results = finetune_question_answering(options, arguments)
    if results:
        Console().print(results_table(results))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"trainers/finetune_qa.py: {error}")
