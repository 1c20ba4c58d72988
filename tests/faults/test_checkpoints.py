import copy
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from metaphrase.checkpoints import folders as checkpoints
from metaphrase.checkpoints.folders import (
    MANIFEST,
    NewerCheckpointError,
    check_space,
    checkpoint_folders,
    newest,
    publish,
    read_manifest,
    rotate,
    tidy,
    verify,
)
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import CheckpointError, NonFiniteError, UsageError
from metaphrase.io.digests import json_digest
from metaphrase.io.locks import exclusive
from metaphrase.training.resuming import RunFacts
from tests.conftest import mostly_slow
from tests.faults.children import Child, holder
from tests.faults.conftest import digest
from tests.faults.scores import SETTINGS, scored


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(step, output="out"):
        staging = tmp_path / output / "_partial" / f"checkpoint-{step}"
        (staging / "heads").mkdir(parents=True)
        (staging / "model.safetensors").write_bytes(bytes(range(200)))
        (staging / "heads" / "config.json").write_text("{}")
        place = tmp_path / output / staging.name
        publish(staging, place, {"step": step})
        return place

    return make


def names(output):
    return [path.name for path in checkpoint_folders(output)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def trained(make_trainer, tmp_path, kept):
    """A folder with two real checkpoints, and how a run goes on from it."""
    if not (kept / "run").exists():
        trainer = make_trainer("kept")
        trainer.train()
        shutil.move(tmp_path / "kept", kept / "run")
        torch.save(trainer.loss.state_dict(), kept / "weights.pt")
    shutil.copytree(kept / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_manifest_names_every_file_and_the_versions(trained):
    checkpoint = trained / "checkpoint-4"
    manifest = verify(checkpoint)
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {MANIFEST}
    assert {"model.safetensors", "heads/model.safetensors", "optimizer.pt", "trainer_state.json"} < files
    assert "training_args.bin" not in files
    assert json.loads((checkpoint / "training_args.json").read_text())["max_steps"] == 4
    assert manifest["step"] == 4
    assert manifest["format"] == checkpoints.FORMAT
    assert manifest["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_nothing_in_a_checkpoint_needs_an_unsafe_pickle(trained):
    import numpy as np
    from transformers.trainer_pt_utils import safe_globals

    pickles = [
        path for path in (trained / "checkpoint-4").rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl")
    ]
    assert {path.name for path in pickles} == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    for path in pickles:
        with safe_globals():
            assert torch.load(path, weights_only=True)
    assert np


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("optimizer.pt", "optimiser or schedule"),
        ("scheduler.pt", "optimiser or schedule"),
        ("rng_state.pth", "random states"),
    ],
)
def test_code_in_a_checkpoint_is_not_run(trained, make_trainer, tmp_path, fault, name, states):
    """By somebody who also writes its manifest."""
    checkpoint, marker = trained / "checkpoint-2", tmp_path / "executed"
    shutil.rmtree(trained / "checkpoint-4")
    torch.save(Payload(marker), checkpoint / name)
    facts = {key: value for key, value in read_manifest(checkpoint).items() if key not in ("files", "sha256")}
    publish(checkpoint.rename(tmp_path / "altered"), checkpoint, facts)
    verify(checkpoint)
    message = rf"checkpoint-2 cannot be resumed: its {states} cannot be loaded \(UnpicklingError\)"
    with pytest.raises(CheckpointError, match=message):
        make_trainer().train(resume_from_checkpoint=True)
    assert not marker.exists()
    torch.load(checkpoint / name, weights_only=False)
    assert marker.exists()
    fault("H1", f"code in {name} of a checkpoint", tried=1, survived=1)


@pytest.mark.parametrize("state", ["[]", "{}", "null", '{"global_step": 1, "train_batch_size": 8}'])
def test_a_state_that_is_not_that_of_its_checkpoint_is_refused(trained, make_trainer, tmp_path, fault, state):
    """Also if the manifest was made to match."""
    checkpoint = trained / "checkpoint-2"
    shutil.rmtree(trained / "checkpoint-4")
    (checkpoint / "trainer_state.json").write_text(state)
    facts = {key: value for key, value in read_manifest(checkpoint).items() if key not in ("files", "sha256")}
    publish(checkpoint.rename(tmp_path / "altered"), checkpoint, facts)
    with pytest.raises(CheckpointError, match="cannot be resumed: its state cannot be loaded"):
        make_trainer().train(resume_from_checkpoint=True)
    fault("A6", "a state that is not that of its checkpoint", tried=1, survived=1)


@pytest.mark.long
@pytest.mark.parametrize("step", [47, pytest.param(3, marks=pytest.mark.slow)], ids=["short", "long"])
def test_damage_to_any_file_is_found(trained, fault, step):
    """Each file truncated and with flipped bits at places from its first byte to its last, or gone, or grown.

    Of the manifest's first bytes every bit is flipped, and two of every third byte behind them, or of fewer; damage never looks like a
    newer version's checkpoint.
    """
    checkpoint, tried = trained / "checkpoint-4", 0

    def damaged(name):
        nonlocal tried
        tried += 1
        with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
            verify(checkpoint)
        assert caught.type is CheckpointError

    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        whole, name = path.read_bytes(), path.relative_to(checkpoint).as_posix()
        places = sorted({len(whole) * part // 8 for part in range(8)} | {len(whole) - 1})
        for at in places if whole else []:
            if name == MANIFEST and at == len(whole) - 1:  # the end of its last line
                continue
            path.write_bytes(whole[:at])
            damaged(name)
        if name == MANIFEST:
            places = [*range(40), *range(40, len(whole), step)]
        for at in places if whole else []:
            for bit in range(8) if name == MANIFEST and at < 40 else {at % 8, (at + 3) % 8}:
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
                damaged(name)
        path.unlink()
        damaged(name)
        path.write_bytes(whole + b" " * (name != MANIFEST))
        if name != MANIFEST:
            damaged(name)
        path.write_bytes(whole)
        verify(checkpoint)
    fault("A6", "checkpoint file truncated, extended, missing, or with a flipped bit", tried=tried, survived=tried)


def test_resuming_takes_the_last_that_verifies_and_names_the_rest(make_trainer, trained, kept, caplog, fault):
    file = trained / "checkpoint-4" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    trainer = make_trainer()
    with caplog.at_level(logging.WARNING, logger="metaphrase"):
        trainer.train(resume_from_checkpoint=True)
    said = [record.getMessage() for record in caplog.records if "Skipped" in record.getMessage()]
    assert said == [
        f"Skipped: {trained / 'checkpoint-4'}: optimizer.pt is damaged: its digest differs from the manifest."
    ]
    wanted = torch.load(kept / "weights.pt")
    same = all(torch.equal(value, wanted[name]) for name, value in trainer.loss.state_dict().items())
    verify(trained / "checkpoint-4")  # written again
    fault("A6", "latest checkpoint damaged: falls back to the previous one", tried=1, survived=same)


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(make_trainer, trained):
    (trained / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    damaged = (
        r"checkpoint-4: model.safetensors is damaged: it has 0 bytes instead of \d+\. The last valid .*checkpoint-2\."
    )
    with pytest.raises(CheckpointError, match=damaged):
        make_trainer().train(resume_from_checkpoint=str(trained / "checkpoint-4"))
    (trained / "checkpoint-2" / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2 has no manifest.json: it is incomplete, or another program"
    ):
        make_trainer().train(resume_from_checkpoint=trained / "checkpoint-2")
    with pytest.raises(
        CheckpointError, match=r"is a folder of checkpoints. Name one of them, such as .*checkpoint-4,"
    ):
        make_trainer().train(resume_from_checkpoint=trained)
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* can be resumed"):
        make_trainer().train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*empty to resume"):
        make_trainer("empty").train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"Checkpoint .*checkpoint-9 does not exist"):
        make_trainer().train(resume_from_checkpoint=str(trained / "checkpoint-9"))


def test_a_newer_format_is_refused_with_both_versions(make_trainer, trained, fault):
    path = trained / "checkpoint-4" / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["format"] += 1
    manifest["versions"]["metaphrase"] = "99.0"
    path.write_text(json.dumps({**manifest, "sha256": json_digest(manifest)}))
    refused = 0
    for asked in (True, str(trained / "checkpoint-4")):
        with pytest.raises(
            NewerCheckpointError, match=r"metaphrase 99\.0 in format 2; metaphrase \S+ reads formats up to 1"
        ):
            make_trainer().train(resume_from_checkpoint=asked)
        refused += 1
    fault("I2", "a checkpoint of a newer version", tried=2, survived=refused)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_size": 4}, r"per_device_train_batch_size \(8 → 4\)"),
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps \(1 → 2\)"),
        ({"seed": 3}, r"seed \(42 → 3\)"),
        ({"data_seed": 3}, r"data_seed \(null → 3\)"),
        ({"batch_sampler": "no_duplicates"}, r"batch_sampler \(null → \"no_duplicates\"\)"),
        ({"optim": "sgd"}, r"optim \(null → \"sgd\"\)"),
        ({"recipe": "tr"}, r"terms \(.* → .*\)"),
    ],
)
def test_another_run_is_not_gone_on_with(make_trainer, trained, fault, changes, message):
    with pytest.raises(CheckpointError, match=rf"belongs to another run, which differs in: .*{message}"):
        make_trainer(**changes).train(resume_from_checkpoint=True)
    fault("A5", f"resumed with another {', '.join(changes)}", tried=1, survived=1)


@pytest.mark.parametrize("changes", [{"optim": "sgd"}, {"optim": "adafactor"}, {"recipe": "tr"}])
def test_an_optimizer_that_does_not_fit_the_run_starts_anew(make_trainer, trained, changes, caplog):
    trainer = make_trainer(max_steps=5, allow_changes=True, **changes)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5
    assert "is of another kind, or trains other weights. A new one starts." in caplog.text


def test_the_learning_rate_of_heads_may_be_set_on_resume(make_trainer, trained, caplog):
    trainer = make_trainer(max_steps=5, head_learning_rate=0.1)
    trainer.train(resume_from_checkpoint=True)
    assert "A new one starts" not in caplog.text
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.1, 1e-3}


