import gzip
import json
import os
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, TrainerState

from metaphrase.checkpoints.folders import checkpoint_folders, publish, tidy, verify
from metaphrase.corpus.code_switching import NLI
from metaphrase.evaluation.measures import ChunkF1
from metaphrase.evaluation.significance import RESAMPLES, percentile_interval
from metaphrase.evaluation.transfer import running
from metaphrase.evaluation.transfer.classification import ClassificationOptions, collate_pairs, finetune_classification
from metaphrase.evaluation.transfer.data import TransferData, pairs_format
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.evaluation.transfer.planning import load_benchmark, plan, split_items
from metaphrase.evaluation.transfer.running import (
    SETTINGS,
    FineTuner,
    KeepChosen,
    check_settings,
    choose,
    dev_history,
    last_checkpoint,
    results_table,
)
from metaphrase.evaluation.transfer.tasks import EncoderSource, encoder_source, load_tokenizer, load_with_head, predict
from metaphrase.exceptions import CheckpointError, DataError, NonFiniteError, UsageError
from tests.evaluation.transfer.conftest import LABELS, read_json
from tests.faults.children import holder

XNLI = pairs_format(NLI, LABELS)
HISTORY = [
    {"step": 4, "mean": 50.0, "en": 60.0, "sw": 40.0},
    {"step": 8, "mean": 55.0, "en": 58.0, "sw": 52.0},
    {"step": 12, "mean": 55.0, "en": 60.0, "sw": 50.0},
]


@pytest.mark.parametrize(
    ("selection", "steps"),
    [
        ("mean", {"en": 8, "sw": 8, "de": 8}),  # of equals the first
        ("language", {"en": 4, "sw": 8, "de": 8}),  # de has no dev data
        ("english", {"en": 4, "sw": 4, "de": 4}),
        ("last", {"en": 12, "sw": 12, "de": 12}),
    ],
)
def test_choice_of_checkpoints(selection, steps):
    assert choose(HISTORY, ["en", "sw", "de"], selection, 12) == steps


def test_without_dev_scores_the_last_checkpoint_counts():
    assert choose([], ["en"], "mean", 7) == {"en": 7}


def test_history_takes_the_last_scores_of_a_step():
    log = [
        {"step": 4, "loss": 1.0},
        {"step": 4, "eval_en": 1.0, "eval_mean": 1.0, "epoch": 1},
        {"step": 4, "eval_en": 2.0, "eval_mean": 2.0, "epoch": 1},
    ]
    assert dev_history(log) == [{"step": 4, "en": 2.0, "mean": 2.0}]


@pytest.fixture
def saved(tmp_path):
    """Three checkpoints, and what is called behind the last."""
    for step in (4, 8, 12):
        partial = tmp_path / "_partial"
        partial.mkdir()
        (partial / "model.safetensors").write_bytes(b"weights")
        (partial / "optimizer.pt").write_bytes(b"moments")
        publish(partial, tmp_path / f"checkpoint-{step}", {"step": step})

    log = [{"step": e["step"]} | {f"eval_{k}": v for k, v in e.items() if k != "step"} for e in HISTORY]

    state = TrainerState(is_world_process_zero=True, global_step=12, log_history=log)
    return lambda: KeepChosen(["en", "sw"], "mean").on_save(arguments(tmp_path), state, None)


def test_only_what_may_be_chosen_is_kept(saved, tmp_path):
    saved()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-8"]
    assert [path.parent.name for path in tmp_path.rglob("optimizer.pt")] == ["checkpoint-12"]
    for name in ("checkpoint-12", "checkpoint-8"):
        verify(tmp_path / name)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-12"


def test_nothing_goes_for_a_checkpoint_that_does_not_verify(saved, tmp_path, caplog, fault):
    (tmp_path / "checkpoint-12" / "optimizer.pt").write_bytes(b"momentS")
    saved()
    assert "checkpoint-12: optimizer.pt is damaged" in caplog.text
    assert sorted(path.parent.name for path in tmp_path.rglob("optimizer.pt")) == [
        "checkpoint-12",
        "checkpoint-4",
        "checkpoint-8",
    ]
    taken = last_checkpoint(tmp_path)
    fault("A6", "a checkpoint of fine-tuning damaged", tried=1, survived=taken == tmp_path / "checkpoint-8")


