"""Script of each rank in the distributed test of momentum contrast: one batch, and a short run."""

import csv
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset

from metaphrase.encoders.loading import load_encoder
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer

PPA = {
    "name": "p",
    "terms": [{"objective": "moco", "args": {"queue_size": 28, "momentum": 0.9}}, {"objective": "tlm"}],
}


def one_batch(encoder, rows, rank):
    """The first keys of the queue after a batch of two ranks, and the keys of the whole batch in order."""
    model = load_encoder(encoder, device="cpu")
    loss = AlignmentLoss(model, Recipe.from_dict(PPA), max_length=24)
    collator, head = ParallelCollator(model.tokenizer, loss.views), loss.heads.heads["moco"]
    for module in loss.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loss.train()(collator(rows[4 * rank : 4 * rank + 4]))
    whole = collator(rows[:8])["query-and-key"]
    return head.queue_qh[: int(head.pointer)], head.key(whole["key_ids"], whole["key_mask"].bool())


def main(encoder: str, bitext: str, output: str) -> None:
    torch.manual_seed(5)
    with Path(bitext).open(encoding="utf-8") as lines:
        rows = [
            {k: row[k] for k in ("source", "target", "source_lang", "target_lang")}
            for row in csv.DictReader(lines, delimiter="\t")
        ]
    args = AlignmentTrainingArguments(
        output_dir=output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        save_strategy="no",
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_drop_last=True,
        disable_tqdm=True,
    )
    rank = dist.get_rank()
    enqueued, keys = one_batch(encoder, rows, rank)
    model = load_encoder(encoder, device="cpu")
    loss = AlignmentLoss(model, Recipe.from_dict(PPA), max_length=24)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    trainer = AlignmentTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), loss=loss)
    trainer.train()
    after = {name.replace("model.module.", "model."): value.clone() for name, value in loss.state_dict().items()}
    torch.save(
        {"enqueued": enqueued, "keys": keys, "before": before, "after": after}, Path(output) / f"rank-{rank}.pt"
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
