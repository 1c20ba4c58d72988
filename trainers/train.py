"""Train an encoder with any recipe: the program behind ``metaphrase train``.

Run it on one machine, or on several processes with torchrun::

    python trainers/train.py --recipe dap --model starter --corpus sw-en.tsv.gz --languages sw --output_dir out/sw
    torchrun --nproc_per_node 8 trainers/train.py --recipe dap --paper_training true --model xlm-roberta-base \
        --corpus corpus/ --output_dir out/dap

``--help`` lists the options. To change anything else, start from ``trainers/dap.py``.
"""

import sys

from metaphrase.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
