import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset

from metaphrase.checkpoints.folders import newest, verify
from metaphrase.exceptions import CheckpointError, WorkerError
from metaphrase.training.resuming import ResumableCollator
from tests.conftest import mostly_slow
from tests.faults.conftest import digest


def read(rows):
    yield from rows


@pytest.fixture
def stream(full_bitext):
    """24 pairs, three batches; every pass in an order of its own."""
    features = Dataset.from_list(full_bitext).features
    made = IterableDataset.from_generator(read, gen_kwargs={"rows": tuple(full_bitext)}, features=features)
    return made.shuffle(seed=3, buffer_size=10)


def seen(trainer):
    """The pieces of every batch that is trained on, masks included."""
    batches = []
    step = trainer.training_step

    def training_step(model, inputs, *args):
        batches.append([view["input_ids"].tolist() for view in inputs.values() if isinstance(view, dict)])
        return step(model, inputs, *args)

    trainer.training_step = training_step
    return batches


@pytest.mark.long
@pytest.mark.parametrize("step", mostly_slow([2, 3, 4, 6, 7], [4]))
def test_a_stream_goes_on_where_it_was_in_a_later_pass(make_trainer, stream, tmp_path, fault, step):
    """In the middle of the first, second and third pass, and at their ends; masks are drawn anew in every pass."""
    options = {"recipe": "ppa", "dataset": stream, "max_steps": 8, "save_steps": step}
    whole = make_trainer("whole", **options)
    batches = seen(whole)
    whole.train()
    assert len(batches) == 8
    assert batches[:2] != batches[3:5]
    resumed = make_trainer("resumed", **options)
    rest = seen(resumed)
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / f"checkpoint-{step}")
    assert rest == batches[step:]
    fault(
        "A4",
        "stream resumed within and at the end of an epoch",
        tried=1,
        survived=digest(resumed) == digest(whole),
    )


@pytest.mark.slow
def test_accumulated_batches_of_a_stream_go_on_too(make_trainer, stream, tmp_path, fault):
    options = {
        "dataset": stream,
        "max_steps": 5,
        "save_steps": 3,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    }
    whole = make_trainer("whole", **options)
    batches = seen(whole)
    whole.train()
    resumed = make_trainer("resumed", **options)
    rest = seen(resumed)
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3")
    assert rest == batches[6:]
    fault("A4", "stream resumed, with gradient accumulation", tried=1, survived=digest(resumed) == digest(whole))


@pytest.mark.long
def test_a_stream_read_by_a_worker_goes_on_too(make_trainer, stream, tmp_path, fault):
    options = {"dataset": stream, "max_steps": 6, "save_steps": 4, "dataloader_num_workers": 1}
    whole = make_trainer("whole", **options)
    whole.train()
    resumed = make_trainer("resumed", **options)
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-4")
    assert digest(resumed) == digest(whole)
    fault("A4", "stream resumed, read by a worker process", tried=1, survived=1)


def test_a_stream_is_not_resumed_with_another_batch_size(make_trainer, stream, tmp_path):
    """Its position is a number of batches."""
    settings = {"recipe": "tr", "dataset": stream}
    make_trainer("whole", **settings, max_steps=2, save_steps=2).train()
    settings |= {"per_device_train_batch_size": 4, "allow_changes": True}
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    with pytest.raises(CheckpointError, match=r"size \(8 → 4\).* is a number of batches.*--ignore_data_skip"):
        make_trainer("again", **settings).verify_checkpoint(checkpoint)
    resumed = make_trainer("again", **settings, ignore_data_skip=True, max_steps=3)
    rest = seen(resumed)
    resumed.train(resume_from_checkpoint=checkpoint)
    batch = next(iter(make_trainer("other", **settings).get_train_dataloader()))
    assert rest == [[view["input_ids"].tolist() for view in batch.values()]]


def test_a_stream_is_not_resumed_with_another_number_of_workers(make_trainer, stream, tmp_path):
    """More workers than the stream has parts read it like one per part."""
    make_trainer("whole", dataset=stream, max_steps=1, save_steps=1).train()
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    with pytest.raises(CheckpointError, match=r"dataloader_num_workers \(null → 1\)"):
        make_trainer("again", dataset=stream, dataloader_num_workers=2).verify_checkpoint(checkpoint)


def test_batches_that_are_passed_over_are_not_made(make_trainer, stream, tmp_path, monkeypatch):
    options = {"dataset": stream, "max_steps": 3, "save_steps": 2}
    make_trainer("whole", **options).train()
    resumed = make_trainer("resumed", **options)
    made = []
    build = type(resumed.data_collator.views[0]).build
    monkeypatch.setattr(type(resumed.data_collator.views[0]), "build", lambda *args: made.append(1) or build(*args))
    assert isinstance(resumed.data_collator, ResumableCollator)
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    assert len(made) == len(resumed.data_collator.views)