def test_a_checkpoint_of_another_encoder_does_not_fit(make_trainer, trained, tiny_encoder):
    encoder = copy.deepcopy(tiny_encoder)
    encoder[0].auto_model.resize_token_embeddings(len(encoder.tokenizer) + 8)
    with pytest.raises(CheckpointError, match="its weights do not fit this encoder or its adapter"):
        make_trainer(tiny_encoder=encoder, allow_changes=True).train(resume_from_checkpoint=True)


def test_a_flipped_bit_of_the_format_is_no_newer_version(trained, fault):
    path = trained / "checkpoint-4" / MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    assert newest(trained) == trained / "checkpoint-2"
    fault("A6", "flipped bit in the format version", tried=1, survived=1)


def _with_pooling(encoder, tmp_path):
    encoder[1] = Pooling(32, pooling_mode="mean")


def _with_a_module(encoder, tmp_path):
    encoder.append(Normalize())


def _with_other_pieces(encoder, tmp_path):
    content = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
    one, other, *_ = [piece for piece in content["model"]["vocab"] if piece.isalpha()]
    content["model"]["vocab"][one], content["model"]["vocab"][other] = (
        content["model"]["vocab"][other],
        content["model"]["vocab"][one],
    )
    encoder.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))


def _with_another_normaliser(encoder, tmp_path):
    encoder.tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)


