"""Two processes compute the gradients of one."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from metaphrase.cli import main
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import RecipeError
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.objectives import OBJECTIVES, Objective
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.distributed import average_gradients, broadcast_weights
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
ATTENTION_ALONE = Recipe.from_dict({"name": "wa", "terms": [{"objective": "wa"}]})


@pytest.fixture
def two_ranks(ranks_of, tmp_path):
    """Run a function of the rank in two processes."""

    def run(work):
        statuses = ranks_of(lambda rank: (work(rank), dist.barrier()))
        assert statuses == [0, 0], "\n".join(log.read_text() for log in tmp_path.glob("rank-?.log"))

    return run


def backward(model, loss, rows):
    sum(loss(ParallelCollator(model.tokenizer, loss.views)(rows)).values()).backward()


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_attention_alone_has_the_gradient_of_one_process(
    two_ranks, tiny_encoder, full_bitext, tmp_path, micro_batch_size
):
    """In the second step, too, for which DDP must have seen a gradient of every parameter in the first."""
    model = copy.deepcopy(tiny_encoder).double().eval()
    rows = full_bitext[:8]

    def work(rank):
        dist.init_process_group("gloo")
        twin = copy.deepcopy(model)
        loss = AlignmentLoss(twin, ATTENTION_ALONE, max_length=24)
        loss.model, loss.micro_batch_size = DistributedDataParallel(twin), micro_batch_size
        for _ in range(2):
            twin.zero_grad()
            backward(twin, loss, rows[rank::2])
        torch.save({name: weight.grad for name, weight in twin.named_parameters()}, tmp_path / f"{rank}.pt")

    two_ranks(work)
    backward(model, AlignmentLoss(model, ATTENTION_ALONE, max_length=24), rows)
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert sum(grad.abs().max() > 1e-6 for grad in expected.values()) > 10
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def test_attention_alone_trains_on_two_processes(two_ranks, tiny_encoder, full_bitext, tmp_path):
    def work(rank):
        loss = AlignmentLoss(copy.deepcopy(tiny_encoder), ATTENTION_ALONE, max_length=24)
        arguments = AlignmentTrainingArguments(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=4,
            max_steps=3,
            learning_rate=1e-3,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_drop_last=True,
            ddp_backend="gloo",
            disable_tqdm=True,
        )
        data = Dataset.from_list(full_bitext)
        AlignmentTrainer(model=loss.model, args=arguments, train_dataset=data, loss=loss).train()
        torch.save([weight.detach() for weight in loss.parameters()], tmp_path / f"{rank}.pt")

    two_ranks(work)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    before = list(tiny_encoder.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


def test_the_loss_of_an_evaluation_is_that_of_its_terms(two_ranks, tiny_encoder, full_bitext, tmp_path):
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in tiny_encoder.parameters():  # the embeddings of the encoder itself hardly differ
            weight.normal_()

    def work(rank):
        arguments = AlignmentTrainingArguments(
            str(tmp_path / "run"),
            per_device_eval_batch_size=4,
            dataloader_drop_last=True,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"), max_length=24)
        data = Dataset.from_list(full_bitext[:21])  # 5 pairs do not fill a batch of both processes
        trainer = AlignmentTrainer(model=loss.model, args=arguments, eval_dataset=data, loss=loss)
        result = [trainer.evaluate()["eval_loss"], trainer.state.log_history[-1]["eval_tr"]]
        (tmp_path / f"{rank}.json").write_text(json.dumps(result))

    two_ranks(work)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0] == pytest.approx(first[1], abs=1e-4)


class Queued(Objective):
    """Keeps a queue of rows: of all processes, or of its own only."""

    name, granularity = "queued", "sentence"
    gather = True

    def make_head(self, config, **settings):
        head = nn.Module()
        head.register_buffer("queue_qh", torch.zeros(8, config.hidden_size))
        head.register_buffer("passing", torch.zeros(()), persistent=False)
        return head

    def forward(self, encodings):
        rows_bh = encodings["source"].sentence_bh
        self.head.queue_qh = torch.cat([self.gathered(rows_bh.detach()), self.head.queue_qh])[:8]
        self.head.passing = rows_bh.detach().sum()
        return rows_bh.square().mean()


@pytest.mark.parametrize("gather", [True, False])
def test_the_state_of_heads_is_that_of_all_processes(
    two_ranks, tiny_encoder, full_bitext, tmp_path, monkeypatch, gather
):
    monkeypatch.setitem(OBJECTIVES, "queued", Queued)
    monkeypatch.setattr(Queued, "gather", gather)
    recipe = Recipe.from_dict({"name": "queued", "terms": [{"objective": "queued"}]})

    def work(rank):
        loss = AlignmentLoss(copy.deepcopy(tiny_encoder), recipe, max_length=24)
        settings = {"max_steps": 2, "save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        args = AlignmentTrainingArguments(
            str(tmp_path / "run"), per_device_train_batch_size=4, dataloader_drop_last=True, **settings
        )
        data = Dataset.from_list(full_bitext)
        trainer = AlignmentTrainer(model=loss.model, args=args, train_dataset=data, loss=loss)
        if gather:
            trainer.train()
            return
        with pytest.raises(
            RecipeError, match=r"heads\.queued\.queue_qh differs between processes, .* functional.gather_with"
        ):
            trainer.train()
        assert trainer.state.global_step == 1

    two_ranks(work)
    assert (tmp_path / "run" / "checkpoint-2").is_dir() == gather


def test_weights_that_are_not_contiguous_are_equal_in_all_processes(two_ranks):
    def work(rank):
        dist.init_process_group("gloo")
        head = nn.Linear(2, 3, bias=False)
        head.weight = nn.Parameter((torch.arange(12.0).reshape(3, 4) * (rank + 1))[:, ::2])
        broadcast_weights(head)
        assert head.weight.tolist() == [[0, 2], [4, 6], [8, 10]]
        head.weight.grad = (torch.arange(12.0).reshape(3, 4) * (2 * rank + 1))[:, ::2]
        average_gradients(head.parameters())
        assert head.weight.grad.tolist() == [[0, 4], [8, 12], [16, 20]]

    two_ranks(work)


@pytest.mark.slow
def test_two_nodes_train_the_encoder_of_one_process(tiny_encoder_dir, bitext_path, tmp_path):
    """torchrun on two machines, here both this one, with half of the batch each; without dropout, which differs by rank."""
    encoder = Path(shutil.copytree(tiny_encoder_dir, tmp_path / "encoder"))
    (config,) = (path for path in encoder.rglob("config.json") if "hidden_dropout_prob" in path.read_text())
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps(json.loads(config.read_text()) | no_dropout))
    settings = {
        "recipe": "tr",
        "model": encoder,
        "corpus": bitext_path,
        "languages": "de",
        "max_steps": 2,
        "save_steps": 2,
    }
    settings |= {"effective_batch_size": 8, "batch_sampler": "batch_sampler", "optim": "sgd", "learning_rate": 10}
    settings |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "report_to": "none"}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    torchrun += ["--rdzv_backend", "c10d", "--rdzv_id", "test", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    training = ["trainers/train.py", *options, "--ddp_backend", "gloo", "--output_dir", str(tmp_path / "two")]
    no_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    logs = [tmp_path / f"node-{rank}.log" for rank in (0, 1)]
    nodes = []
    for log in logs:
        with log.open("w") as output:
            command = [*torchrun, *training]
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=no_gpu, stdout=output, stderr=subprocess.STDOUT))
    try:
        statuses = [node.wait(400) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert statuses == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    assert main(["train", *options, "--use_cpu", "true", "--output_dir", str(tmp_path / "one")]) == 0
    before, one, two = (
        load_encoder(str(path), device="cpu").state_dict() for path in (encoder, tmp_path / "one", tmp_path / "two")
    )
    manifest = json.loads((tmp_path / "two" / "checkpoint-2" / "manifest.json").read_text())
    assert manifest["run"]["processes"] == 2
    moved = max((one[name] - value).abs().max() for name, value in before.items())
    assert moved > 1e-4
    assert max((two[name] - value).abs().max() for name, value in one.items()) < 0.1 * moved
