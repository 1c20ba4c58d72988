"""MEXMA from first to last, in the library's own words: a tutorial to copy and change.

    python trainers/mexma.py sw-en.tsv.gz out/sw

trains the starter encoder on a bitext (TSV with the header ``source target``) by cross-unmasking (Janeiro et al. 2025): what
is masked in one sentence is predicted with the help of the other's embedding. It releases a SentenceTransformer.
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
from metaphrase.encoders.loading import freeze_word_embeddings


def main(bitext: str, output_dir: str, model: str = "starter", max_steps: int = 300) -> None:
    """Train, and release to ``output_dir``."""
    torch.set_flush_denormal(True)  # peaked softmaxes end in denormal numbers, on which CPUs are slow

    # 1. An encoder. Its first token's state is the sentence embedding, which a pretrained encoder does not have yet.
    encoder = load_encoder(model, default_pooling="cls")
    freeze_word_embeddings(encoder)  # the unmasking predicts on the same table, which so needs no gradient

    # 2. A bitext, cleaned; the report says what was dropped and why.
    corpus = load_corpus(bitext)
    print(corpus.report)

    # 3. A recipe: `mexma.yaml` with a head of 2 layers instead of 6, for a short run. There are no negatives: KoLeo alone
    #    keeps the embeddings from falling together. To see what the unmasking is worth, set `unmasking_gradient` to
    #    "sentence" or "tokens": it then reaches the encoder at the embeddings or at the pieces only.
    recipe = Recipe.from_dict(
        {
            "name": "my-mexma",
            "terms": [
                {"objective": "mexma", "args": {"mask_rate": 0.4, "layers": 2, "heads": 8, "koleo_weight": 0.01}}
            ],
            "max_length": 64,
        }
    )

    # 4. The loss encodes both sentences, clean and masked, in one call: four sentences for a pair.
    loss = AlignmentLoss(encoder, recipe)

    # 5. The trainer is sentence-transformers' own. The head starts at random and learns faster than the encoder. Copies of
    #    a sentence in one batch would be neighbours that KoLeo cannot part.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=32,
        learning_rate=5e-5,
        head_learning_rate=5e-4,
        warmup_steps=0.1,
        max_grad_norm=1.2,
        batch_sampler="no_duplicates",
        logging_steps=10,
        report_to="none",
    )
    trainer = AlignmentTrainer(model=encoder, args=arguments, train_dataset=corpus.dataset, loss=loss)
    trainer.train()

    # 6. The release is a plain SentenceTransformer folder: no heads, no code of ours needed to load it.
    release(encoder, output_dir, recipe=recipe.to_dict())
    print(f"SentenceTransformer({output_dir!r}) loads it.")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
