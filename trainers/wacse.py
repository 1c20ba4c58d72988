"""WACSE end to end: a program to copy and modify.

    python trainers/wacse.py sw-en.tsv.gz out/sw

finds the word links of a bitext (TSV with the header ``source target``) with fast_align, trains the starter encoder with
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
    """Align words, train an encoder and release it to ``output_dir``."""
    torch.set_flush_denormal(True)  # CPUs are slow with denormal numbers, which peaked softmaxes produce

    # 1. An encoder with frozen word embeddings.
    encoder = load_encoder(model, default_pooling="cls")
    freeze_word_embeddings(encoder)

    # 2. A cleaned bitext.
    corpus = load_corpus(bitext)
    print(corpus.report)

    # 3. Word links: fast_align learns them from the bitext itself. The paper uses WSPAlign; any aligner of
    #    `metaphrase align` works. Links found in both directions are fewer but more reliable.
    dataset, links = add_alignment(corpus.dataset, "fast_align", heuristic="intersection")
    print(f"{links.total.links / links.total.pairs:.1f} links per pair on average.")

    # 4. A recipe. This is `wacse.yaml`, but masks at most 40 % of the pieces of a sentence: fast_align links nearly every
    #    word, and a fully masked sentence leaves no context to predict from.
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

    # 5. The loss encodes both sides unmasked, for the two rankings, and with linked words masked, all in one call. To add
    #    a language vector to the input, set `"language_embedding": True` in the recipe and `languages=["sw", "en"]`
    #    here, and release with `metaphrase.publishing.release.release_languages`.
    loss = AlignmentLoss(encoder, recipe)

    # 6. The trainer is based on sentence-transformers' trainer; it saves, clips and synchronises heads.
    #    A checkpoint is saved every 50 steps; `trainer.train(resume_from_checkpoint=True)` resumes from the last one.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=32,
        learning_rate=5e-5,
        head_learning_rate=5e-4,
        warmup_steps=0.1,
        batch_sampler="no_duplicates",
        save_steps=50,
        logging_steps=10,
        report_to="none",
    )
    trainer = AlignmentTrainer(model=encoder, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train()

    # 7. The release is a plain SentenceTransformer folder without heads; it loads without metaphrase.
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