def _of_another_folder(encoder, tmp_path):
    (tmp_path / "another").mkdir()
    encoder[0].auto_model.config._name_or_path = str(tmp_path / "another")


def _of_another_commit(encoder, tmp_path):
    encoder[0].auto_model.config._name_or_path = encoder.model_card_data.base_model = "acme/tiny"
    encoder.model_card_data.base_model_revision = "b" * 40


def _frozen(encoder, tmp_path):
    encoder[0].auto_model.get_input_embeddings().weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_pooling, r'pooling \(\["cls"\] → \["mean"\]\)'),
        (_with_a_module, r'modules \(\[\] → \["Normalize \w+"\]\)'),
        (_with_other_pieces, r'tokenizer \("\w+" → "\w+"\)'),
        (_with_another_normaliser, r'tokenizer \("\w+" → "\w+"\)'),
        (_of_another_folder, r'base_model \("tiny-\w+" → "another"\)'),
        (_of_another_commit, r'base_model \(.* → "acme/tiny"\), base_model_revision \(null → "bbb'),
        (_frozen, r'frozen \(\[\] → \["0\.'),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_another_encoder_is_noticed(make_trainer, trained, tiny_encoder, tmp_path, fault, change, message):
    change(tiny_encoder, tmp_path)
    with pytest.raises(CheckpointError, match=rf"which differs in: {message}.*--allow_changes"):
        make_trainer(tiny_encoder=tiny_encoder).train(resume_from_checkpoint=True)
    fault("A5", f"resumed with an encoder {change.__name__.strip('_').replace('_', ' ')}", tried=1, survived=1)


