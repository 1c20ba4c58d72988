"""Fine-tune an encoder on extractive question answering and report F1 and exact match in each language.

    python trainers/finetune_qa.py --config src/metaphrase/evaluation/transfer/small/xquad.yaml \
        --model out/sw --halves xquad --output_dir out/xquad
    python trainers/finetune_qa.py --config configs/finetune/ppa-mlqa.yaml \
        --model out/ppa --train hf:rajpurkar/squad@train --dev MLQA_V1/dev --test MLQA_V1/test --output_dir out/mlqa

Question and context are in the same language (XLT). ``evaluation.transfer.running`` documents modes and the selection of
checkpoints, ``evaluation.transfer.data`` the data. The papers' hyper-parameters are in ``configs/finetune``. If it is run
again, an interrupted program resumes and a finished one prints its table.
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
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table; ``results.json`` contains all results."""
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
    except (MetaphraseError, ValueError, OSError, ImportError) as error:
        sys.exit(f"trainers/finetune_qa.py: {error}")
