"""One of two ranks that trains on a stream whose files do not come out even; prints a digest of its weights."""

import hashlib
import sys

import torch

from metaphrase import load_corpus
from metaphrase.encoders.loading import load_encoder
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer


def main(encoder, folder, output):
    torch.manual_seed(3)
    model = load_encoder(encoder, device="cpu")
    loss = AlignmentLoss(model, Recipe.load("dap"), max_length=24)
    arguments = AlignmentTrainingArguments(
        output_dir=output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_drop_last=True,
        disable_tqdm=True,
    )
    stream = load_corpus(folder, streaming=True).dataset
    trainer = AlignmentTrainer(model=model, args=arguments, train_dataset=stream, loss=loss)
    trainer.train()
    digest = hashlib.md5(b"".join(value.detach().numpy().tobytes() for value in loss.parameters())).hexdigest()
    sys.stdout.write(f"<{trainer.state.global_step} {digest}>\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