def dies(rows):
    for at, row in enumerate(rows):
        if at == 16:
            os._exit(3)
        yield row


def test_a_dead_worker_ends_the_run_with_its_number(make_trainer, full_bitext, tmp_path, fault):
    features = Dataset.from_list(full_bitext).features
    broken = IterableDataset.from_generator(dies, gen_kwargs={"rows": tuple(full_bitext)}, features=features)
    trainer = make_trainer(dataset=broken, dataloader_num_workers=1, dataloader_prefetch_factor=1, save_steps=1)
    with pytest.raises(WorkerError, match=r"DataLoader worker \(pid\(?s?\)? \d+\).*lower --dataloader_num_workers"):
        trainer.train()
    fault("E3", "a data loader worker dies", tried=1, survived=1)


def dies_when(rows, flag):
    for at, row in enumerate(rows):
        if at == 16:
            while not Path(flag).exists():
                time.sleep(0.01)
            os._exit(3)
        yield row


@pytest.mark.timeout(100)
def test_a_worker_that_dies_while_a_checkpoint_is_written_ends_the_run(
    make_trainer, full_bitext, tmp_path, monkeypatch
):
    """Sentence-transformers catches every exception while it writes the model card."""
    given = {"rows": tuple(full_bitext), "flag": str(tmp_path / "saving")}
    broken = IterableDataset.from_generator(
        dies_when, gen_kwargs=given, features=Dataset.from_list(full_bitext).features
    )
    trainer = make_trainer(dataset=broken, dataloader_num_workers=1, dataloader_prefetch_factor=1, save_steps=1)
    workers = []

    def card_after_death(model):
        workers.extend(multiprocessing.active_children())
        (tmp_path / "saving").touch()
        os.waitid(os.P_PID, workers[0].pid, os.WEXITED | os.WNOWAIT)  # the error is raised here if it is not delayed
        return "a card"

    monkeypatch.setattr("sentence_transformers.base.model.generate_model_card", card_after_death)
    with pytest.raises(WorkerError, match=r"DataLoader worker \(pid\(?s?\)? \d+\).*checkpoint-1"):
        trainer.train()
    assert len(workers) == 1
    verify(tmp_path / "run" / "checkpoint-1")


def is_killed(rows, passed):
    """In the second pass, as the system does where memory runs out."""
    for at, row in enumerate(rows):
        if at == 8 and Path(passed).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        yield row
    Path(passed).touch()


def test_a_worker_that_is_killed_ends_the_run_and_is_named(make_trainer, full_bitext, tmp_path, fault):
    features = Dataset.from_list(full_bitext).features
    given = {"rows": tuple(full_bitext), "passed": str(tmp_path / "passed")}
    broken = IterableDataset.from_generator(is_killed, gen_kwargs=given, features=features)
    trainer = make_trainer(dataset=broken, dataloader_num_workers=1, dataloader_prefetch_factor=1, save_steps=1)
    with pytest.raises(WorkerError) as error:
        trainer.train()
    said = str(error.value)
    assert re.match(r"DataLoader worker \(pid(\(s\))? \d+\) (exited unexpectedly|is killed by signal: Killed)", said)
    chain = [said]
    cause = error.value
    while (cause := cause.__cause__) is not None:
        chain.append(str(cause))
    assert any("is killed by signal: Killed" in line for line in chain)
    assert "The usual cause is memory: lower --dataloader_num_workers" in said
    last = newest(tmp_path / "run")
    assert last.name == "checkpoint-3"
    assert str(last) in said
    verify(last)
    fault("E2", "kill -9 of a data loader worker", tried=1, survived=1)


def hangs(rows):
    for at, row in enumerate(rows):
        if at == 16:
            time.sleep(60)
        yield row


@pytest.mark.long
def test_a_worker_that_hangs_ends_the_run(make_trainer, full_bitext, fault):
    features = Dataset.from_list(full_bitext).features
    stuck = IterableDataset.from_generator(hangs, gen_kwargs={"rows": tuple(full_bitext)}, features=features)
    options = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1, "dataloader_timeout": 3, "save_steps": 1}
    trainer = make_trainer(dataset=stuck, **options)
    with pytest.raises(WorkerError, match=r"within 3 seconds.*checkpoint-1"):
        trainer.train()
    fault("E3", "a data loader worker hangs", tried=1, survived=1)
