"""The program of each rank in the distributed tests: training runs, and gradients over the gathered batch."""

import copy
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
from metaphrase.training.recipe import Recipe, list_recipes
from metaphrase.training.trainer import AlignmentTrainer
from tests.conftest import small, with_every_column

#: Terms that rank against the sentences of all processes. In an asymmetric ranking, the positives of a rank follow those of
#: the lower ranks.
GATHERED = {
    "tr, symmetric": {"objective": "tr", "args": {"direction": "symmetric", "mask_duplicates": True}},
    "tr, one direction": {"objective": "tr", "args": {"direction": "source_to_target", "margin": 0.2}},
    "tr, the other": {"objective": "tr", "args": {"direction": "target_to_source", "mask_duplicates": True}},
    "sa": {"objective": "sa"},
    "sa, both": {"objective": "sa", "args": {"candidates": "both"}},
    "sentence-contrast": {"objective": "sentence-contrast", "args": {"back_translation": "none"}},
    "sentence-contrast, all": {"objective": "sentence-contrast", "args": {"back_translation": "all"}},
    "tr, shared targets": {
        "objective": "tr",
        "args": {"direction": "symmetric", "positives": "shared_target", "own_side": True},
    },
    "tr, soft and guided": {
        "objective": "tr",
        "args": {"direction": "symmetric", "targets": "soft", "soft_temperature": 0.01, "guided": True},
    },
    "similarity-preservation": {"objective": "similarity-preservation"},
    "similarity-preservation, kl": {"objective": "similarity-preservation", "args": {"divergence": "kl"}},
}


def gradient(model, term, rows, *, gather):
    term = {**term, "args": {**term.get("args", {}), "gather": gather}}
    twin = copy.deepcopy(model).double().eval()
    loss = AlignmentLoss(twin, Recipe.from_dict({"name": "t", "terms": [term]}), max_length=24)
    with torch.no_grad():  # away from the original encoder, which some objectives compare with
        for parameter in twin.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    sum(loss(ParallelCollator(twin.tokenizer, loss.views)(rows)).values()).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def arguments(output: str) -> AlignmentTrainingArguments:
    return AlignmentTrainingArguments(
        output_dir=output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        save_steps=3,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_drop_last=True,
        disable_tqdm=True,
    )


def main(encoder: str, bitext: str, output: str) -> None:
    torch.manual_seed(5)
    arguments(output)  # starts the process group
    with Path(bitext).open(encoding="utf-8") as lines:
        rows = with_every_column(list(csv.DictReader(lines, delimiter="\t")))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = load_encoder(encoder, device="cpu")
    facts = {"before": {}, "after": {}, "whole": {}, "gathered": {}}
    pairs = [*rows[:5], {**rows[5], "target": rows[1]["target"]}, *rows[6:8]]  # two ranks have the same target
    for kind, term in GATHERED.items():
        whole = gradient(model, term, pairs, gather=False)
        shared = gradient(model, term, pairs[4 * rank : 4 * rank + 4], gather=True)
        alone = gradient(model, term, pairs[4 * rank : 4 * rank + 4], gather=False)
        for value in shared.values():
            dist.all_reduce(value)
            value /= world
        assert whole.keys() == shared.keys()
        largest = max(value.abs().max() for value in whole.values())
        assert max((value - alone[name]).abs().max() for name, value in whole.items()) > 0.01 * largest > 0, kind
        facts["whole"] |= {f"{kind}: {name}": value for name, value in whole.items()}
        facts["gathered"] |= {f"{kind}: {name}": value for name, value in shared.items()}
    for recipe in list_recipes():
        before, after = train(load_encoder(encoder, device="cpu"), small(recipe), rows, f"{output}/{recipe.name}")
        facts["before"] |= {f"{recipe.name}:{name}": value for name, value in before.items()}
        facts["after"] |= {f"{recipe.name}:{name}": value for name, value in after.items()}
    torch.save(facts, Path(output) / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def train(model, recipe, rows, output):
    """Weights of encoder and heads before and after three steps of two micro-batches on each rank."""
    english_ids = torch.arange(len(model.tokenizer))
    loss = AlignmentLoss(model, recipe, max_length=24, english_ids=english_ids, languages=["de", "en"])
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    trainer = AlignmentTrainer(model=model, args=arguments(output), train_dataset=Dataset.from_list(rows), loss=loss)
    trainer.train()
    after = {name.replace("model.module.", "model."): value.clone() for name, value in loss.state_dict().items()}
    return before, after


if __name__ == "__main__":
    main(*sys.argv[1:])