@pytest.mark.usefixtures("saved")
def test_other_processes_wait_until_the_first_has_recovered_a_checkpoint(tmp_path):
    (tmp_path / "_partial").mkdir()
    (tmp_path / "checkpoint-12").rename(tmp_path / "_partial" / "checkpoint-12")

    @contextmanager
    def after_the_first(**_):
        tidy(tmp_path)
        yield

    args = SimpleNamespace(output_dir=str(tmp_path), process_index=1, main_process_first=after_the_first)
    resumed = []
    FineTuner.train_or_resume(
        SimpleNamespace(args=args, train=lambda resume_from_checkpoint: resumed.append(resume_from_checkpoint))
    )
    assert resumed == [str(tmp_path / "checkpoint-12")]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_death_while_the_optimiser_is_left_out_leaves_a_whole_checkpoint(saved, tmp_path, monkeypatch, fault, when):
    unlink = Path.unlink

    def died(self, *args, **kwargs):
        if self.name != "optimizer.pt" or when == "behind":
            unlink(self, *args, **kwargs)
        if self.name == "optimizer.pt":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", died)
    with pytest.raises(KeyboardInterrupt):
        saved()
    monkeypatch.undo()
    found = [verify(folder)["step"] for folder in checkpoint_folders(tmp_path)]
    saved()
    assert [path.parent.name for path in tmp_path.rglob("optimizer.pt")] == ["checkpoint-12"]
    fault("A1", "process dies while fine-tuning deletes old checkpoints", tried=1, survived=found[-2:] == [8, 12])


def rows(language, count=4):
    return Dataset.from_list(
        [{"item": str(i), "premise": f"{language} {i}", "hypothesis": language, "label": 0} for i in range(count)]
    )


@pytest.fixture
def benchmark():
    sets = {language: rows(language) for language in ("en", "sw", "de")}
    return TransferData(train=sets, dev=sets, test=sets)


def test_runs_of_each_mode(benchmark):
    assert {name: (len(run.train), run.languages) for name, run in plan(benchmark, "zero-shot", NLI).items()} == {
        "en": (4, ("en", "sw", "de"))
    }
    assert {
        name: (len(run.train), run.languages) for name, run in plan(benchmark, "translate-train-all", NLI).items()
    } == {"all": (12, ("en", "sw", "de"))}
    translated = plan(benchmark, "translate-train", NLI)
    assert {name: (run.languages, run.train["hypothesis"][0], run.couples) for name, run in translated.items()} == {
        code: ((code,), code, False) for code in ("en", "sw", "de")
    }


def test_code_switching_couples_all_but_english(benchmark):
    runs = plan(benchmark, "code-switching", NLI)
    assert {name: run.couples for name, run in runs.items()} == {"en": False, "sw": True, "de": True}
    assert "premise_en" not in runs["en"].train.column_names
    assert runs["sw"].train["premise_en"] == [f"en {i}" for i in range(4)]
    with pytest.raises(ValueError, match="items of two texts"):
        plan(benchmark, "code-switching", None)
    with pytest.raises(ValueError, match="de, sw has no training data"):
        plan(replace(benchmark, train={"en": rows("en")}), "translate-train", NLI)
    foreign = {"sw": rows("sw")}
    with pytest.raises(DataError, match="no English data, only sw, but code-switching needs the English originals"):
        plan(TransferData(foreign, foreign, foreign), "code-switching", NLI)
    with pytest.raises(DataError, match="no English data, only sw, but items are split by their English texts"):
        split_items(foreign, "premise", {"dev": 0.5, "train": 1.0}, seed=0)


