"""MEXMA end to end: a program to copy and modify.

    python trainers/mexma.py sw-en.tsv.gz out/sw

trains the starter encoder on a bitext (TSV with the header ``source target``) with cross-unmasking (Janeiro et al. 2025):
masked pieces of one sentence are predicted with the embedding of the other. It releases a SentenceTransformer.
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
    """Train an encoder and release it to ``output_dir``."""
    torch.set_flush_denormal(True)  # CPUs are slow with denormal numbers, which peaked softmaxes produce

    # 1. An encoder. The state of its first token becomes the sentence embedding.
    encoder = load_encoder(model, default_pooling="cls")
    freeze_word_embeddings(encoder)  # unmasking predicts with the same embeddings, which then need no gradient

    # 2. A cleaned bitext. The report shows what was dropped and why.
    corpus = load_corpus(bitext)
    print(corpus.report)

    # 3. A recipe: `mexma.yaml` with a head of 2 layers instead of 6, for a short run. There are no negatives: only
    #    KoLeo prevents the embeddings from collapsing. To ablate the unmasking, set `unmasking_gradient` to "sentence" or
    #    "tokens": its gradient then reaches the encoder through the sentence embeddings or the pieces only.
    recipe = Recipe.from_dict(
        {
            "name": "my-mexma",
            "terms": [
                {"objective": "mexma", "args": {"mask_rate": 0.4, "layers": 2, "heads": 8, "koleo_weight": 0.01}}
            ],
            "max_length": 64,
        }
    )

    # 4. The loss encodes both sentences, unmasked and masked, in one call: four sentences per pair.
    loss = AlignmentLoss(encoder, recipe)

    # 5. The trainer is based on sentence-transformers' trainer. The head is randomly initialised and has a higher learning
    #    rate. Duplicates in a batch would be neighbours that KoLeo cannot separate.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=32,
        learning_rate=5e-5,
        head_learning_rate=5e-4,
        warmup_steps=0.1,
        max_grad_norm=1.2,
        batch_sampler="no_duplicates",
        save_steps=50,
        logging_steps=10,
        report_to="none",
    )
    trainer = AlignmentTrainer(model=encoder, args=arguments, train_dataset=corpus.dataset, loss=loss)
    trainer.train()

    # 6. The release is a plain SentenceTransformer folder without heads; it loads without metaphrase.
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
