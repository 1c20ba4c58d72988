"""A short training run in a process of its own, which can kill itself in the middle of a step."""

import os
import signal
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import TrainerCallback

from metaphrase.checkpoints.folders import newest
from metaphrase.encoders.loading import load_encoder
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer


class Die(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(encoder: str, bitext: str, output: str, die_at: str) -> None:
    torch.manual_seed(3)
    dataset = load_dataset("csv", data_files=bitext, sep="\t", split="train").remove_columns("alignment")
    loss = AlignmentLoss(load_encoder(encoder, device="cpu"), Recipe.load("dap"), max_length=24)
    args = AlignmentTrainingArguments(
        output_dir=output,
        per_device_train_batch_size=6,
        max_steps=8,
        save_steps=4,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = AlignmentTrainer(model=loss.model, args=args, train_dataset=dataset, loss=loss)
    if die_at != "none":
        trainer.add_callback(Die(int(die_at)))
    Path(output).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=newest(output))


if __name__ == "__main__":
    train(*sys.argv[1:])