def test_halves_of_one_data_set(nli):
    options = FineTuningOptions(halves=f"{nli}@dev", dev_share=0.2)
    found = load_benchmark(options, XNLI, seed=0)
    assert {
        part: {code: len(data) for code, data in getattr(found, part).items()} for part in ("train", "dev", "test")
    } == {
        "train": {"en": 18},
        "dev": {"en": 12, "sw": 12},
        "test": {"en": 30, "sw": 30},
    }
    found = load_benchmark(replace(options, languages=["sw"], selection="english", limit_train=5), XNLI, seed=0)
    assert (list(found.train), list(found.dev), list(found.test)) == (["en"], ["en"], ["sw"])
    assert len(found.train["en"]) == 5
    assert not load_benchmark(replace(options, selection="last"), XNLI, seed=0).dev


def test_runs_with_different_seeds_can_share_a_split(nli):
    options = FineTuningOptions(halves=f"{nli}@dev", dev_share=0.2)
    first, other, shared = (
        [load_benchmark(one, XNLI, seed=seed).test["sw"]["premise"]]
        for one, seed in ((options, 0), (options, 1), (replace(options, split_seed=0), 1))
    )
    assert first != other
    assert first == shared


def test_dev_data_are_given_or_held_out(nli):
    options = FineTuningOptions(train=str(nli), dev=str(nli), test=str(nli), mode="translate-train")
    found = load_benchmark(options, XNLI, seed=0)
    assert [len(data["sw"]) for data in (found.train, found.dev, found.test)] == [60, 60, 60]
    found = load_benchmark(replace(options, dev=None), XNLI, seed=0)
    assert [len(data["sw"]) for data in (found.train, found.dev, found.test)] == [54, 6, 60]
    assert not set(found.train["en"]["premise"]) & set(found.dev["en"]["premise"])
    with pytest.raises(ValueError, match="--halves replaces"):
        load_benchmark(replace(options, halves=str(nli)), XNLI, seed=0)
    with pytest.raises(ValueError, match="Pass --train and --test"):
        load_benchmark(FineTuningOptions(train=str(nli)), XNLI, seed=0)


def test_predictions_come_in_the_order_of_the_rows():
    class Doubling(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, rows):
            batches.append(rows.tolist())
            return rows * 2

    batches = []
    model = Doubling().train()
    found = predict(
        model,
        [3, 1, 5, 2, 4],
        collate=lambda rows: {"rows": torch.tensor(rows)},
        read=lambda output, rows: output.tolist(),
        length=lambda row: row,
        batch_size=2,
    )
    assert found == [6, 2, 10, 4, 8]
    assert batches == [[5, 4], [3, 2], [1]]
    assert not model.training


def test_interval_of_chunk_f1_equals_a_loop():
    chunks = np.array([(1, 2, 2), (0, 1, 2), (2, 2, 2), (1, 4, 3)])
    parts, wholes = 2 * chunks[:, 0], chunks[:, 1:].sum(axis=1)
    low, high = percentile_interval(ChunkF1().scores([chunks], RESAMPLES, np.random.default_rng(0))[0])
    rng = np.random.default_rng(1)
    loop = []
    for _ in range(4000):
        drawn = rng.integers(4, size=4)
        loop.append(sum(parts[i] for i in drawn) / sum(wholes[i] for i in drawn))
    assert (low, high) == pytest.approx(tuple(100 * np.quantile(loop, [0.025, 0.975])), abs=2)


# Runs


@pytest.fixture
def options(tiny_encoder_dir, nli):
    return ClassificationOptions(model=str(tiny_encoder_dir), halves=f"{nli}@dev", dev_share=0.2, max_length=48)


def arguments(folder, **changes):
    return FineTuningArguments(
        **{
            "output_dir": str(folder),
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 6,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "use_cpu": True,
            **changes,
        }
    )


