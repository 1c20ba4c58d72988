"""Fine-tune an encoder on translation, below a decoder that starts at random; measure BLEU and chrF.

    python trainers/finetune_translation.py --config src/metaphrase/finetuning/small/translation.yaml \
        --model out/sw --train lafand --test lafand --language sw --output_dir out/mt

It needs ``pip install 'metaphrase[finetuning]'``: sacreBLEU, whose signature names the tokenisation. The hyper-parameters
of the paper are in ``configs/finetune/mgc-translation.yaml``. Called again, an interrupted program goes on where it was, and
a finished one prints its table.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from metaphrase.cli import parse
from metaphrase.evaluation.transfer import FineTuningArguments
from metaphrase.evaluation.transfer.translation import TranslationOptions, finetune_translation, translation_table
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, measure, print the table; ``results.json`` holds the rest."""
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
    except (ValueError, OSError) as error:
        sys.exit(f"trainers/finetune_translation.py: {error}")
