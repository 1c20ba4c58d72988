"""MGC from first to last, in the library's own words: a tutorial to copy and change.

    python trainers/mgc.py sw-en.tsv.gz out/sw

finds the word links and phrases of a bitext (TSV with the header ``source target``), trains the starter encoder by
contrasting words, phrases and sentences with their translations while it predicts masked pieces (Li et al. 2021), and
releases a SentenceTransformer. Where ``scripts/back_translate.py`` has filled the bitext's columns ``source_bt`` and
``target_bt``, back-translations take the place of half the sentences.
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
from metaphrase.corpus.phrases import PhraseTable
from metaphrase.encoders.loading import freeze_word_embeddings


def main(bitext: str, output_dir: str, model: str = "starter", max_steps: int = 300) -> None:
    """Align, train, and release to ``output_dir``."""
    torch.set_flush_denormal(True)  # peaked softmaxes end in denormal numbers, on which CPUs are slow

    # 1. An encoder, and its word embeddings kept as they are.
    encoder = load_encoder(model, default_pooling="mean")
    freeze_word_embeddings(encoder)

    # 2. A bitext, cleaned, and which words translate each other: fast_align learns it from the bitext itself. Its links in
    #    both directions are put together by grow-diag-final-and, from which phrases are best taken.
    corpus = load_corpus(bitext)
    dataset, links = add_alignment(corpus.dataset, "fast_align")
    print(f"{links.total.links / links.total.pairs:.1f} links in an average pair.")

    # 3. The phrases that translate each other more often than not, whichever side one comes from.
    table = PhraseTable.of_corpus(dataset).filter(0.5)
    phrases = table.save(f"{output_dir}-phrases.tsv.gz")
    print(f"{len(table):,} phrase pairs.")

    # 4. A recipe: `mgc-hard.yaml` with the phrase table. A word may have several links now: none of them is a wrong
    #    answer. `mgc-soft.yaml` learns by attention which words belong together.
    noisy = {"source_bt", "target_bt"} <= set(dataset.column_names)
    recipe = Recipe.from_dict(
        {
            "name": "my-mgc",
            "terms": [
                {"objective": "word-contrast", "args": {"kind": "hard", "mask_positives": True}},
                {"objective": "span-contrast", "args": {"phrase_table": str(phrases)}},
                {"objective": "sentence-contrast", "args": {"back_translation": "sample" if noisy else "none"}},
                {"objective": "tlm", "args": {"mask_rate": 0.15, "positions": "continuous", "layout": "pair"}},
            ],
        }
    )

    # 5. The loss encodes each side once and hands the encodings to all three contrasts.
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