@pytest.mark.long
def test_an_interrupted_run_ends_as_one_that_was_not(options, tmp_path, monkeypatch):
    whole = finetune_classification(options, arguments(tmp_path / "whole"))
    on_save = KeepChosen.on_save

    def interrupted(self, args, state, control, **kwargs):
        on_save(self, args, state, control, **kwargs)
        if state.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeepChosen, "on_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune_classification(options, arguments(tmp_path / "torn"))
    assert not (tmp_path / "torn" / "results.json").exists()
    steps = []
    training_step = FineTuner.training_step
    monkeypatch.setattr(FineTuner, "training_step", lambda self, *a: steps.append(1) or training_step(self, *a))
    resumed = finetune_classification(options, arguments(tmp_path / "torn"))
    assert len(steps) == 2
    assert resumed["runs"]["en"]["loss"] == whole["runs"]["en"]["loss"]
    assert resumed["runs"]["en"]["dev"] == whole["runs"]["en"]["dev"]
    assert resumed["languages"] == whole["languages"]


def test_non_finite_weights_are_neither_written_nor_measured(options, tmp_path, monkeypatch, fault):
    training_step = FineTuner.training_step

    def spoiled(self, model, *args):
        loss = training_step(self, model, *args)
        if self.state.global_step == 3:
            model.classifier.bias.grad += torch.nan
        return loss

    monkeypatch.setattr(FineTuner, "training_step", spoiled)
    with pytest.raises(NonFiniteError, match=r"contains NaN or infinite values.*last valid checkpoint is .*-2\.$"):
        finetune_classification(options, arguments(tmp_path))
    assert [path.name for path in checkpoint_folders(tmp_path / "en")] == ["checkpoint-2"]
    assert not list(tmp_path.rglob("results.json"))
    fault("B1", "NaN or infinite gradients in fine-tuning", tried=1, survived=1)