def test_a_tokenizer_that_was_used_is_the_same(make_trainer):
    trainer = make_trainer()
    before = RunFacts(trainer.loss, trainer.args).collect(None)["tokenizer"]
    trainer.model.tokenizer(["ja", "nein ja"], truncation=True, padding="max_length", max_length=7)
    assert RunFacts(trainer.loss, trainer.args).collect(None)["tokenizer"] == before


def test_other_data_are_noticed_and_may_be_allowed(make_trainer, trained, full_bitext, fault):
    from datasets import Dataset

    changed = Dataset.from_list([*full_bitext[:-1], {**full_bitext[-1], "target": "something else"}])
    with pytest.raises(CheckpointError, match=r"differs in: corpus .*--allow_changes"):
        make_trainer(dataset=changed).train(resume_from_checkpoint=True)
    fault("A5", "resumed with another corpus", tried=1, survived=1)
    trainer = make_trainer(dataset=changed, allow_changes=True, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


@pytest.mark.parametrize(
    ("column", "value"),
    mostly_slow([("target", "sentence 2500!"), ("alignment", "0-1"), ("source", None)], [("alignment", "0-1")]),
)
def test_any_changed_row_is_noticed(make_trainer, tmp_path, fault, column, value):
    from datasets import Dataset

    rows = [
        {"source": f"satz {i}", "target": f"sentence {i}", "alignment": "0-0 1-1", "source_lang": "de"}
        for i in range(5000)
    ]
    options = {"recipe": "tr", "max_steps": 2, "save_steps": 2}
    make_trainer(dataset=Dataset.from_list(rows), **options).train()
    make_trainer(dataset=Dataset.from_list(rows), **options).train(resume_from_checkpoint=True)
    rows[2500] = {**rows[2500], column: value}
    with pytest.raises(CheckpointError, match="differs in: corpus "):
        make_trainer(dataset=Dataset.from_list(rows), **options).train(resume_from_checkpoint=True)
    fault("A5", f"resumed with another {column} in one of 5,000 rows", tried=1, survived=1)


def test_another_stream_is_noticed(make_trainer, bitext_path, tmp_path, fault):
    from metaphrase.corpus import load_corpus

    path = tmp_path / "de-en.tsv"
    path.write_bytes(bitext_path.read_bytes())
    options = {"recipe": "tr", "max_steps": 2, "save_steps": 2}

    def make():
        return make_trainer(dataset=load_corpus(str(path), streaming=True).dataset, **options)

    make().train()
    make().train(resume_from_checkpoint=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write("noch einer\tone more\n")
    with pytest.raises(CheckpointError, match="differs in: corpus "):
        make().train(resume_from_checkpoint=True)
    fault("A5", "resumed with another streamed file", tried=1, survived=1)


def test_the_best_checkpoint_is_found_in_a_folder_that_was_moved(make_trainer, monkeypatch, tmp_path, fault):
    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored({2: 1.0}))
    options = SETTINGS | {"recipe": "tr", "max_steps": 6}
    make_trainer(**options | {"load_best_model_at_end": False, "save_total_limit": 3}).train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    (tmp_path / "run").rename(tmp_path / "moved")
    trainer = make_trainer("moved", **options)
    trainer.train(resume_from_checkpoint=True)
    best = tmp_path / "moved" / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    weights = load_encoder(str(best), device="cpu").state_dict()
    assert all(torch.equal(weights[name], value) for name, value in trainer.model.state_dict().items())
    fault("A4", "resumed in a folder that was moved: the best checkpoint is found", tried=1, survived=1)


@pytest.mark.parametrize(
    ("changes", "message", "best", "last"),
    [
        ({"metric_for_best_model": "score2"}, 'metric ("score" → "score2")', 10, 12),
        ({"greater_is_better": False}, "greater_is_better (true → false)", 12, 12),
        ({"dev": "b"}, 'dev ({"sw": "a"} → {"sw": "b"})', 10, 12),
        ({"metric_for_best_model": "score"}, None, 2, 8),  # the same without eval_
    ],
)
def test_the_best_checkpoint_by_other_measures_is_forgotten(
    make_trainer, monkeypatch, caplog, changes, message, best, last
):
    def train(*, dev="a", resume=True, **options):
        trainer = make_trainer(**SETTINGS | {"recipe": "tr"} | options)
        trainer.dev_digests = {"sw": dev}
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.best_global_step, trainer.state.global_step

    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored({2: 3.0, 8: 1.0, 10: 2.0}))
    assert train(resume=False) == (2, 8)  # three evaluations after the best one
    assert train(**changes) == (best, last)
    assert ("What selects the best model differs" in caplog.text) == (message is not None)
    assert (message or "") in caplog.text


