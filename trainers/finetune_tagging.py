"""Fine-tune an encoder on part-of-speech tagging and report chunk F1 and accuracy in each language.

    python trainers/finetune_tagging.py --config src/metaphrase/evaluation/transfer/small/ud.yaml \
        --model out/sw --train ud@dev --test ud@test --output_dir out/pos
    python trainers/finetune_tagging.py --config configs/finetune/amber-pos.yaml \
        --model out/amber --train UD_English-EWT --dev UD_English-EWT --test ud-treebanks --output_dir out/pos

F1 is seqeval's on plain tags, as in XTREME; ``evaluation.transfer.tag_scores`` explains it.
``evaluation.transfer.running`` documents the selection of checkpoints, ``evaluation.transfer.data`` the data. The papers'
hyper-parameters are in ``configs/finetune``. If it is run again,
an interrupted program resumes and a finished one prints its table.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from metaphrase.cli import parse
from metaphrase.evaluation.transfer import FineTuningArguments, TaggingOptions, finetune_tagging, results_table
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, evaluate and print the table; ``results.json`` contains all results."""
    options, arguments = parse(
        "trainers/finetune_tagging.py",
        [TaggingOptions, FineTuningArguments],
        argv,
        description=(__doc__ or "").splitlines()[0],
    )
    prepare_process()
    results = finetune_tagging(options, arguments)
    if results:
        Console().print(results_table(results))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (MetaphraseError, ValueError, OSError, ImportError) as error:
        sys.exit(f"trainers/finetune_tagging.py: {error}")
