"""Fine-tune an encoder on translation with a randomly initialised decoder and report BLEU and chrF.

    python trainers/finetune_translation.py --config src/metaphrase/evaluation/transfer/small/translation.yaml \
        --model out/sw --train lafand --test lafand --language sw --output_dir out/mt

Requires ``pip install 'metaphrase[finetuning]'`` (sacreBLEU). The hyper-parameters of the paper are in
``configs/finetune/mgc-translation.yaml``. If it is run again, an interrupted program resumes and a
finished one prints its table.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from metaphrase.cli import parse
from metaphrase.evaluation.transfer import FineTuningArguments
from metaphrase.evaluation.transfer.translation import TranslationOptions, finetune_translation, translation_table
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table; ``results.json`` contains all results."""
    options, arguments = parse(
        "trainers/finetune_translation.py",
        [TranslationOptions, FineTuningArguments],
        argv,
        description=(__doc__ or "").splitlines()[0],
    )
    prepare_process()
    results = finetune_translation(options, arguments)
    if results:
        Console().print(translation_table(results))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (MetaphraseError, ValueError, OSError, ImportError) as error:
        sys.exit(f"trainers/finetune_translation.py: {error}")
