import json
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import TrainerCallback

from metaphrase.checkpoints.folders import checkpoint_folders, newest, verify
from metaphrase.cli import main
from metaphrase.exceptions import CheckpointError
from metaphrase.modeling.collator import ParallelCollator
from tests.faults.conftest import digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class In(TrainerCallback):
    """Does something in a step of one rank."""

    def __init__(self, step, rank, work):
        self.step, self.rank, self.work = step, rank, work

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step and args.process_index == self.rank:
            self.work()


@pytest.fixture
def ranks(ranks_of, make_trainer, tmp_path):
    """Two processes that train together; their exit statuses and the digests of their weights."""

    def ranks(folder, *, callbacks=(), **options):
        def work(rank):
            settings = {"ddp_backend": "gloo", "per_device_train_batch_size": 4, "dataloader_drop_last": True}
            trainer = make_trainer(folder, callbacks=callbacks, **{"recipe": "ppa", **settings, **options})
            dist.barrier()
            resume = torch.tensor(bool(checkpoint_folders(trainer.args.output_dir)))
            dist.broadcast(resume, src=0)
            trainer.train(resume_from_checkpoint=bool(resume))
            (tmp_path / f"{folder}-{rank}.digest").write_text(digest(trainer))
            dist.barrier()

        for rank in (0, 1):
            (tmp_path / f"{folder}-{rank}.digest").unlink(missing_ok=True)
        statuses = ranks_of(work, folder)
        digests = [path.read_text() for path in sorted(tmp_path.glob(f"{folder}-?.digest"))]
        return statuses, digests

    return ranks


def said(tmp_path, folder):
    return "\n".join((tmp_path / f"{folder}-{rank}.log").read_text() for rank in (0, 1))


#: The error with which the other rank ends.
LOST = "exceptions.WorkerError: Another process of this run ended, or cannot be reached."


def test_a_rank_that_dies_ends_all_and_the_run_goes_on(ranks, tmp_path, fault):
    statuses, whole = ranks("whole")
    assert statuses == [0, 0], said(tmp_path, "whole")
    assert len(set(whole)) == 1
    survived = 0
    for rank in (0, 1):
        folder = f"dead-{rank}"
        statuses, _ = ranks(folder, callbacks=[In(4, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))])
        assert statuses[rank] == -signal.SIGKILL
        assert statuses[1 - rank] != 0
        assert LOST in said(tmp_path, folder)
        assert f"The last valid checkpoint is {tmp_path / folder}/checkpoint-2." in said(tmp_path, folder)
        verify(newest(tmp_path / folder))
        assert newest(tmp_path / folder).name == "checkpoint-2"
        statuses, resumed = ranks(folder)
        assert statuses == [0, 0], said(tmp_path, folder)
        survived += resumed == whole
    fault("F1", "one of two ranks is killed during a step", tried=2, survived=survived)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_a_checkpoint_is_written(ranks, tmp_path, fault, rank):
    def die_in_the_next_save():
        torch.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)

    statuses, whole = ranks("whole")
    assert statuses == [0, 0]
    statuses, _ = ranks("dead", callbacks=[In(4, rank, die_in_the_next_save)])
    assert statuses[rank] == -signal.SIGKILL
    assert statuses[1 - rank] != 0
    assert LOST in said(tmp_path, "dead")
    assert "could not be written" not in said(tmp_path, "dead")
    assert [path.name for path in checkpoint_folders(tmp_path / "dead")] == ["checkpoint-2"]
    statuses, resumed = ranks("dead")
    assert statuses == [0, 0], said(tmp_path, "dead")
    fault("F2", "one of two ranks is killed during a checkpoint", tried=1, survived=resumed == whole)