def test_a_full_disk_says_how_a_program_is_resumed(options, tmp_path, monkeypatch, fault):
    save = FineTuner.save_model

    def full(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise OSError(28, "No space left on device")
        save(self, *args, **kwargs)

    monkeypatch.setattr(FineTuner, "save_model", full)
    advice = r"last valid checkpoint is \S+/en/checkpoint-2\. Run the same command again to resume\.$"
    with pytest.raises(CheckpointError, match=rf"checkpoint-4 could not be written: .*No space left.* The {advice}"):
        finetune_classification(options, arguments(tmp_path))
    fault("A2", "no space for a checkpoint of fine-tuning", tried=1, survived=1)


def test_a_process_that_dies_ends_all(options, tmp_path, monkeypatch, ranks_of, fault):
    def died(self, *args, **kwargs):
        if self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(self, *args, **kwargs)

    training_step = FineTuner.training_step
    monkeypatch.setattr(FineTuner, "training_step", died)
    assert ranks_of(lambda rank: finetune_classification(options, arguments(tmp_path / "out"))) == [
        70,
        -signal.SIGKILL,
    ]
    last = (tmp_path / "rank-0.log").read_text().splitlines()[-1]
    assert "WorkerError: Another process of this run ended, or cannot be reached." in last
    assert last.endswith("memory. Run the same command again to resume.")
    fault("F1", "one of two processes that fine-tune is killed", tried=1, survived=1)


def test_a_folder_of_fine_tuning_in_use_is_refused(options, tmp_path, fault):
    child = holder(tmp_path / "out", tmp_path / "log")
    try:
        with pytest.raises(CheckpointError, match=rf"is in use by process {child.pid} "):
            finetune_classification(options, arguments(tmp_path / "out"))
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    fault("A7", "two processes that fine-tune into one folder", tried=1, survived=1)


def test_a_finished_program_is_not_repeated(options, tmp_path, monkeypatch):
    first = finetune_classification(options, arguments(tmp_path))
    monkeypatch.setattr(running, "train_and_measure", None)
    assert finetune_classification(options, arguments(tmp_path)) == json.loads(json.dumps(first))
    (tmp_path / "results.json").unlink()  # the runs are there still
    assert finetune_classification(options, arguments(tmp_path))["languages"] == first["languages"]
    with pytest.raises(ValueError, match=r"started with learning_rate 0.001, not 0.01"):
        finetune_classification(options, arguments(tmp_path, learning_rate=1e-2))
    with pytest.raises(ValueError, match=r"started with eval_steps 2, not 3"):
        finetune_classification(options, arguments(tmp_path, eval_steps=3))
    changed = arguments(tmp_path)
    changed.lr_scheduler_kwargs = {"power": 2}
    with pytest.raises(ValueError, match=r"started with lr_scheduler_kwargs .*, not {\"power\": 2}"):
        finetune_classification(options, changed)
    with pytest.raises(ValueError, match=r"started with optim adamw_torch.*, not sgd"):
        finetune_classification(options, arguments(tmp_path, optim="sgd"))
    with pytest.raises(ValueError, match=r"started with max_length 48, not 40"):
        finetune_classification(replace(options, max_length=40), arguments(tmp_path))
    with pytest.raises(ValueError, match="Pass --output_dir"):
        finetune_classification(options, arguments(""))


def test_each_language_is_measured_with_the_checkpoint_it_chose(options, tmp_path, monkeypatch):
    """#M=N: dev scores are rigged so that English chooses step 2 and Swahili step 6."""
    evaluate = FineTuner.evaluate

    def rigged(self, *args, **kwargs):
        metrics = evaluate(self, *args, **kwargs)
        step = self.state.global_step
        log = self.state.log_history[-1]
        log["eval_en"], log["eval_sw"] = -step, step
        return metrics

    monkeypatch.setattr(FineTuner, "evaluate", rigged)
    results = finetune_classification(replace(options, selection="language"), arguments(tmp_path, save_total_limit=1))
    assert {code: score["checkpoint"] for code, score in results["languages"].items()} == {"en": 2, "sw": 6}
    kept = {path.name: path for path in (tmp_path / "en").glob("checkpoint-*")}
    assert sorted(kept) == ["checkpoint-2", "checkpoint-6"]
    assert not list(tmp_path.rglob("optimizer.pt"))
    # the scores are those of the kept weights, not of the last ones
    source = encoder_source(options.model)
    model = load_with_head(source, AutoModelForSequenceClassification, num_labels=3).eval()
    tokenizer = load_tokenizer(source)
    test = load_benchmark(options, XNLI, seed=42).test
    for code, name in (("en", "checkpoint-2"), ("sw", "checkpoint-6")):
        model.load_state_dict(load_file(kept[name] / "model.safetensors"))
        batch = collate_pairs(tokenizer, NLI, 48, test[code].to_list())
        with torch.no_grad():
            right = (model(**batch).logits.argmax(-1) == batch["labels"]).int().tolist()
        assert results["languages"][code]["items"] == right


def test_checkpoints_are_deleted_on_request(options, tmp_path, caplog):
    finetune_classification(replace(options, keep_checkpoints=False, selection="last"), arguments(tmp_path))
    assert not list(tmp_path.rglob("*.safetensors"))
    assert read_json(tmp_path / "results.json")["languages"]["sw"]["checkpoint"] == 6
    assert "has no checkpoints" not in caplog.text
    finetune_classification(replace(options, selection="last"), arguments(tmp_path))
    assert f"{tmp_path} has no checkpoints: an earlier run with --keep_checkpoints false deleted them." in caplog.text


def test_death_while_checkpoints_are_deleted_repeats_no_training(options, tmp_path, monkeypatch):
    options = replace(options, keep_checkpoints=False, selection="last")

    def died(checkpoint):
        shutil.rmtree(checkpoint)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeepChosen, "on_save", lambda *args, **kwargs: None)
        patch.setattr(running, "remove", died)
        with pytest.raises(KeyboardInterrupt):
            finetune_classification(options, arguments(tmp_path, max_steps=4))
    assert list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(running, "train_and_measure", None)
    finetune_classification(options, arguments(tmp_path, max_steps=4))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_accumulated_batches_train_as_one_batch_does(options, tmp_path):
    weights = []
    for name, batch, steps in (("one", 8, 1), ("four", 2, 4)):
        finetune_classification(
            replace(options, dropout=0.0, selection="last"),
            arguments(
                tmp_path / name,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=steps,
                max_steps=2,
                optim="sgd",
                learning_rate=0.1,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
            ),
        )
        weights.append(load_file(tmp_path / name / "en" / "checkpoint-2" / "model.safetensors"))
    assert weights[0]["classifier.bias"].abs().max() > 1e-3  # it starts at zero
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-6)


