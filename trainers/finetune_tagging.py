"""Fine-tune an encoder on parts of speech; measure chunk F1 and accuracy in each language.

    python trainers/finetune_tagging.py --config src/metaphrase/finetuning/small/ud.yaml \
        --model out/sw --train ud@dev --test ud@test --output_dir out/pos
    python trainers/finetune_tagging.py --config configs/finetune/amber-pos.yaml \
        --model out/amber --train UD_English-EWT --dev UD_English-EWT --test ud-treebanks --output_dir out/pos

F1 is that of seqeval on bare tags, as XTREME reports it; ``evaluation.transfer.tag_scores`` says what that means.
``evaluation.transfer.running`` tells of the choice of checkpoints, ``evaluation.transfer.data`` of data; the papers'
hyper-parameters are in ``configs/finetune``. Called again, an interrupted program goes on where it was, and a finished one
prints its table.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from metaphrase.cli import parse
from metaphrase.evaluation.transfer import FineTuningArguments, TaggingOptions, finetune_tagging, results_table
from metaphrase.io.environment import prepare_process


def main(argv: Sequence[str]) -> int:
    """Train, measure, print the table; ``results.json`` holds the rest."""
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
    except (ValueError, OSError) as error:
        sys.exit(f"trainers/finetune_tagging.py: {error}")
