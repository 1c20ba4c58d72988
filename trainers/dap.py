"""DAP end to end: a program to copy and modify.

    python trainers/dap.py sw-en.tsv.gz out/sw

trains the starter encoder on a bitext (TSV with the header ``source target``) with translation ranking and
representation translation learning (Li et al. 2023), and releases a SentenceTransformer.
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
from metaphrase.encoders.loading import freeze_word_embeddings, used_piece_ids


def main(bitext: str, output_dir: str, model: str = "starter", max_steps: int = 300) -> None:
    """Train an encoder and release it to ``output_dir``."""
    torch.set_flush_denormal(True)  # CPUs are slow with denormal numbers, which peaked softmaxes produce

    # 1. An encoder: any SentenceTransformer or BERT-like checkpoint. "starter" works without the Hub.
    encoder = load_encoder(model, default_pooling="cls")
    freeze_word_embeddings(encoder)  # about 80 % of the parameters of a small multilingual encoder

    # 2. A cleaned bitext. The report shows what was dropped and why.
    corpus = load_corpus(bitext)
    print(corpus.report)

    # 3. A recipe: a weighted sum of objectives. This is `dap.yaml`, with ranking in both directions and with
    #    the vocabulary restricted to the English side, which saves time on a small machine.
    recipe = Recipe.from_dict(
        {
            "name": "my-dap",
            "terms": [
                {"objective": "tr", "args": {"direction": "symmetric", "mask_duplicates": True}},
                {"objective": "rtl", "args": {"vocabulary": "english"}},
            ],
        }
    )

    # 4. The loss encodes each side once and passes the encodings to both objectives.
    english_ids = used_piece_ids(corpus.dataset["target"], encoder.tokenizer)
    loss = AlignmentLoss(encoder, recipe, english_ids=english_ids)

    # 5. The trainer is based on sentence-transformers' trainer; it saves, clips and synchronises heads.
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
