"""Options of the fine-tuning programs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import BelowOne, BetweenZeroAndOne, Count, Length, Positive, Seed, checked
from metaphrase.io.configuration import option
from metaphrase.io.training_ranges import TrainingRanges, select_device
from metaphrase.modeling.precision import usable_bfloat16

Mode = Literal["zero-shot", "translate-train", "translate-train-all", "code-switching"]
Selection = Literal["mean", "language", "english", "last"]


@checked
@dataclass
class FineTuningOptions:
    """Options of fine-tuning and measuring an encoder."""

    model: str = option("starter", "Encoder to fine-tune: 'starter', a Hub id or a folder (default: starter).")
    train: str | None = option(None, "Training data: PATH[@split] or hf:org/name[:config][@split] (split: train).")
    dev: str | None = option(
        None, "Data for choosing the checkpoint (split: dev). Default: held out from the training data."
    )
    test: str | None = option(None, "Test data (split: test).")
    halves: str | None = option(
        None,
        "Instead of --train, --dev and --test: one parallel data set (split: dev). Half of its items are for "
        "training, of which --dev_share select the checkpoint; the other half is measured in every language.",
    )
    dev_share: BetweenZeroAndOne = option(
        0.1, "Share of all items held out as dev data if --dev is not given; with --halves, below 0.5."
    )
    split_seed: Seed | None = option(
        None,
        "Seed of the split by --halves or --dev_share. Default: --seed. Set it to compare runs with different seeds.",
    )
    languages: list[str] | None = option(None, "Languages to measure, separated by spaces or commas. Default: all.")
    mode: Mode = option(
        "zero-shot",
        "Training data. zero-shot: English; translate-train: a model for each language, from its translated data; "
        "translate-train-all: one model from all translations; code-switching: translate-train with half-English items.",
    )
    selection: Selection = option(
        "mean",
        "Checkpoint. mean: best mean over the dev languages (#M=1); language: best of each language (#M=N); english: best "
        "in English; last: the last.",
    )
    max_length: Length = option(128, "Maximum number of pieces of an input, including special tokens.")
    dropout: BelowOne | None = option(None, "Dropout; default: the encoder's.")
    freeze_word_embeddings: bool = option(False, "Freeze the word embeddings, which saves memory and time.")
    limit_train: Count | None = option(None, "Maximum number of training items of a language.")
    limit_test: Count | None = option(None, "Maximum number of dev items and of test items of a language.")
    keep_checkpoints: bool = option(True, "Keep the chosen checkpoints; false keeps only the results.")


@dataclass
class FineTuningArguments(TrainingRanges, TrainingArguments):
    """transformers' training arguments with other defaults: a dev score and a checkpoint after every epoch."""

    output_dir: str | None = option("", "Folder of checkpoints and results.")
    eval_strategy: str = option("epoch", "When to measure and save: epoch or steps.")
    logging_steps: Positive = option(50, "Steps between two log entries.")
    per_device_eval_batch_size: Count = option(32, "Items per forward pass when measuring.")
    report_to: None | str | list[str] = option(  # noqa: RUF036 - the order that HfArgumentParser reads
        "none", "Trackers that log curves: tensorboard (if installed), none or another integration."
    )
    remove_unused_columns: bool = option(False, "Must be false: the collator needs all columns.")
    logging_nan_inf_filter: bool = option(False, "Hide NaN and infinite losses from the log.")

    def __post_init__(self) -> None:
        """Save at each evaluation; no progress bars in files, no pinned memory without a GPU, bfloat16 on CPUs too."""
        given: Any = self
        if given.load_best_model_at_end:
            raise UsageError("--load_best_model_at_end does not apply here. Choose the checkpoint with --selection.")
        if given.resume_from_checkpoint:
            raise UsageError("--resume_from_checkpoint does not apply here. The same command resumes by itself.")
        if given.save_strategy not in ("epoch", "steps"):
            raise UsageError(
                "--save_strategy must be epoch or steps, because checkpoints are measured after training."
            )
        schedule = getattr(given.lr_scheduler_type, "value", given.lr_scheduler_type)
        if schedule in ("reduce_lr_on_plateau", "greedy"):
            raise UsageError(
                f"--lr_scheduler_type {schedule} does not apply here, because it follows a dev loss, and the "
                "dev data are scored by the measure of the task. Choose another, such as linear."
            )
        select_device(self)
        given.bf16 = usable_bfloat16(wanted=given.bf16, on_cpu=given.use_cpu)
        if given.disable_tqdm is None:
            given.disable_tqdm = not sys.stderr.isatty()
        given.dataloader_pin_memory = given.dataloader_pin_memory and torch.cuda.is_available()
        if self.eval_strategy != "no":
            self.save_strategy = self.eval_strategy
        if self.eval_steps is not None:
            self.save_steps = self.eval_steps
        super().__post_init__()
        if self.n_gpu > 1:  # the parent class would multiply the batch size by the number of GPUs
            self._n_gpu = 1