def test_two_processes_train_as_one_does(options, tmp_path, ranks_of):
    """With the loss and the gradient of one process, and the same results, which only the first process returns."""
    settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    same = replace(options, dropout=0.0, selection="last")

    def work(rank):
        for _ in range(2):  # the second time, with kept results
            results = finetune_classification(
                same, arguments(tmp_path / "two", per_device_train_batch_size=4, **settings)
            )
            assert bool(results) == (rank == 0)
            dist.barrier()

    assert ranks_of(work) == [0, 0], "\n".join(log.read_text() for log in tmp_path.glob("rank-?.log"))
    finetune_classification(same, arguments(tmp_path / "one", per_device_train_batch_size=8, **settings))
    one, two = (
        read_json(tmp_path / name / "en" / "checkpoint-2" / "trainer_state.json")["log_history"]
        for name in ("one", "two")
    )
    assert [entry["step"] for entry in one if "loss" in entry] == [1, 2]
    for ours, theirs in zip(one, two, strict=True):
        for key in {"loss", "grad_norm"} & ours.keys():
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4), key
    scores = [read_json(tmp_path / name / "results.json")["languages"] for name in ("one", "two")]
    assert scores[0] == scores[1]


def test_table_has_languages_means_and_intervals(options, tmp_path):
    results = finetune_classification(replace(options, selection="last"), arguments(tmp_path, max_steps=1))
    table = results_table(results)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["en", "sw", "average", "without English"]
    assert cells[1][:2] == ["30", "30"]
    assert cells[2][3] == cells[2][1] == f"{results['languages']['sw']['metrics']['accuracy']:.1f}"


def test_other_data_are_not_taken_for_measured(options, nli, tmp_path):
    copy = shutil.copytree(nli, tmp_path / "xnli")
    options = replace(options, halves=f"{copy}@dev", selection="last")
    finetune_classification(options, arguments(tmp_path / "out", max_steps=1))
    with pytest.raises(ValueError, match="was started with limit_test None, not 20"):
        finetune_classification(replace(options, limit_test=20), arguments(tmp_path / "out", max_steps=1))
    path = copy / "dev-en.tsv.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"dog", b"cat")))
    with pytest.raises(ValueError, match=r"The data have changed since \S+/out was started"):
        finetune_classification(options, arguments(tmp_path / "out", max_steps=1))


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ({"load_best_model_at_end": True}, "with --selection"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "Choose another, such as linear"),
        ({"lr_scheduler_type": "greedy"}, "Choose another, such as linear"),
        ({"resume_from_checkpoint": "x"}, "resumes by itself"),
        ({"eval_strategy": "no", "save_strategy": "no"}, "--save_strategy must be epoch or steps"),
    ],
)
def test_options_of_the_trainer_that_do_not_apply_are_refused(tmp_path, option, advice):
    with pytest.raises(UsageError, match=advice):
        FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, **option)


def test_one_gpu_is_used_if_several_are_visible(tmp_path, monkeypatch):
    """With several, the batch size would be multiplied by their number, which no setting states."""
    monkeypatch.setattr(FineTuningArguments, "_n_gpu", 2, raising=False)
    monkeypatch.setattr(FineTuningArguments, "_setup_devices", torch.device("cpu"))
    assert FineTuningArguments(output_dir=str(tmp_path), per_device_train_batch_size=4).train_batch_size == 4


