"""Options of the fine-tuning programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import TrainingArguments

Mode = Literal["zero-shot", "translate-train", "translate-train-all", "code-switching"]
Selection = Literal["mean", "language", "english", "last"]


@dataclass
class FineTuningOptions:
    """Options of fine-tuning and measuring an encoder."""

    model: str = field(
        default="starter",
        metadata={"help": "Encoder to fine-tune: 'starter', a Hub id or a folder (default: starter)."},
    )
    train: str | None = field(
        default=None, metadata={"help": "Training data: PATH[@split] or hf:org/name[:config][@split] (split: train)."}
    )
    dev: str | None = field(
        default=None,
        metadata={"help": "Data that select the checkpoint (split: dev). Default: held out from the training data."},
    )
    test: str | None = field(default=None, metadata={"help": "Test data (split: test)."})
    halves: str | None = field(
        default=None,
        metadata={
            "help": "Instead of --train, --dev and --test: one parallel data set (split: dev). Half of its items are used "
            "for training in English, the other half for measuring in every language."
        },
    )
    dev_share: float = field(
        default=0.1, metadata={"help": "Share of the items held out as dev data if --dev is not given."}
    )
    languages: list[str] | None = field(
        default=None, metadata={"help": "Languages to measure, separated by spaces or commas. Default: all."}
    )
    mode: Mode = field(
        default="zero-shot", metadata={"help": "Training data; see metaphrase.evaluation.transfer.running."}
    )
    selection: Selection = field(
        default="mean",
        metadata={
            "help": "Checkpoint: best mean over the dev languages (#M=1), best of each language (#M=N), best in English, "
            "or the last."
        },
    )
    max_length: int = field(
        default=128, metadata={"help": "Maximum number of pieces of an input, including special tokens."}
    )
    dropout: float | None = field(default=None, metadata={"help": "Dropout; default: that of the encoder."})
    freeze_word_embeddings: bool = field(
        default=False, metadata={"help": "Freeze the word embeddings, which saves memory and time."}
    )
    limit_train: int | None = field(default=None, metadata={"help": "Maximum number of training items of a language."})
    limit_test: int | None = field(
        default=None, metadata={"help": "Maximum number of dev items and of test items of a language."}
    )
    keep_checkpoints: bool = field(
        default=True, metadata={"help": "Keep the chosen checkpoints; false keeps only the results."}
    )


@dataclass
class FineTuningArguments(TrainingArguments):
    """transformers' training arguments with other defaults: a dev score and a checkpoint after every epoch."""

    output_dir: str | None = field(default="", metadata={"help": "Folder of checkpoints and results."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to measure and save: epoch or steps."})
    logging_steps: float = field(default=50, metadata={"help": "Number of steps between logs."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Items per forward pass when measuring."})
    report_to: None | str | list[str] = field(  # noqa: RUF036 - the order that HfArgumentParser reads
        default="none", metadata={"help": "Logger of the curves: tensorboard (if installed), none, …"}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must be false: the collator needs all columns."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Filter NaN and infinite losses from the log."}
    )

    def __post_init__(self) -> None:
        """Save at each evaluation, draw progress bars only in a terminal, pin memory only for a GPU."""
        given: Any = self
        if given.disable_tqdm is None:
            given.disable_tqdm = not sys.stderr.isatty()
        given.dataloader_pin_memory = given.dataloader_pin_memory and torch.cuda.is_available()
        if self.eval_strategy != "no":
            self.save_strategy = self.eval_strategy
        if self.eval_steps is not None:
            self.save_steps = self.eval_steps
        super().__post_init__()


def split_languages(languages: Sequence[str] | None) -> list[str] | None:
    """Split language codes at commas and spaces; None if there are none."""
    return [code for item in languages or () for code in item.replace(",", " ").split()] or None
