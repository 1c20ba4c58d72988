"""Fine-tune an encoder on translation with a randomly initialised decoder and report BLEU and chrF.

    python trainers/finetune_translation.py --config src/metaphrase/evaluation/transfer/small/translation.yaml \
        --model out/sw --train lafand --test lafand --language sw --output_dir out/mt

Requires ``pip install 'metaphrase[finetuning]'`` (sacreBLEU). The hyper-parameters of the paper are in
``configs/finetune/mgc-translation.yaml``. If it is run again, an interrupted program resumes and a finished one prints its
table.
"""

from collections.abc import Sequence

from metaphrase.cli.finetuning import run, start
from metaphrase.evaluation.transfer.translation import TranslationOptions, finetune_translation, translation_table

PROGRAM = "trainers/finetune_translation.py"


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table."""
    return run(PROGRAM, __doc__, TranslationOptions, finetune_translation, argv, translation_table)


if __name__ == "__main__":
    start(PROGRAM, main)