def test_a_rank_that_dies_before_training(ranks_of, tiny_encoder_dir, bitext_path, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "metaphrase.training.run.flush_denormals",
        lambda: os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGKILL),
    )
    command = ["train", "--recipe", "tr", "--model", tiny_encoder_dir, "--corpus", bitext_path, "--languages", "de"]
    command += ["--max_steps", "1", "--use_cpu", "true", "--ddp_backend", "gloo", "--output_dir", tmp_path / "early"]
    assert ranks_of(lambda rank: sys.exit(main(list(map(str, command)))), "early") == [2, -signal.SIGKILL]
    assert "metaphrase train: Another process of this run ended, or cannot be reached." in said(tmp_path, "early")


def test_a_signal_to_one_rank_stops_all_behind_the_same_step(ranks, tmp_path, fault):
    statuses, whole = ranks("whole")
    statuses, _ = ranks("stopped", callbacks=[In(3, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert statuses == [143, 143], said(tmp_path, "stopped")
    assert newest(tmp_path / "stopped").name == "checkpoint-3"
    statuses, resumed = ranks("stopped")
    assert statuses == [0, 0]
    fault("A3", "SIGTERM to one of two ranks", tried=1, survived=resumed == whole)


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks, tmp_path, fault):
    class Spoil(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            if args.process_index == 1:
                weight = model[0].auto_model.encoder.layer[0].output.dense.weight
                weight.register_hook(lambda grad: grad * torch.nan if state.global_step == 1 else grad)

    statuses, digests = ranks("spoilt", callbacks=[Spoil()])
    assert statuses == [0, 0], said(tmp_path, "spoilt")
    assert said(tmp_path, "spoilt").count("NaN or infinite in step 2, which is skipped") == 2
    fault("B1", "NaN or infinite gradient on one of two ranks", tried=1, survived=len(set(digests)) == 1)


def test_a_run_of_two_ranks_is_not_gone_on_with_by_one(ranks, make_trainer, tmp_path, fault):
    assert ranks("two")[0] == [0, 0]
    trainer = make_trainer("two", recipe="ppa", per_device_train_batch_size=4)
    with pytest.raises(CheckpointError, match=r"differs in: processes \(2 → 1\)"):
        trainer.train(resume_from_checkpoint=True)
    fault("A5", "resumed with another number of processes", tried=1, survived=1)


@pytest.fixture
def batches_of_ranks(monkeypatch, tmp_path):
    """The sources of every batch that each of two ranks makes, but the single pair that is examined before training."""
    make = ParallelCollator.__call__

    def noted(self, rows):
        with (tmp_path / f"rows-{os.environ['RANK']}").open("a") as lines:
            lines.write(json.dumps([row["source"] for row in rows]) + "\n")
        return make(self, rows)

    monkeypatch.setattr(ParallelCollator, "__call__", noted)
    return lambda: [
        [json.loads(line) for line in (tmp_path / f"rows-{rank}").read_text().splitlines()[1:]] for rank in (0, 1)
    ]


@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
@pytest.mark.parametrize("rows", [101, 104])
def test_two_ranks_share_the_rows_of_a_pass(ranks, batches_of_ranks, tmp_path, fault, rows, sampler):
    """Each once, but for those at the end that do not fill a batch on every rank: less than two batches of four."""
    dataset = Dataset.from_list([{"source": f"der Hund {at}", "target": f"the dog {at}"} for at in range(rows)])
    options = {"dataset": dataset, "max_steps": -1, "num_train_epochs": 1, "save_strategy": "no", "recipe": "tr"}
    statuses, digests = ranks("shared", batch_sampler=sampler, **options)
    assert statuses == [0, 0], said(tmp_path, "shared")
    assert len(set(digests)) == 1
    batches = batches_of_ranks()
    assert [len(of_rank) for of_rank in batches] == [rows // 8] * 2
    assert {len(batch) for of_rank in batches for batch in of_rank} == {4}
    seen = [source for of_rank in batches for batch in of_rank for source in batch]
    assert len(seen) == rows - rows % 8
    fault(
        "F3",
        f"{rows} rows on two ranks: none used twice",
        tried=len(seen),
        survived=len(set(seen) & set(dataset["source"])),
    )
