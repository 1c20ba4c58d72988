"""MGC end to end: a program to copy and modify.

    python trainers/mgc.py sw-en.tsv.gz out/sw

extracts word links and phrases from a bitext (TSV with the header ``source target``), trains the starter encoder with
word, span and sentence contrast and masked language modelling (Li et al. 2021), and releases a SentenceTransformer. If
the bitext has the columns ``source_bt`` and ``target_bt`` of ``scripts/back_translate.py``, back-translations replace half
of the sentences.
"""

import sys
from pathlib import Path

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
from metaphrase.io.outputs import claim_folder


def main(bitext: str, output_dir: str, model: str = "starter", max_steps: int = 300) -> None:
    """Align words, train an encoder and release it to ``output_dir``."""
    torch.set_flush_denormal(True)  # CPUs are slow with denormal numbers, which peaked softmaxes produce
    claim_folder(output_dir)  # the phrases are written before the trainer does this

    # 1. An encoder with frozen word embeddings.
    encoder = load_encoder(model, default_pooling="mean")
    freeze_word_embeddings(encoder)

    # 2. A cleaned bitext with word links, which fast_align learns from the bitext itself. grow-diag-final-and combines
    #    the links of both directions; it suits phrase extraction.
    corpus = load_corpus(bitext)
    dataset, links = add_alignment(corpus.dataset, "fast_align")
    print(f"{links.total.links / links.total.pairs:.1f} links per pair on average.")

    # 3. Phrases that translate each other with a probability above one half.
    table = PhraseTable.of_corpus(dataset).filter(0.5)
    phrases = table.save(f"{Path(output_dir)}-phrases.tsv.gz")
    print(f"{len(table):,} phrase pairs.")

    # 4. A recipe: `mgc-hard.yaml` with the phrase table. A word can have several links, so its other
    #    translations are not negatives. `mgc-soft.yaml` learns word links by attention instead.
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

    # 5. The loss encodes each side once and passes the encodings to all three contrasts.
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
