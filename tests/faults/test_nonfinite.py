import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, TrainerCallback

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.aligners.linking import add_alignment
from metaphrase.aligners.span import SpanAligner
from metaphrase.checkpoints.folders import checkpoint_folders
from metaphrase.cli import main
from metaphrase.corpus.words import Words
from metaphrase.exceptions import NonFiniteError
from metaphrase.objectives import OBJECTIVES, Objective
from metaphrase.objectives.translation_ranking import TranslationRanking
from metaphrase.training.fault_tolerance import repeat_within_memory
from tests.conftest import mostly_slow


class Watch(TrainerCallback):
    """Keeps the weights behind every step."""

    def __init__(self):
        self.weights = []

    def bind(self, trainer):
        self.trainer = trainer
        trainer.add_callback(self)
        self.on_step_end(None, None, None)
        return self

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append({name: value.clone() for name, value in self.trainer.loss.state_dict().items()})


def spoil(trainer, objective, steps, value=torch.nan):
    """Multiply a term of the loss in some steps, counted from 1."""

    def hook(module, args, output):
        return output * value if module.training and trainer.state.global_step + 1 in steps else output

    trainer.loss.objectives[objective].register_forward_hook(hook)


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def logs(trainer, key):
    return [log[key] for log in trainer.state.log_history if key in log]


@pytest.mark.parametrize(
    ("accumulation", "value"), [pytest.param(1, torch.nan, marks=pytest.mark.slow), (2, torch.inf)]
)
def test_a_step_whose_loss_is_not_finite_changes_nothing(make_trainer, caplog, fault, accumulation, value):
    trainer = make_trainer(
        recipe="ppa",
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=8 // accumulation,
        logging_steps=2,
        save_strategy="no",
    )
    spoil(trainer, "moco", {2}, value)
    watch = Watch().bind(trainer)
    with caplog.at_level(logging.WARNING, logger="metaphrase"):
        result = trainer.train()
    before, first, second, third, _ = watch.weights
    assert same(first, second)  # the queue and the momentum encoder too
    assert not same(before, first)
    assert not same(second, third)
    assert "The loss of moco is NaN or infinite in step 2, which is skipped." in caplog.text
    assert logs(trainer, "skipped_steps") == [1, 1]
    alone, later = logs(trainer, "loss")
    assert result.training_loss == result.metrics["train_loss"] == logs(trainer, "train_loss")[0]
    assert result.training_loss == pytest.approx((alone + 2 * later) / 3, rel=1e-3)
    again = make_trainer(
        recipe="ppa",
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=8 // accumulation,
        max_steps=1,
        save_strategy="no",
    )
    again.train()
    assert alone == pytest.approx(logs(again, "loss")[0])  # the mean is that of the step that was made
    fault("B1", f"loss is {value}, {accumulation} micro-batches", tried=1, survived=1)


def test_a_gradient_that_is_not_finite_is_skipped_too(make_trainer, caplog, fault):
    trainer = make_trainer(save_strategy="no", max_grad_norm=0.0)
    weight = trainer.model[0].auto_model.encoder.layer[0].output.dense.weight
    weight.register_hook(lambda grad: grad * torch.inf if trainer.state.global_step == 1 else grad)
    watch = Watch().bind(trainer)
    trainer.train()
    assert same(watch.weights[1], watch.weights[2])
    assert not same(watch.weights[2], watch.weights[3])
    assert "A gradient, or the loss of another process, is NaN or infinite in step 2" in caplog.text
    fault("B1", "NaN or infinite gradient", tried=1, survived=1)


@pytest.mark.parametrize("recipe", ["dap", "ppa", "wacse"])
def test_states_that_overflow_in_half_precision_are_skipped(make_trainer, caplog, fault, recipe):
    """A layer's output passes through float16, whose largest number is 65,504, and comes back infinite."""
    trainer = make_trainer(recipe=recipe, save_strategy="no")

    def overflow(module, args, output):
        return (output * 1e8).half().to(output.dtype) if trainer.state.global_step == 1 else output

    trainer.model[0].auto_model.encoder.layer[0].output.dense.register_forward_hook(overflow)
    watch = Watch().bind(trainer)
    with caplog.at_level(logging.WARNING, logger="metaphrase"):
        trainer.train()
    assert same(watch.weights[1], watch.weights[2])
    assert not same(watch.weights[2], watch.weights[3])
    assert "is NaN or infinite in step 2, which is skipped." in caplog.text
    fault("B1", "hidden states that overflow in half precision", tried=1, survived=1)


