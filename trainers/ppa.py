"""PPA from first to last, in the library's own words: a tutorial to copy and change.

    python trainers/ppa.py sw-en.tsv.gz out/sw

aligns the starter encoder on a bitext (TSV with the header ``source target``) by momentum contrast and translation
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
    """Train, and release to ``output_dir``."""
    torch.set_flush_denormal(True)  # peaked softmaxes end in denormal numbers, on which CPUs are slow

    # 1. An encoder, and its word embeddings kept as they are: then the momentum encoder's need no update either.
    encoder = load_encoder(model, default_pooling="cls")
    freeze_word_embeddings(encoder)

    # 2. A bitext without the pairs that PPA leaves out: a side of less than 10 pieces, more than 128 on both together.
    corpus = load_corpus(bitext, cleaning=Cleaning.ppa(), tokenizer=encoder.tokenizer)
    print(corpus.report)

    # 3. A recipe: `ppa.yaml` with a queue for a short run, and 32 pieces of a sentence in place of 128. The queue's 1,024
    #    keys are 32 batches old at most; the paper's 32,000 would hold random directions for the first 1,000 steps.
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
                        "order": "shuffled",  # in the order that the contrast shows to encoder and momentum encoder
                    },
                },
            ],
        }
    )

    # 4. The loss: it makes the momentum encoder from the encoder as it is now.
    loss = AlignmentLoss(encoder, recipe)

    # 5. The trainer lets the momentum encoder follow after every step; queue and momentum encoder are in its checkpoints.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=32,
        learning_rate=3e-5,
        head_learning_rate=5e-4,
        weight_decay=0.01,
        warmup_steps=0.1,
        logging_steps=10,
        report_to="none",
    )
    trainer = AlignmentTrainer(model=encoder, args=arguments, train_dataset=corpus.dataset, loss=loss)
    trainer.train()

    # 6. The release is the encoder alone, a plain SentenceTransformer folder.
    release(encoder, output_dir, recipe=recipe.to_dict())
    print(f"SentenceTransformer({output_dir!r}) loads it.")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