def test_a_finished_run_with_another_metric_ends_with_its_last_checkpoint(make_trainer, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored({2: 1.0}))
    options = SETTINGS | {"recipe": "tr", "max_steps": 4}
    make_trainer(**options).train()
    repeated = make_trainer(**options | {"metric_for_best_model": "score2"})
    repeated.train(resume_from_checkpoint=True)
    assert repeated.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-4")
    assert "The final model is from step" not in caplog.text


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau"])
def test_a_measure_for_the_best_checkpoint_that_does_not_exist(make_trainer, monkeypatch, schedule):
    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored({2: 1.0}))
    options = SETTINGS | {"recipe": "tr", "metric_for_best_model": "eval_scor", "lr_scheduler_type": schedule}
    with pytest.raises(
        UsageError,
        match=r"\(eval_scor\) is not a result of the evaluation; choose one of eval_score, eval_score2\. The terms",
    ):
        make_trainer(**options).train()


@pytest.mark.long
def test_a_damaged_best_checkpoint_is_not_passed_over(make_trainer, monkeypatch, tmp_path, fault):
    from transformers import TrainerCallback

    class Damage(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 7:
                file = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
                file.write_bytes(file.read_bytes()[:-1] + b"?")

    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored({2: 1.0}))
    with pytest.raises(
        CheckpointError,
        match=r"best checkpoint cannot be loaded.*checkpoint-2: model.safetensors is damaged.*"
        r"The last valid checkpoint is .*checkpoint-8\. Restore checkpoint-2, or delete it",
    ):
        make_trainer(callbacks=[Damage()], **SETTINGS).train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    trainer = make_trainer(**SETTINGS)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    fault("A6", "the best checkpoint damaged while training continues", tried=1, survived=1)


def test_old_checkpoints_go_when_a_newer_one_is_there(make_checkpoint, tmp_path):
    output = tmp_path / "out"
    for step in (1, 2, 10):
        last = make_checkpoint(step)
    rotate(output, last, None)
    assert names(output) == ["checkpoint-1", "checkpoint-2", "checkpoint-10"]
    rotate(output, last, 2, best=str(output / "checkpoint-1"))
    assert names(output) == ["checkpoint-1", "checkpoint-10"]
    rotate(output, last, 1)
    assert names(output) == ["checkpoint-10"]
    again = make_checkpoint(5)  # of a run that went on from an older one
    rotate(output, again, 1)
    assert names(output) == ["checkpoint-5"]