def test_too_many_in_a_row_end_the_run(make_trainer, tmp_path, fault):
    trainer = make_trainer(max_steps=20, save_steps=2, max_skipped_steps=3)
    spoil(trainer, "rtl", {2, 3, *range(5, 21)})
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    assert "The loss of rtl is NaN or infinite in step 7. The 2 steps before it were skipped" in str(error.value)
    assert f"The last valid checkpoint is {tmp_path / 'run' / 'checkpoint-6'}." in str(error.value)
    assert trainer.state.global_step == 6
    fault("B1", "NaN or infinite losses from one step on", tried=1, survived=1)


@pytest.mark.long
def test_skipped_steps_are_counted_across_a_resume(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=2, save_steps=2)
    spoil(trainer, "tr", {1, 2})
    with pytest.raises(NonFiniteError, match="All 2 steps were skipped"):
        trainer.train()
    assert logs(trainer, "loss") == []
    assert [
        json.loads((p / "manifest.json").read_text())["skipped_in_a_row"] for p in checkpoint_folders(tmp_path / "run")
    ] == [2]
    resumed = make_trainer(max_steps=6, save_steps=2, max_skipped_steps=3)
    spoil(resumed, "tr", {3, 4})
    with pytest.raises(NonFiniteError, match=r"in step 3\. The 2 steps before it"):
        resumed.train(resume_from_checkpoint=True)
    third = make_trainer(max_steps=4, save_steps=2)
    third.train(resume_from_checkpoint=True)
    assert logs(third, "skipped_steps") == [1, 2, 2, 2]


def test_a_step_size_that_breaks_the_weights_is_not_written(make_trainer, tmp_path, fault):
    trainer = make_trainer(learning_rate=1e39, max_steps=2, save_steps=1, lr_scheduler_type="constant")
    with pytest.raises(NonFiniteError, match=r"contains NaN or infinite values, so the model is not written"):
        trainer.train()
    assert checkpoint_folders(tmp_path / "run") == []
    fault("B1", "learning rate that makes the weights diverge", tried=1, survived=1)


