"""AMBER end to end: a program to copy and modify.

    python trainers/amber.py sw-en.tsv.gz news.sw.txt out/sw

trains the starter encoder on a bitext (TSV with the header ``source target``) and on monolingual text (one sentence per
line, blank lines between documents) with masked language modelling on both, sentence alignment and bidirectional word
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
    """Train an encoder and release it to ``output_dir``."""
    torch.set_flush_denormal(True)  # CPUs are slow with denormal numbers, which peaked softmaxes produce

    # 1. An encoder with mean pooling, because sentence alignment trains the mean of the token states.
    encoder = load_encoder(model, pooling="mean")
    freeze_word_embeddings(encoder)  # about 80 % of the parameters of a small multilingual encoder

    # 2. A bitext and monolingual text: one text of two contiguous sentences for every second pair.
    corpus = load_corpus(bitext)
    print(corpus.report)
    dataset = with_monolingual(corpus.dataset, load_monolingual(text), ratio=0.5)

    # 3. A recipe: `amber.yaml` in full. Without monolingual text, set `monolingual` to False and use `corpus.dataset`.
    recipe = Recipe.from_dict(
        {
            "name": "my-amber",
            "terms": [
                # Predicts pieces of "[CLS] x [SEP] y [SEP]", for translations and for contiguous sentences.
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
                # Each sentence retrieves its translation by an unnormalised dot product.
                {"objective": "sa"},
                # The attention between both sides, computed as in a decoder, agrees in both directions.
                {"objective": "wa"},
            ],
        }
    )
    loss = AlignmentLoss(encoder, recipe)

    # 4. The trainer is based on sentence-transformers' trainer. Each step encodes every sentence once, and each pair once
    #    with masked pieces and twice with the attention masks of word alignment.
    arguments = AlignmentTrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=16,
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

    # 5. The release is a plain SentenceTransformer folder without heads; it loads without metaphrase.
    if trainer.is_world_process_zero():
        release(encoder, output_dir, recipe=recipe.to_dict())
        print(f"SentenceTransformer({output_dir!r}) loads it.")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))
