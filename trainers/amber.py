"""AMBER from first to last, in the library's own words: a tutorial to copy and change.

    python trainers/amber.py sw-en.tsv.gz news.sw.txt out/sw

trains the starter encoder on a bitext (TSV with the header ``source target``) and on monolingual text (one sentence a
line, blank lines between documents) by masked language modelling over both, sentence alignment and bidirectional word
alignment (Hu et al. 2021), and releases a SentenceTransformer.
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
from metaphrase.corpus.monolingual import load_monolingual, with_monolingual
from metaphrase.encoders.loading import freeze_word_embeddings


def main(bitext: str, text: str, output_dir: str, model: str = "starter", max_steps: int = 300) -> None:
    """Train, and release to ``output_dir``."""
    torch.set_flush_denormal(True)  # peaked softmaxes end in denormal numbers, on which CPUs are slow

    # 1. An encoder. Sentence alignment trains the mean of the token states, so that is what it pools.
    encoder = load_encoder(model, pooling="mean")
    freeze_word_embeddings(encoder)  # nine tenths of the parameters of a small multilingual encoder

    # 2. A bitext, and monolingual text beside it: a text of two contiguous sentences for every second pair.
    corpus = load_corpus(bitext)
    print(corpus.report)
    dataset = with_monolingual(corpus.dataset, load_monolingual(text), ratio=0.5)

    # 3. A recipe. This is `amber.yaml` written out. Without monolingual text, set `monolingual` to False and skip it above.
    recipe = Recipe.from_dict(
        {
            "name": "my-amber",
            "terms": [
                # Pieces of "[CLS] x [SEP] y [SEP]" are predicted, of translations and of contiguous sentences alike.
                {
                    "objective": "tlm",
                    "args": {
                        "mask_rate": 0.15,
                        "positions": "continuous",
                        "layout": "pair",
                        "segments": True,
                        "monolingual": True,
                    },
                },
                # A sentence must pick out its translation by an unnormalised dot product.
                {"objective": "sa"},
                # What each side attends to of the other, read as a decoder reads, must agree in both directions.
                {"objective": "wa"},
            ],
        }
    )
    loss = AlignmentLoss(encoder, recipe)

    # 4. The trainer is sentence-transformers' own. Each step encodes every sentence once alone, each pair once with masks
    #    and twice under the masks of word alignment.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=16,
        learning_rate=5e-5,
        head_learning_rate=5e-4,
        warmup_steps=0.1,
        batch_sampler="no_duplicates",
        logging_steps=10,
        report_to="none",
    )
    trainer = AlignmentTrainer(model=encoder, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train()

    # 5. The release is a plain SentenceTransformer folder: no heads, no code of ours needed to load it.
    release(encoder, output_dir, recipe=recipe.to_dict())
    print(f"SentenceTransformer({output_dir!r}) loads it.")


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))