def scaled(trainer, overflowing):
    """Give a trainer float16's gradient scaler, and in some steps (from 1) gradients that are not finite."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    weight = trainer.model[0].auto_model.encoder.layer[0].output.dense.weight
    weight.register_hook(lambda grad: grad * torch.nan if trainer.state.global_step + 1 in overflowing else grad)


@pytest.mark.long
@pytest.mark.parametrize("optimiser", mostly_slow(["adamw_torch_fused", "adamw_torch"], ["adamw_torch_fused"]))
def test_a_scaler_that_never_finds_its_scale_ends_the_run(make_trainer, monkeypatch, fault, optimiser):
    monkeypatch.setattr("metaphrase.training.fault_tolerance.SCALE_SEARCH", 6)
    trainer = make_trainer(max_steps=20, save_steps=2, optim=optimiser)
    scaled(trainer, range(4, 21))
    with pytest.raises(NonFiniteError, match=r"gradients of step 9 are NaN or infinite in float16\. The 5 .*bf16"):
        trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**10
    fault("B1", f"NaN or infinite gradients with a gradient scaler ({optimiser})", tried=1, survived=1)


def test_a_scaler_may_look_for_its_scale(make_trainer, caplog, fault):
    """More steps in a row than other skipped ones may be, then one that is made, then as many again."""
    trainer = make_trainer(
        recipe="ppa", max_steps=16, save_strategy="no", max_skipped_steps=3, per_device_train_batch_size=4
    )
    scaled(trainer, {*range(1, 8), *range(9, 16)})
    watch = Watch().bind(trainer)
    trainer.train()
    moved = [not same(one, other) for one, other in itertools.pairwise(watch.weights)]
    queue = ("queue_qh", "pointer")
    weights = [{name: value for name, value in w.items() if not name.endswith(queue)} for w in watch.weights]
    made = [not same(one, other) for one, other in itertools.pairwise(weights)]
    assert [at for at, made in enumerate(made, 1) if made] == [8, 16]
    assert all(moved)  # batches join the queue
    assert logs(trainer, "skipped_steps")[-1] == 14
    fault("B1", "gradient scaler searching for its scale", tried=1, survived=1)


def test_overflows_in_a_row_are_counted_across_a_resume(make_trainer, monkeypatch):
    monkeypatch.setattr("metaphrase.training.fault_tolerance.SCALE_SEARCH", 6)
    trainer = make_trainer(max_steps=4, save_steps=4)
    scaled(trainer, range(1, 5))
    with pytest.raises(NonFiniteError, match="All 4 steps were skipped"):
        trainer.train()
    resumed = make_trainer(max_steps=20, save_steps=4)
    scaled(resumed, range(1, 21))
    with pytest.raises(NonFiniteError, match="gradients of step 6 are NaN or infinite in float16"):
        resumed.train(resume_from_checkpoint=True)


def test_a_run_in_float16_resumes_in_another_precision(make_trainer):
    trainer = make_trainer(max_steps=4, save_steps=2)
    scaled(trainer, {3, 4})
    trainer.train()
    assert (Path(trainer.args.output_dir) / "checkpoint-2" / "scaler.pt").is_file()
    resumed = make_trainer(max_steps=6, save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_run_whose_steps_are_all_skipped_releases_nothing(
    tmp_path, tiny_encoder_dir, bitext_path, capsys, monkeypatch, fault, value
):
    forward = TranslationRanking.forward
    monkeypatch.setattr(TranslationRanking, "forward", lambda *args: forward(*args) * value)
    output = tmp_path / "out"
    arguments = f"--model {tiny_encoder_dir} --recipe tr --corpus {bitext_path} --output_dir {output} --max_steps 3"
    options = "--per_device_train_batch_size 4 --use_cpu --report_to none --save_strategy no --freeze_word_embeddings"
    assert main(["train", *arguments.split(), *options.split()]) == 2
    assert "All 3 steps were skipped" in capsys.readouterr().err
    assert not list(output.rglob("*.safetensors"))
    assert not (output / "README.md").exists()
    fault("B1", "all steps skipped: nothing is released", tried=1, survived=1)


def test_no_steps_in_a_row_are_refused(make_trainer):
    with pytest.raises(
        ValueError, match="'max_skipped_steps' of AlignmentTrainingArguments must be a whole number from 1"
    ):
        make_trainer(max_skipped_steps=0)


def overflowing(model):
    """Make the states of a layer NaN; the weights are finite, so the model can be loaded."""
    model[0].auto_model.encoder.layer[0].register_forward_hook(lambda module, args, output: output * torch.nan)
    return model


@pytest.mark.parametrize("method", ["argmax", "itermax", "csls", "softmax"])
def test_states_that_are_not_finite_are_not_aligned(tiny_encoder, full_bitext, fault, method):
    for level in ("piece", "word"):
        aligner = EmbeddingAligner(overflowing(tiny_encoder), method=method, level=level)
        with pytest.raises(NonFiniteError, match=r"\d+ of \d+ embeddings are NaN or infinite"):
            add_alignment(Dataset.from_list(full_bitext), aligner, overwrite=True)
    fault("B1", "NaN embeddings in word alignment", tried=2, survived=2)


def test_logits_that_are_not_finite_are_not_aligned(tiny_bert_dir, fault):
    model = AutoModelForQuestionAnswering.from_pretrained(tiny_bert_dir)
    model.qa_outputs.bias.data[1] = torch.nan
    aligner = SpanAligner(model, AutoTokenizer.from_pretrained(tiny_bert_dir), max_length=64, stride=16)
    with pytest.raises(NonFiniteError, match="embeddings are NaN or infinite"):
        aligner.align([(Words.of("der Hund"), Words.of("the dog"))])
    fault("B1", "NaN embeddings in word alignment", tried=1, survived=1)


@pytest.mark.parametrize("command", ["align", "evaluate", "mine", "filter"])
def test_commands_write_nothing_from_embeddings_that_are_not_finite(
    tmp_path, tiny_encoder, bitext, capsys, monkeypatch, fault, command
):
    for module in ("aligners.embedding", "evaluation.suites.running", "mining.workflow", "mining.filtering"):
        monkeypatch.setattr(f"metaphrase.{module}.load_encoder", lambda *args, **kwargs: overflowing(tiny_encoder))
    monkeypatch.setattr("metaphrase.evaluation.suites.running._find_encoders", lambda *names: None)
    (tmp_path / "data").mkdir()
    pairs = tmp_path / "data" / "de-en.tsv"
    lines = "".join(f"{row['source']}\t{row['target']}\n" for row in bitext)
    pairs.write_text(f"source\ttarget\n{lines}", encoding="utf-8")
    for side in ("source", "target"):
        (tmp_path / f"news.{side[:2]}").write_text("".join(f"{row[side]}\n" for row in bitext), encoding="utf-8")
    out = ["-o", str(tmp_path / "out.tsv")]
    arguments = {
        "align": [str(pairs), "--aligner", "embedding", *out],
        "evaluate": ["x", "--data", str(pairs.parent), "--output_dir", str(tmp_path / "evaluation")],
        "mine": [str(tmp_path / "news.so"), str(tmp_path / "news.ta"), *out],
        "filter": [str(pairs), *out],
    }
    assert main([command, *arguments[command]]) == 2
    assert "NaN or infinite" in capsys.readouterr().err
    assert not (tmp_path / "out.tsv").exists()
    assert not list(tmp_path.rglob("results.json"))
    fault("B1", f"NaN embeddings: {command}", tried=1, survived=1)


class Normalised(Objective):
    """Its head changes its buffers in place."""

    name = "normalised"
    granularity = "sentence"

    def make_head(self, config, **settings):
        return torch.nn.BatchNorm1d(config.hidden_size)

    def forward(self, encodings):
        return self.head(encodings["source"].sentence_bh).pow(2).mean()


def test_buffers_that_a_failed_step_changes_in_place_are_restored(make_trainer, monkeypatch, tmp_path):
    monkeypatch.setitem(OBJECTIVES, "normalised", Normalised)
    recipe = tmp_path / "normalised.yaml"
    recipe.write_text("name: normalised\nterms: [{objective: normalised}]\n", encoding="utf-8")
    trainer = make_trainer(recipe=recipe, max_steps=3, save_strategy="no")
    norm = trainer.loss.heads.heads["normalised"]
    norm.register_forward_pre_hook(
        lambda module, args: (args[0] * torch.nan,) if trainer.state.global_step == 1 else None
    )
    trainer.train()
    assert logs(trainer, "skipped_steps")[-1] == 1
    assert norm.running_mean.isfinite().all()
    assert norm.num_batches_tracked == 2


def test_buffers_that_a_step_changed_before_memory_ran_out_are_restored():
    """The step that is repeated starts from the same running means, and counts once."""
    norm, seen = nn.BatchNorm1d(2), []
    encoder = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    loss = SimpleNamespace(heads=norm, micro_batch_size=None, model=[SimpleNamespace(auto_model=encoder)])

    def step():
        seen.append(norm.running_mean.clone())
        value = norm(torch.randn(4, 2)).sum()
        if len(seen) == 1:
            raise torch.OutOfMemoryError
        return value

    inputs = {"source": {"input_ids": torch.zeros(4, 3)}}
    settings = {"args": SimpleNamespace(world_size=1), "accumulating": False, "logged": {"train": {}}}
    repeat_within_memory(step, model=nn.Linear(2, 2), loss=loss, inputs=inputs, **settings)
    assert torch.equal(*seen)
    assert norm.num_batches_tracked == 1
    assert loss.micro_batch_size == 2
