"""Training with every objective, packed and padded, in float64: in one process, or as one of two ranks."""

import csv
import os
import sys
from collections import defaultdict
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers.models.bert.modeling_bert import BertEncoder

from metaphrase.encoders.loading import load_encoder
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.mexma import UnmaskingHead
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe, list_recipes
from metaphrase.training.trainer import AlignmentTrainer
from tests.conftest import small, with_every_column

ACCUMULATION = (1, 2)


def every_objective():
    """Return the recipes, and an additional one for each objective that no recipe contains."""
    recipes = list_recipes()
    others = sorted(set(OBJECTIVES) - {term.objective for recipe in recipes for term in recipe.terms})
    # Alone, these have no gradient at the original encoder.
    guided = {
        "objective": "tr",
        "args": {"targets": "soft", "soft_weight": 0.5, "guided": True, "temperature": 0.01},
    }
    moving = {"anchor": [{"objective": "tr"}], "similarity-preservation": [guided]}
    return [
        *recipes,
        *(Recipe.from_dict({"name": o, "terms": [*moving.get(o, []), {"objective": o}]}) for o in others),
    ]


def padded_unmasking(self, tokens_blh, mask_bl, sentence_bh):
    """`UnmaskingHead.forward` with padding, which a mask hides."""
    inputs_blh = torch.cat([sentence_bh[:, None], tokens_blh[:, 1:]], dim=1)
    states_blh = self.layers(inputs_blh, attention_mask=mask_bl[:, None, None]).last_hidden_state
    return states_blh * mask_bl[..., None]


@contextmanager
def padded_heads():
    """Run the layers of heads padded inside this block, as the encoder runs outside of `packed`."""
    with (
        patch("metaphrase.modeling.frozen.can_pack", lambda encoder: False),
        patch("metaphrase.objectives.representation_translation.can_pack", lambda encoder: False),
        patch.object(UnmaskingHead, "forward", padded_unmasking),
        patch("metaphrase.modeling.packing.can_pack", lambda encoder: False),  # last: the modules above import it
    ):
        yield


class Rows:
    """Record the batch dimensions of the inputs to the first layers of the encoder and of the heads.

    Passes with a custom mask (``visible``) are excluded, because they are always padded.
    """

    def __init__(self, loss):
        self.seen = defaultdict(list)
        originals = [objective.original.encoder for objective in loss.objectives.values() if objective.original]
        modules = chain(loss.named_modules(), *(original.named_modules(prefix="original") for original in originals))
        layers = {id(m): (name, m.layer[0]) for name, m in modules if isinstance(m, BertEncoder)}
        self.parts = {name for name, _ in layers.values()}
        for name, layer in layers.values():
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name):
        def see(module, args, kwargs):
            if "visible" not in kwargs:
                self.seen[name].append(len(args[0]))

        return see

    def check(self, *, packing):
        """Assert that every part ran, packed or padded."""
        assert self.parts == set(self.seen)
        for name, rows in self.seen.items():
            assert all(n == 1 if packing else n > 1 for n in rows), (name, packing, rows)


def trained(encoder, recipe, rows, output, *, packing, accumulation, micro_batch_size=None):
    """Return the weights of encoder and heads before and after two updates, and the number of calls of the encoder's layers.

    The optimiser is gradient descent, whose update is the gradient.
    """
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
        micro_batch_size=micro_batch_size,
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        dataloader_drop_last=True,
        disable_tqdm=True,
    )
    seen = Rows(loss)
    AlignmentTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), loss=loss).train()
    seen.check(packing=packing)
    end = {name.replace("model.module.", "model."): value for name, value in loss.state_dict().items()}
    return start, end, sum(map(len, seen.seen.values()))


def differences(encoder, recipe, rows, output, accumulation):
    """Return the largest difference between packed and padded weights after training, and the largest change by training."""
    start, flat, _ = trained(encoder, recipe, rows, output, packing=True, accumulation=accumulation)
    with padded_heads():
        _, padded, _ = trained(encoder, recipe, rows, output, packing=False, accumulation=accumulation)
    return furthest(flat, padded), furthest(flat, start)


def differences_in_parts(encoder, recipe, rows, output, accumulation):
    """Return the same for training with micro-batches of three rows and with whole batches."""
    start, whole, calls = trained(encoder, recipe, rows, output, packing=True, accumulation=accumulation)
    _, parts, more = trained(
        encoder, recipe, rows, output, packing=True, accumulation=accumulation, micro_batch_size=3
    )
    assert more > 2 * calls  # each part is encoded twice
    return furthest(whole, parts), furthest(whole, start)


def furthest(ours, theirs):
    """Return the largest difference between the values of two states."""
    assert ours.keys() == theirs.keys()
    floats = [name for name, value in ours.items() if value.is_floating_point()]
    return max((ours[name] - theirs[name]).abs().max().item() for name in floats)


def main(encoder: str, bitext: str, output: str) -> None:
    AlignmentTrainingArguments(output_dir=output, use_cpu=True, ddp_backend="gloo")  # starts the process group
    with Path(bitext).open(encoding="utf-8") as lines:
        rows = with_every_column(list(csv.DictReader(lines, delimiter="\t")))
    assert dist.get_world_size() == 2
    found = {}
    for recipe in every_objective():
        for accumulation in ACCUMULATION:
            found[f"{recipe.name} {accumulation}"] = differences(encoder, recipe, rows, output, accumulation)
        found[f"{recipe.name} in parts"] = differences_in_parts(encoder, recipe, rows, output, 2)
    torch.save(found, Path(output) / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