def test_a_finished_run_that_keeps_one_checkpoint_is_not_trained_again(make_trainer, monkeypatch, tmp_path):
    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored({2: 1.0}))
    options = SETTINGS | {"recipe": "tr", "max_steps": 4}
    make_trainer(**options).train()
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]  # the best and the last one
    repeated = make_trainer(**options)
    monkeypatch.setattr(repeated, "training_step", None)
    repeated.train(resume_from_checkpoint=True)
    assert repeated.state.global_step == 4


def test_no_checkpoint_goes_for_one_that_does_not_verify(make_checkpoint, tmp_path, caplog, fault):
    make_checkpoint(1)
    last = make_checkpoint(2)
    (last / "model.safetensors").write_bytes(bytes(200))
    rotate(tmp_path / "out", last, 1)
    assert "Older checkpoints are kept." in caplog.text
    kept = newest(tmp_path / "out") == tmp_path / "out" / "checkpoint-1"
    fault("A6", "checkpoint damaged while it is written", tried=1, survived=kept)


def test_a_checkpoint_is_replaced_in_one_piece(make_checkpoint, tmp_path):
    (make_checkpoint(3) / "stray").touch()
    assert not (make_checkpoint(3) / "stray").exists()
    assert not (tmp_path / "out" / "_deleted").exists()


def test_leftovers_are_cleared_away(make_checkpoint, tmp_path):
    output = tmp_path / "out"
    whole = make_checkpoint(4)
    (output / "_partial").mkdir(exist_ok=True)
    whole.rename(output / "_partial" / "checkpoint-4")
    shutil.copytree(make_checkpoint(2), output / "_deleted" / "checkpoint-2")
    (output / "_partial" / "checkpoint-5").mkdir()
    (output / "_partial" / "checkpoint-5" / "model.safetensors").touch()
    tidy(output)
    assert sorted(path.name for path in output.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path, fault):
    child = holder(tmp_path / "out", tmp_path / "log")
    with pytest.raises(CheckpointError, match=rf"is in use by process {child.pid} on \S+\. Wait for it or stop it"):
        exclusive(tmp_path / "out").__enter__()
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert (tmp_path / "out" / "_lock").exists()  # stale
    with exclusive(tmp_path / "out"), exclusive(tmp_path / "out"):
        pass
    assert not (tmp_path / "out" / "_lock").exists()
    fault("A7", "two processes on one folder; the first dies", tried=2, survived=2)


def test_a_run_on_a_folder_in_use_is_refused(make_trainer, tmp_path, run, fault):
    with exclusive(tmp_path / "run"):
        assert run() == 70
    said = (tmp_path / "run.log").read_text()
    fault("A7", "a second run on one folder", tried=1, survived=f"in use by process {os.getpid()}" in said)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog, fault, number):
    def flock(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive(tmp_path / "out"), exclusive(tmp_path / "out"):
        (tmp_path / "out" / "file").touch()
    said = [record.getMessage() for record in caplog.records if "does not support locks" in record.getMessage()]
    assert [os.strerror(number) in line for line in said] == [True]
    assert not (tmp_path / "out" / "_lock").exists()
    fault("A7", f"a file system without locks ({errno.errorcode[number]}): a warning", tried=1, survived=1)


def test_other_checkpoints_are_read_only_where_something_is_wrong(make_trainer, monkeypatch, tmp_path):
    asked = []
    for place in ("checkpoints.saving", "training.fault_tolerance", "training.hub_sync", "training.resuming"):
        monkeypatch.setattr(
            f"metaphrase.{place}.last_good", lambda output: asked.append(output) or "The last good one."
        )
    trainer = make_trainer(max_steps=2, save_steps=1)
    trainer.train()
    assert (tmp_path / "run" / "checkpoint-2" / MANIFEST).is_file()
    assert asked == []
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"The last good one\."):
        trainer.save_model()
    assert len(asked) == 1


@pytest.mark.parametrize("below", ["", "below"])
def test_a_trainer_on_a_file_is_refused(make_trainer, tmp_path, fault, below):
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match=r"The output folder .*run.* is a file, or inside one\. Choose another"):
        make_trainer(f"run/{below}")
    fault("A8", f"output folder {'inside' if below else 'that is'} a file", tried=1, survived=1)


