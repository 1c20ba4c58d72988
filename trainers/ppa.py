"""PPA end to end: a program to copy and modify.

    python trainers/ppa.py sw-en.tsv.gz out/sw

trains the starter encoder on a bitext (TSV with the header ``source target``) with momentum contrast and translation
language modelling (Pan et al. 2021), and releases a SentenceTransformer. To fine-tune the result on translated training
data, see ``metaphrase.corpus.code_switching``.
"""

import sys

import torch

from metaphrase import (
    AlignmentLoss,
    AlignmentTrainer,
    AlignmentTrainingArguments,
    Recipe,
    load_corpus,
    load_encoder,
    release,
)
from metaphrase.corpus import Cleaning
from metaphrase.encoders.loading import freeze_word_embeddings


def main(bitext: str, output_dir: str, model: str = "starter", max_steps: int = 300) -> None:
    """Train an encoder and release it to ``output_dir``."""
    torch.set_flush_denormal(True)  # CPUs are slow with denormal numbers, which peaked softmaxes produce

    # 1. An encoder with frozen word embeddings, so that those of the momentum encoder need no update either.
    encoder = load_encoder(model, default_pooling="cls")
    freeze_word_embeddings(encoder)

    # 2. A bitext, cleaned as in PPA: at least 10 pieces per side, at most 128 pieces per pair.
    corpus = load_corpus(bitext, cleaning=Cleaning.ppa(), tokenizer=encoder.tokenizer)
    print(corpus.report)

    # 3. A recipe: `ppa.yaml` with a small queue and sentences of 32 instead of 128 pieces, for a short run. The 1,024 keys of
    #    the queue are at most 32 batches old; the paper's 32,000 keys would stay random for the first 1,000 steps.
    recipe = Recipe.from_dict(
        {
            "name": "my-ppa",
            "terms": [
                {"objective": "moco", "args": {"queue_size": 1024, "momentum": 0.99}},
                {
                    "objective": "tlm",
                    "args": {
                        "mask_rate": 0.15,
                        "positions": "continuous",
                        "layout": "pair",
                        "segments": True,
                        "order": "shuffled",  # the order in which the contrast assigns sides to encoder and momentum encoder
                    },
                },
            ],
        }
    )

    # 4. The loss. It copies the current encoder as the momentum encoder.
    loss = AlignmentLoss(encoder, recipe)

    # 5. The trainer updates the momentum encoder after every step. Checkpoints contain the queue and the momentum encoder.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=32,
        learning_rate=3e-5,
        head_learning_rate=5e-4,
        weight_decay=0.01,
        warmup_steps=0.1,
        save_steps=50,
        logging_steps=10,
        report_to="none",
    )
    trainer = AlignmentTrainer(model=encoder, args=arguments, train_dataset=corpus.dataset, loss=loss)
    trainer.train()

    # 6. The release is the encoder only, a plain SentenceTransformer folder.
    if trainer.is_world_process_zero():
        release(encoder, output_dir, recipe=recipe.to_dict())
        print(f"SentenceTransformer({output_dir!r}) loads it.")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
