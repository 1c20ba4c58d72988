"""Training of every recipe without padding and with it, in float64: in one process, or as each of two ranks."""

import csv
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset

from metaphrase.encoders import load_encoder
from metaphrase.loss import AlignmentLoss
from metaphrase.recipe import list_recipes
from metaphrase.trainer import AlignmentTrainer, AlignmentTrainingArguments
from tests.conftest import small, with_every_column

ACCUMULATION = (1, 2)


def trained(encoder, recipe, rows, output, *, packing, accumulation):
    """Weights of encoder and heads after two updates; gradient descent, whose update is the gradient itself."""
    torch.manual_seed(3)
    model = load_encoder(str(encoder), device="cpu").double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):  # BERT's attention
            module.dropout_prob = 0.0
    model[0].auto_model.config.attention_probs_dropout_prob = 0.0
    loss = AlignmentLoss(
        model, small(recipe), max_length=24, english_ids=torch.arange(len(model.tokenizer)), languages=["de", "en"]
    ).double()
    for module in loss.heads.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    start = {name: value.clone() for name, value in loss.state_dict().items()}
    args = AlignmentTrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        save_strategy="no",
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=0.05,
        max_grad_norm=0,
        packing=packing,
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        dataloader_drop_last=True,
        disable_tqdm=True,
    )
    AlignmentTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), loss=loss).train()
    end = {name.replace("model.module.", "model."): value for name, value in loss.state_dict().items()}
    return start, end


def differences(encoder, recipe, rows, output, accumulation):
    """The largest difference between the two after training, and how far training went."""
    start, flat = trained(encoder, recipe, rows, output, packing=True, accumulation=accumulation)
    _, padded = trained(encoder, recipe, rows, output, packing=False, accumulation=accumulation)
    assert flat.keys() == padded.keys() == start.keys()
    floats = [name for name, value in flat.items() if value.is_floating_point()]
    moved = max((flat[name] - start[name]).abs().max().item() for name in floats)
    return max((flat[name] - padded[name]).abs().max().item() for name in floats), moved


def main(encoder: str, bitext: str, output: str) -> None:
    AlignmentTrainingArguments(output_dir=output, use_cpu=True, ddp_backend="gloo")  # starts the process group
    with Path(bitext).open(encoding="utf-8") as lines:
        rows = with_every_column(list(csv.DictReader(lines, delimiter="\t")))
    assert dist.get_world_size() == 2
    found = {
        f"{recipe.name} {accumulation}": differences(encoder, recipe, rows, output, accumulation)
        for recipe in list_recipes()
        for accumulation in ACCUMULATION
    }
    torch.save(found, Path(output) / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