def test_folders_that_cannot_be_written_to_are_refused_at_the_start(tmp_path, fault):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"The output folder .* is a file, or inside one"):
            exclusive(output).__enter__()

    (tmp_path / "locked").mkdir(mode=0o500)

    def work():
        if os.geteuid() == 0:
            os.setuid(65534)
        with exclusive(tmp_path / "locked" / "out"):
            pass

    child = Child(work, tmp_path / "log")
    assert child.wait() == 70
    assert "locked/out is not writable" in child.said()
    fault("A8", "output folder that is a file, or not writable", tried=3, survived=3)


def test_a_disk_that_fills_while_the_tokenizer_is_written(make_trainer, tmp_path, monkeypatch, fault):
    def full(self, path, *args, **kwargs):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    trainer = make_trainer(max_steps=1)
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-1 could not be written: No space left on device.* Resume with"
    ):
        trainer.train()
    assert names(tmp_path / "run") == []
    fault("A2", "disk full while the tokenizer is written", tried=1, survived=1)


def test_a_folder_that_vanishes_is_made_again(make_trainer, tmp_path, fault):
    trainer = make_trainer(max_steps=3, save_steps=3)
    callback = vanish(trainer.args.output_dir)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.vanished
    assert trainer.state.global_step == 3
    verify(tmp_path / "run" / "checkpoint-3")
    fault("A8", "output folder deleted during training", tried=1, survived=1)


def vanish(output):
    from transformers import TrainerCallback

    class Vanish(TrainerCallback):
        vanished = False

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                shutil.rmtree(output)
                self.vanished = not os.path.lexists(output)

    return Vanish()


def test_a_full_disk_is_noticed_before_the_first_step(make_trainer, tmp_path, monkeypatch, caplog, fault):
    monkeypatch.setattr(
        checkpoints.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    )
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match=r"has 0\.0 MB free, and a checkpoint needs about 0\.\d MB\. Free"):
        trainer.train()
    assert trainer.state.global_step == 0
    check_space(tmp_path, "checkpoint", 500, 2000)
    assert "The first checkpoint may not fit" in caplog.text
    fault("A2", "disk full before the first step", tried=1, survived=1)


def test_weights_that_are_not_finite_are_not_written(make_trainer, tmp_path, fault):
    trainer = make_trainer(max_steps=2, save_steps=2)
    trainer.train()
    with torch.no_grad():
        trainer.model[0].auto_model.embeddings.word_embeddings.weight[3, 3] = torch.inf
    trainer.state.global_step = 3
    for save in (
        lambda: trainer._save_checkpoint(trainer.model, None),
        lambda: trainer.save_model(str(tmp_path / "m")),
    ):
        with pytest.raises(
            NonFiniteError, match=r"word_embeddings.weight contains NaN or infinite.*last valid .*checkpoint-2"
        ):
            save()
    assert names(tmp_path / "run") == ["checkpoint-2"]
    assert not (tmp_path / "m").exists()
    fault("B1", "attempt to save NaN or infinite weights", tried=2, survived=2)


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
def test_a_finished_run_makes_no_step_more(make_trainer, full_bitext, tmp_path, fault, stream):
    options = {"recipe": "ppa", "lr_scheduler_type": "constant"}
    if stream:
        options["dataset"] = Dataset.from_list(full_bitext).to_iterable_dataset()
    whole = make_trainer(**options)
    whole.train()
    again = make_trainer(**options)
    again.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-4")
    assert again.state.global_step == 4
    what = f"a finished run is resumed{', streaming' if stream else ''}"
    fault("A4", what, tried=1, survived=digest(again) == digest(whole))


def test_the_original_commit_is_named(make_trainer, trained, tiny_encoder, tmp_path):
    _of_another_commit(tiny_encoder, tmp_path)
    trainer = make_trainer("pinned", tiny_encoder=tiny_encoder)
    trainer.train()
    tiny_encoder.model_card_data.base_model_revision = "c" * 40
    trainer = make_trainer("pinned", tiny_encoder=tiny_encoder)
    with pytest.raises(CheckpointError, match=rf"Restore the original encoder with --model acme/tiny@{'b' * 40}, or"):
        trainer.train(resume_from_checkpoint=True)