def test_items_without_an_english_one_stay_training_data():
    sets = {
        language: Dataset.from_dict(
            {"item": [f"{prefix}{at}" for at in range(20)], "text": [str(at) for at in range(20)]}
        )
        for language, prefix in (("en", "a"), ("sw", "b"))
    }
    shares = {"dev": 0.2, "train": 1.0}
    parts = split_items(sets, "text", shares, seed=1, others="train")
    assert {part: {code: len(one) for code, one in of.items()} for part, of in parts.items()} == {
        "dev": {"en": 4, "sw": 0},
        "train": {"en": 16, "sw": 20},
    }
    with pytest.raises(DataError, match="The items of sw cannot be split: none has the identifier of an English item"):
        split_items(sets, "text", {"test": 0.5, "train": 1.0}, seed=1)


def test_settings_of_a_folder_without_results_may_change(options, tmp_path):
    source = EncoderSource("tiny", tmp_path)
    given = arguments(tmp_path / "out")
    check_settings(tmp_path, "xnli", source, options, given, {})
    changed = check_settings(tmp_path, "xnli", source, replace(options, max_length=7), given, {})
    assert read_json(tmp_path / SETTINGS)["settings"]["max_length"] == changed["settings"]["max_length"] == 7
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(UsageError, match="was started with max_length 7, not 9"):
        check_settings(tmp_path, "xnli", source, replace(options, max_length=9), given, {})


def test_a_slash_after_the_model_does_not_matter(options, tmp_path):
    source, given = EncoderSource("tiny", tmp_path), arguments(tmp_path / "out")
    settings = check_settings(tmp_path, "xnli", source, options, given, {})
    assert check_settings(tmp_path, "xnli", source, replace(options, model=f"{options.model}/"), given, {}) == settings


def test_another_path_of_the_same_encoder_is_the_same(options, tmp_path):
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    given, moved = arguments(tmp_path / "out"), replace(options, model="another/path")

    def check(options, content):
        (tmp_path / "model.safetensors").write_text(content)
        check_settings(tmp_path, "xnli", EncoderSource("tiny", tmp_path), options, given, {})

    check(options, "one")
    check(moved, "one")
    with pytest.raises(UsageError, match="was started with model "):
        check(moved, "other")


def test_encoders_without_weights_in_safetensors_differ_by_name(options, tmp_path):
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    source, given = EncoderSource("tiny", tmp_path), arguments(tmp_path / "out")
    check_settings(tmp_path, "xnli", source, options, given, {})
    with pytest.raises(UsageError, match=r"was started with model .*, not another/path"):
        check_settings(tmp_path, "xnli", source, replace(options, model="another/path"), given, {})


def test_a_digest_covers_shards_and_tokenizer(tmp_path):
    source = EncoderSource("tiny", tmp_path)
    assert source.sha256 is None
    found = []
    for name in (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
        "config.json",
    ):
        (tmp_path / name).write_text(name)
        found.append(source.sha256)
        (tmp_path / "report.json").write_text(name)
        assert source.sha256 == found[-1]
    assert len(set(found)) == 4


def test_each_limit_is_that_of_its_part(nli):
    options = FineTuningOptions(train=str(nli), dev=str(nli), test=str(nli), limit_train=5, limit_test=7)
    found = load_benchmark(options, XNLI, seed=0)
    assert [len(data["en"]) for data in (found.train, found.dev, found.test)] == [5, 7, 7]


def test_another_encoder_or_batch_is_not_gone_on_with(options, tmp_path):
    """Also if the encoder has the same name."""
    folder, weights = tmp_path / "out", tmp_path / "model.safetensors"
    (folder / "run" / "checkpoint-3").mkdir(parents=True)

    def check(content, **changes):
        weights.write_text(content)
        check_settings(folder, "xnli", EncoderSource("tiny", tmp_path), options, arguments(folder, **changes), {})

    check("one")
    check("one")
    with pytest.raises(UsageError, match="was started with model_sha256"):
        check("other")
    with pytest.raises(UsageError, match="was started with gradient_accumulation_steps 1, not 2"):
        check("one", gradient_accumulation_steps=2)
