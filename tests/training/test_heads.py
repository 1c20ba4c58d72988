import copy
from typing import ClassVar

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModel

from metaphrase.exceptions import CheckpointError, RecipeError
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.base import Objective
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.heads import AlignmentHeads, restore_heads
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer


class Own(Objective):
    """An objective of a user."""

    name, granularity = "own", "sentence"

    def forward(self, encodings):
        return encodings["source"].sentence_bh.square().mean()


class Queue(nn.Module):
    """A head without parameters."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("queue_qh", torch.zeros(size, 32))


class Queued(Own):
    size = 4

    def make_head(self, config, **settings):
        return Queue(self.size)

    def forward(self, encodings):
        rows_bh = encodings["source"].sentence_bh
        if self.head.training:
            self.head.queue_qh = torch.cat([rows_bh.detach(), self.head.queue_qh])[:4]
        return (rows_bh @ self.head.queue_qh.T).square().mean() + rows_bh.square().mean()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(32, 32), nn.Linear(32, 32)
        self.up.weight = self.down.weight


class TiedHead(Own):
    def make_head(self, config, **settings):
        return Tied()

    def forward(self, encodings):
        return self.head.up(self.head.down(encodings["source"].sentence_bh)).square().mean()


def trainer_of(encoder, rows, folder, **settings):
    """A trainer of the objective "own" that saves every step."""
    encoder = copy.deepcopy(encoder)
    settings = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, **settings}
    args = AlignmentTrainingArguments(str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **settings)
    loss = AlignmentLoss(encoder, recipe(("own", {})), max_length=24)
    return AlignmentTrainer(model=encoder, args=args, train_dataset=Dataset.from_list(rows), loss=loss)


def recipe(*terms):
    return Recipe.from_dict({"name": "some", "terms": [{"objective": name, "args": args} for name, args in terms]})


@pytest.mark.parametrize("name", ["dap", "dap-release", "tr-tlm"])
def test_heads_come_back_exactly(tiny_encoder, tokenizer, tmp_path, name):
    heads = AlignmentLoss(
        tiny_encoder, Recipe.load(name), max_length=24, english_ids=torch.arange(len(tokenizer))
    ).heads
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter))
    heads.save_pretrained(tmp_path)
    for loaded in (AlignmentHeads.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        state = loaded.state_dict()
        assert state.keys() == heads.state_dict().keys()
        for key, value in heads.state_dict().items():
            assert torch.equal(state[key], value), key


def test_buffers_of_the_english_vocabulary_come_back(tiny_encoder, tmp_path, tokenizer):
    english = torch.tensor(sorted({*tokenizer.all_special_ids, 20, 30}))
    loss = AlignmentLoss(
        tiny_encoder,
        recipe(("rtl", {"vocabulary": "english", "language_embeddings": True})),
        max_length=24,
        english_ids=english,
        languages=["de", "en"],
    )
    loss.heads.save_pretrained(tmp_path)
    head = AlignmentHeads.from_pretrained(tmp_path).heads["rtl"]
    assert torch.equal(head.vocabulary.ids_v, english)
    assert head.vocabulary.class_of(torch.tensor([20])).item() == english.tolist().index(20)
    assert torch.equal(head.languages.codes, loss.heads.heads["rtl"].languages.codes)


def test_heads_of_another_recipe_are_not_restored(tiny_encoder, tmp_path):
    dap, other = (AlignmentLoss(tiny_encoder, Recipe.load(name), max_length=24).heads for name in ("dap", "tr-tlm"))
    with pytest.raises(CheckpointError, match=r"heads do not fit this recipe .*, in the checkpoint None\)\. Use the"):
        restore_heads(dap, tmp_path)
    dap.save_pretrained(tmp_path / "heads")
    restore_heads(dap, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"cannot be resumed: \d+ weights of its heads .* --model .* new heads\."
    ):
        restore_heads(other, tmp_path)


def test_no_head_owns_the_encoders_embeddings(tiny_encoder):
    loss = AlignmentLoss(tiny_encoder, recipe(("tr", {}), ("rtl", {}), ("tlm", {})), max_length=24)
    table = tiny_encoder[0].auto_model.get_input_embeddings().weight
    assert all(parameter.shape != table.shape for parameter in loss.heads.parameters())


def test_a_term_of_weight_zero_moves_nothing(tiny_encoder, tokenizer, bitext):
    from metaphrase.modeling.collator import ParallelCollator

    zero = Recipe.from_dict({"name": "zero", "terms": [{"objective": "tr"}, {"objective": "rtl", "weight": 0}]})
    loss = AlignmentLoss(tiny_encoder, zero, max_length=24)
    sum(loss(ParallelCollator(tokenizer, loss.views)(bitext[:4])).values()).backward()
    grads = [parameter.grad for parameter in loss.heads.parameters() if parameter.grad is not None]
    assert grads
    assert max(grad.abs().max() for grad in grads) == 0


@pytest.mark.parametrize("cls", [Queued, TiedHead])
def test_heads_of_buffers_or_shared_weights_resume_exactly(tiny_encoder, bitext, tmp_path, monkeypatch, cls):
    monkeypatch.setitem(OBJECTIVES, "own", cls)
    whole = trainer_of(tiny_encoder, bitext, tmp_path)
    whole.train()
    resumed = trainer_of(tiny_encoder, bitext, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    states = [trainer.alignment_loss.state_dict() for trainer in (whole, resumed)]
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name
    head = AlignmentHeads.from_pretrained(tmp_path / "checkpoint-2" / "heads").heads["own"]
    assert head.queue_qh.any() if cls is Queued else head.up.weight is head.down.weight


def test_heads_that_change_their_shape_are_refused(tiny_encoder, bitext, tmp_path, monkeypatch):
    class Late(Own):
        def fill_head(self, sources):
            self.head.late = nn.Linear(2, 2)

        def make_head(self, config, **settings):
            return nn.Linear(2, 2)

    monkeypatch.setattr(Queued, "size", 1)  # which grows to 4
    monkeypatch.setitem(OBJECTIVES, "own", Queued)
    message = (
        r"heads\.own\.queue_qh has the shape \[4, 32\], but \[1, 32\] after make_head\(\), .* with their final shape"
    )
    with pytest.raises(RecipeError, match=message):
        trainer_of(tiny_encoder, bitext, tmp_path).train()
    monkeypatch.setitem(OBJECTIVES, "own", Late)
    with pytest.raises(RecipeError, match=r"heads\.own\.late\.bias has the shape \[2\], but None after make_head\(\)"):
        trainer_of(tiny_encoder, bitext, tmp_path)


def test_settings_of_heads_are_json(tiny_encoder, monkeypatch):
    received = []

    class Sized(Own):
        settings: ClassVar = {"size": np.int64(2), "scales": (np.float32(0.5), 1)}

        def head_settings(self, sources):
            return self.settings

        def make_head(self, config, **settings):
            received.append(settings)
            return nn.Linear(settings["size"], 1)

    monkeypatch.setitem(OBJECTIVES, "own", Sized)
    heads = AlignmentLoss(tiny_encoder, recipe(("own", {}))).heads
    assert received == [{"size": 2, "scales": [0.5, 1]}] == [heads.config.objectives["own"]["settings"]]
    monkeypatch.setattr(Sized, "settings", {"words": {"a", "b"}})
    with pytest.raises(RecipeError, match=r"head_settings\(\) of the objective 'own' are stored as JSON, but .* set"):
        AlignmentLoss(tiny_encoder, recipe(("own", {})))
    monkeypatch.setattr(Sized, "make_head", lambda self, config, **settings: torch.zeros(2))
    monkeypatch.setattr(Sized, "settings", {})
    with pytest.raises(
        RecipeError, match=r"make_head\(\) of the objective 'own' must return .*, but returns a Tensor"
    ):
        AlignmentLoss(tiny_encoder, recipe(("own", {})))
