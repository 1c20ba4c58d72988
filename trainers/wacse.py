"""WACSE from first to last, in the library's own words: a tutorial to copy and change.

    python trainers/wacse.py sw-en.tsv.gz out/sw

finds the word links of a bitext (TSV with the header ``source target``) with fast_align, trains the starter encoder by
translation ranking, aligned word prediction and word translation ranking (Miao et al. 2024), and releases a
SentenceTransformer.
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
from metaphrase.aligners.linking import add_alignment
from metaphrase.encoders.loading import freeze_word_embeddings


def main(bitext: str, output_dir: str, model: str = "starter", max_steps: int = 300) -> None:
    """Align, train, and release to ``output_dir``."""
    torch.set_flush_denormal(True)  # peaked softmaxes end in denormal numbers, on which CPUs are slow

    # 1. An encoder, and its word embeddings kept as they are.
    encoder = load_encoder(model, default_pooling="cls")
    freeze_word_embeddings(encoder)

    # 2. A bitext, cleaned.
    corpus = load_corpus(bitext)
    print(corpus.report)

    # 3. Which words translate each other: fast_align learns it from the bitext itself. The paper takes WSPAlign; any
    #    aligner of `metaphrase align` will do. Links that are found in both directions are few and sure.
    dataset, links = add_alignment(corpus.dataset, "fast_align", heuristic="intersection")
    print(f"{links.total.links / links.total.pairs:.1f} links in an average pair.")

    # 4. A recipe. This is `wacse.yaml`, but at most 40 % of a sentence's pieces are masked: fast_align links nearly every
    #    word, and a sentence that is masked throughout leaves nothing to predict from.
    recipe = Recipe.from_dict(
        {
            "name": "my-wacse",
            "terms": [
                {"objective": "tr", "weight": 0.8},
                {"objective": "awp", "weight": 0.1, "args": {"max_mask_ratio": 0.4}},
                {"objective": "wtr", "weight": 0.1},
            ],
        }
    )

    # 5. The loss encodes four kinds of rows in one pass: either side as it is, for the two rankings, and with its linked
    #    words masked. For a vector of each text's language at the input, say `"language_embedding": True` in the recipe and
    #    `languages=["sw", "en"]` here, and release with `metaphrase.publishing.hub.release_languages`.
    loss = AlignmentLoss(encoder, recipe)

    # 6. The trainer is sentence-transformers' own, with heads that are saved, resumed, clipped and synchronised.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=32,
        learning_rate=5e-5,
        head_learning_rate=5e-4,
        warmup_steps=0.1,
        batch_sampler="no_duplicates",
        logging_steps=10,
        report_to="none",
    )
    trainer = AlignmentTrainer(model=encoder, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train()

    # 7. The release is a plain SentenceTransformer folder: no heads, no code of ours needed to load it.
    release(encoder, output_dir, recipe=recipe.to_dict())
    print(f"SentenceTransformer({output_dir!r}) loads it.")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
