"""Weight decay toward the start: a loop by hand in float64, the heads, skipped steps, and a resumed run."""

import copy
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn

from metaphrase.encoders.adapters import add_lora
from metaphrase.exceptions import CheckpointError, UsageError
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer
from metaphrase.training.weight_decay import DecayTowardStart
from tests.conftest import small

RATE, DECAY, BETAS, EPSILON = 0.01, 5.0, (0.9, 0.999), 1e-8


def layers(seed=0):
    """An encoder and a head in float64."""
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double(), nn.Linear(2, 1).double()


def optimizer_of(encoder, head):
    """AdamW, of which the biases do not decay."""
    groups = [
        {"params": [encoder.weight, head.weight], "weight_decay": DECAY},
        {"params": [encoder.bias, head.bias], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON)


def inputs(step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).double()


def backward(encoder, head, step):
    loss = head(encoder(inputs(step)).tanh()).square().mean()
    for layer in (encoder, head):
        layer.zero_grad()
    loss.backward()


class AdamByHand:
    """AdamW of Loshchilov & Hutter for one number, with decay toward its start."""

    def __init__(self, value, start, decay):
        self.value, self.start, self.decay = value, start, decay
        self.first = self.second = 0.0

    def step(self, gradient, number):
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        direction = (self.first / (1 - BETAS[0] ** number)) / (
            math.sqrt(self.second / (1 - BETAS[1] ** number)) + EPSILON
        )
        self.value -= RATE * direction + RATE * self.decay * (self.value - self.start)


def test_every_weight_follows_the_loop():
    encoder, head = layers()
    decay, optimizer = DecayTowardStart(encoder), optimizer_of(encoder, head)
    decay.attach(optimizer)
    by_hand = {}
    for weight in (*encoder.parameters(), *head.parameters()):
        toward = weight.flatten().tolist() if weight is encoder.weight else [0.0] * weight.numel()
        rate = DECAY if weight is encoder.weight or weight is head.weight else 0.0
        pairs = zip(weight.flatten().tolist(), toward, strict=True)
        by_hand[weight] = [AdamByHand(value, start, rate) for value, start in pairs]
    for number in range(1, 8):
        backward(encoder, head, number)
        for weight, numbers in by_hand.items():
            for one, gradient in zip(numbers, weight.grad.flatten().tolist(), strict=True):
                one.step(gradient, number)
        optimizer.step()
    for weight, numbers in by_hand.items():
        values = torch.tensor([one.value for one in numbers], dtype=torch.float64).view_as(weight)
        torch.testing.assert_close(weight.detach(), values, rtol=1e-9, atol=1e-12)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]


@pytest.mark.parametrize("optim", [torch.optim.AdamW, torch.optim.SGD])
def test_a_start_of_zero_is_decoupled_weight_decay(optim):
    """Of AdamW its own; SGD's own adds the decay to the gradient, which is the same without momentum."""
    found = []
    for attached in (False, True):
        encoder, head = layers()
        with torch.no_grad():
            encoder.weight.zero_()
        optimizer = optim([encoder.weight, head.weight], lr=RATE, weight_decay=DECAY)
        if attached:
            DecayTowardStart(encoder).attach(optimizer)
        for step in range(5):
            backward(encoder, head, step)
            optimizer.step()
        found.append((encoder.weight.detach(), head.weight.detach()))
    assert found[0][0].abs().max() > 1e-4
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_without_gradients_the_encoder_stays_where_it_is():
    encoder, head = layers()
    decay, optimizer = DecayTowardStart(encoder), optimizer_of(encoder, head)
    decay.attach(optimizer)
    decay.attach(optimizer)  # once
    with torch.no_grad():
        encoder.weight.add_(1.0)
    moved = copy.deepcopy(encoder.weight)
    optimizer.step()
    assert torch.equal(encoder.weight, moved)
    backward(encoder, head, 0)
    optimizer.found_inf = torch.ones(())  # as a gradient scaler tells a fused optimiser
    decay._decay(optimizer)
    decay._restore(optimizer)
    assert torch.equal(encoder.weight, moved)
    optimizer.found_inf = torch.zeros(())
    decay._decay(optimizer)
    torch.testing.assert_close(moved - encoder.weight, torch.full_like(moved, RATE * DECAY))


@pytest.fixture
def make_trainer(tiny_encoder, full_bitext, tmp_path):
    def make(folder="run", *, recipe="dap", lora_rank=None, **options):
        torch.manual_seed(7)
        encoder = copy.deepcopy(tiny_encoder)
        if lora_rank:
            add_lora(encoder, lora_rank)
        loss = AlignmentLoss(encoder, small(Recipe.load(recipe)), max_length=24)
        settings = {
            "output_dir": str(tmp_path / folder),
            "per_device_train_batch_size": 8,
            "max_steps": 6,
            "save_steps": 3,
            "learning_rate": 1e-3,
            "weight_decay": 100.0,
            "weight_decay_toward": "start",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
        data = Dataset.from_list(full_bitext)
        return AlignmentTrainer(
            model=encoder, args=AlignmentTrainingArguments(**settings), train_dataset=data, loss=loss
        )

    return make


def matrices(model):
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.dim() > 1}


def distance(one, other):
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


@pytest.mark.long
def test_a_resumed_run_decays_toward_the_same_start(make_trainer, tiny_encoder):
    start = matrices(tiny_encoder)
    free, whole = make_trainer("free", weight_decay_toward="zero", weight_decay=0.0), make_trainer("whole")
    for trainer in (free, whole):
        trainer.train()
    assert 0 < distance(matrices(whole.model), start) < 0.9 * distance(matrices(free.model), start)
    resumed = make_trainer("resumed")
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    for name, value in whole.loss.state_dict().items():
        assert torch.equal(resumed.loss.state_dict()[name], value), name


def test_a_run_is_not_resumed_toward_another_start(make_trainer, tiny_encoder):
    make_trainer("run", recipe="tr", max_steps=1, save_steps=1).train()
    with torch.no_grad():
        next(tiny_encoder.parameters()).add_(1.0)
    with pytest.raises(CheckpointError, match=r'differs in: start \("\w+" → "\w+"\)'):
        make_trainer("run", recipe="tr").train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r'differs in: start \("\w+" → null\)'):
        make_trainer("run", recipe="tr", weight_decay_toward="zero").train(resume_from_checkpoint=True)


def test_weights_that_are_unfrozen_later_have_no_start(make_trainer, tiny_encoder):
    table = tiny_encoder[0].auto_model.get_input_embeddings().weight.requires_grad_(False)
    trainer = make_trainer("run", recipe="tr")
    trainer.create_optimizer()
    assert not table.requires_grad
    trainer.model.requires_grad_(True)
    with pytest.raises(UsageError, match=r"but 0.model.embeddings.word_embeddings.weight was frozen then"):
        trainer.train()


def test_options_without_effect_are_refused(make_trainer):
    with pytest.raises(UsageError, match="has no effect without weight decay"):
        make_trainer(weight_decay=0.0)
    pytest.importorskip("peft")
    with pytest.raises(UsageError, match="weight decay toward zero already pulls the encoder toward its start"):
        make_trainer(lora_rank=2)


def test_each_group_decays_at_its_own_rate():
    """Heads have a learning rate of their own."""
    encoder, head = layers()
    decay = DecayTowardStart(encoder)
    groups = [{"params": [encoder.weight], "lr": RATE}, {"params": [head.weight], "lr": 2 * RATE}]
    optimizer = torch.optim.SGD(groups, lr=RATE, weight_decay=DECAY)
    decay.attach(optimizer)
    with torch.no_grad():
        encoder.weight.add_(1.0)
    before = [layer.weight.detach().clone() for layer in (encoder, head)]
    for layer in (encoder, head):
        layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(before[0] - encoder.weight, torch.full_like(before[0], RATE * DECAY))
    torch.testing.assert_close(head.weight.detach(), before[1] * (1 - 2 * RATE * DECAY))
