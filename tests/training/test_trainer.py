import copy
import functools
import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from datasets import Dataset, DatasetDict, IterableDataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.base.sampler import DefaultBatchSampler, ProportionalBatchSampler
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.models.bert.modeling_bert import BertPooler

from metaphrase.encoders.adapters import add_lora
from metaphrase.exceptions import (
    AlignmentFormatError,
    CheckpointError,
    CorpusError,
    MemoryBudgetError,
    MissingExtraError,
    UsageError,
)
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.publishing.release import release, verify
from metaphrase.training.adaptation import Adaptation, AdaptationConfig
from metaphrase.training.arguments import AlignmentTrainingArguments, check_arguments, check_evaluation_batches
from metaphrase.training.callbacks import LoggingCallback
from metaphrase.training.configuration import RunConfig
from metaphrase.training.fault_tolerance import repeat_within_memory
from metaphrase.training.heads import AlignmentHeads
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe, list_recipes
from metaphrase.training.run import TrainingRun
from metaphrase.training.trainer import AlignmentTrainer
from tests.conftest import mostly_slow, small
from tests.processes import run_python


@pytest.fixture
def rows(full_bitext):
    return full_bitext


@pytest.fixture
def make_trainer(tiny_encoder, tmp_path, rows):
    def make(
        recipe="dap",
        *,
        dataset=None,
        folder="run",
        eval_dataset=None,
        evaluator=None,
        callbacks=(),
        lora_rank=None,
        **options,
    ):
        torch.manual_seed(7)
        loaded = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
        english_ids = torch.arange(len(tiny_encoder.tokenizer))
        facts = {"english_ids": english_ids, "languages": ["de", "en"]}
        encoder = copy.deepcopy(tiny_encoder)
        if lora_rank:
            add_lora(encoder, lora_rank)
        loss = AlignmentLoss(encoder, small(loaded), max_length=24, **facts)
        settings = {
            "output_dir": str(tmp_path / folder),
            "per_device_train_batch_size": 8,
            "max_steps": 6,
            "save_steps": 3,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "head_learning_rate": 2e-3,
            "warmup_steps": 0,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
        return AlignmentTrainer(
            model=loss.model,
            args=AlignmentTrainingArguments(**settings),
            train_dataset=dataset or Dataset.from_list(rows),
            loss=loss,
            eval_dataset=eval_dataset,
            evaluator=evaluator,
            callbacks=list(callbacks),
        )

    return make


def losses(trainer):
    return [
        (log["loss"], *(log[name] for name in trainer.loss.weights))
        for log in trainer.state.log_history
        if "loss" in log
    ]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.loss.state_dict().items()}


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


# One with heads, a queue, a teacher, and vectors of languages.
@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", mostly_slow([recipe.name for recipe in list_recipes()], ("dap", "ppa", "distill", "wacse-language"))
)
def test_a_resumed_run_is_the_uninterrupted_one(make_trainer, recipe, fault):
    whole = make_trainer(recipe)
    whole.train()
    resumed = make_trainer(recipe, folder="resumed")
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    assert len(losses(whole)) == 6
    assert losses(resumed) == losses(whole)
    assert_equal(weights(resumed), weights(whole))
    fault("A4", f"bit-exact resume: {recipe}", tried=1, survived=1)


@pytest.mark.slow
def test_a_resumed_run_with_hard_negatives_is_the_uninterrupted_one(make_trainer):
    terms = [{"objective": "tr", "args": {"negatives": 2, "direction": "symmetric", "guided": True}}]
    recipe = Recipe.from_dict({"name": "hard", "terms": terms})
    whole = make_trainer(recipe, micro_batch_size=4)
    whole.train()
    resumed = make_trainer(recipe, folder="resumed", micro_batch_size=4)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    assert losses(resumed) == losses(whole)
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.long
@pytest.mark.parametrize("recipe", mostly_slow(["tr", "dap", "ppa", "metaphrase"], ["dap"]))
def test_a_resumed_run_with_an_adapter_is_the_uninterrupted_one(make_trainer, recipe, fault):
    """The adapter is trained, the base model is not; a checkpoint is a complete encoder with the adapter beside it."""
    whole = make_trainer(recipe, lora_rank=2)
    before = weights(whole)
    whole.train()
    after = weights(whole)
    encoder = [name for name in after if name.startswith("model.") and not torch.equal(after[name], before[name])]
    assert encoder
    assert all(".lora_" in name for name in encoder)
    checkpoint = Path(whole.args.output_dir) / "checkpoint-3"
    resumed = make_trainer(recipe, folder="resumed", lora_rank=2)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(whole)
    assert_equal(weights(resumed), after)
    last = SentenceTransformer(str(checkpoint.with_name("checkpoint-6")), device="cpu")
    assert torch.allclose(
        *(model.encode(["der Hund"], convert_to_tensor=True) for model in (last, whole.model)), atol=1e-5
    )
    with pytest.raises(CheckpointError, match="differs in: adapters"):
        make_trainer(recipe, folder="other", lora_rank=4).train(resume_from_checkpoint=str(checkpoint))
    fault("A4", f"bit-exact resume with an adapter: {recipe}", tried=1, survived=1)


SCHEDULED = {
    "name": "scheduled",
    "terms": [{"objective": "tr"}, {"objective": "rtl", "weight": {"start": 0, "end": 1, "steps": 4}}],
}


@pytest.mark.long
def test_scheduled_weights_follow_the_steps_and_resume(make_trainer, fault):
    recipe = Recipe.from_dict(SCHEDULED)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    whole = make_trainer(recipe)
    weights_of_rtl = []

    class Weights(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            weights_of_rtl.append(whole.loss.weights["rtl"])

    whole.add_callback(Weights())
    whole.train()
    assert weights_of_rtl == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert [log["rtl"] == 0 for log in whole.state.log_history if "rtl" in log] == [True, *[False] * 5]
    resumed = make_trainer(recipe, folder="resumed")
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    assert losses(resumed) == losses(whole)
    assert_equal(weights(resumed), weights(whole))
    fault("A4", "bit-exact resume: a scheduled weight", tried=1, survived=1)


ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


class Died(Exception):
    pass


class Death(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step < 6:
            raise Died


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param("ppa", {}, id="queue", marks=pytest.mark.slow),
        pytest.param("ppa", ACCUMULATED, id="queue, gradient accumulation"),
        pytest.param("dap", ACCUMULATED, id="gradient accumulation", marks=pytest.mark.slow),
        pytest.param("dap", {"micro_batch_size": 4}, id="micro-batches", marks=pytest.mark.slow),
    ],
)
def test_two_resumes_in_a_row_are_the_uninterrupted_run(make_trainer, recipe, options, fault):
    """From the middle of the first pass over the data, and from its second pass."""
    options = {"max_steps": 6, "save_steps": 2, **options}
    whole = make_trainer(recipe, **options)
    whole.train()
    for last in (2, 4, 6):
        resumed = make_trainer(recipe, folder="resumed", **options)
        resumed.add_callback(Death(last))
        with pytest.raises(Died) if last < 6 else nullcontext():
            resumed.train(resume_from_checkpoint=last > 2)
    assert losses(resumed) == losses(whole)
    assert_equal(weights(resumed), weights(whole))
    what = ", ".join([recipe, *sorted(options.keys() & {"gradient_accumulation_steps", "micro_batch_size"})])
    fault("A4", f"bit-exact after two resumes: {what}", tried=1, survived=1)


@pytest.mark.long
def test_masks_after_a_resume_in_a_later_epoch_are_the_same(make_trainer):
    recipe = Recipe.from_dict(
        {
            "name": "r",
            "terms": [{"objective": "tr"}, {"objective": "rtl", "args": {"ratio": 0.6}}, {"objective": "tlm"}],
        }
    )
    whole = make_trainer(recipe, max_steps=8, save_steps=5)  # three steps an epoch
    whole.train()
    resumed = make_trainer(recipe, folder="resumed", max_steps=8, save_steps=5)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-5"))
    assert losses(resumed) == losses(whole)


@pytest.mark.slow
def test_batches_without_duplicates_resume_in_a_later_epoch(make_trainer):
    options = {"batch_sampler": "no_duplicates", "max_steps": 8, "save_steps": 5}  # three steps an epoch
    whole = make_trainer(**options)
    whole.train()
    resumed = make_trainer(folder="resumed", **options)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-5"))
    assert losses(resumed) == losses(whole)


def test_a_resumed_run_has_the_learning_rate_and_schedule_of_its_arguments(make_trainer):
    options = {"recipe": "tr", "max_steps": 4, "save_steps": 2, "weight_decay": 0.0}
    whole = make_trainer(**options)
    whole.train()
    changed = {"learning_rate": 1e-5, "max_steps": 5, "weight_decay": 0.1, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    resumed = make_trainer(folder="resumed", **options | changed)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    rates = [log["learning_rate"] for log in resumed.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.6e-5, 0.4e-5, 0.2e-5])
    groups = resumed.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}  # biases have none
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.9, 0.9), 1e-3)}


#: Schedules that depend on measurements. All scores are equal: from the second one on, they lower the learning rate.
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1}}
GREEDY = {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "min_lr": 0}}


def rates_after_resuming(make_trainer, before, after, dev="a"):
    """The learning rates of five steps, of which the last two are those of a resumed run; and its trainer."""
    options = {"recipe": "tr", "max_steps": 5, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"metric_for_best_model": "eval_score", "greater_is_better": False, "weight_decay": 0.0}
    whole = make_trainer(evaluator=Scores(), **options | before)
    whole.dev_digests = {"sw": "a"}
    whole.train()
    resumed = make_trainer(evaluator=Scores(), folder="resumed", **options | after)
    resumed.dev_digests = {"sw": dev}
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    return [log["learning_rate"] for log in resumed.state.log_history if "learning_rate" in log], resumed


@pytest.mark.parametrize("schedule", [PLATEAU, GREEDY])
@pytest.mark.parametrize(("metric", "mode"), [("eval_score", "max"), ("eval_loss", "min")])
def test_a_schedule_follows_a_metric_that_should_rise(make_trainer, schedule, metric, mode):
    trainer = make_trainer(evaluator=Scores(), eval_strategy="steps", metric_for_best_model=metric, **schedule)
    assert trainer.create_scheduler(4, trainer.create_optimizer()).mode == mode


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [(PLATEAU, [1e-3, 1e-3, 1e-4, 1e-7, 1e-8]), (GREEDY, [1e-3, 2e-3, 1e-3, 0.5e-5, 0.25e-5])],
)
def test_a_schedule_of_measurements_takes_the_settings_of_the_resumed_run(make_trainer, schedule, rates):
    changed = {"learning_rate": 1e-5, "head_learning_rate": 1e-4, "weight_decay": 0.1, "adam_beta2": 0.9}
    found, resumed = rates_after_resuming(make_trainer, schedule, schedule | changed)
    groups = resumed.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}  # biases have none
    assert {group["betas"] for group in groups} == {(0.9, 0.9)}
    assert found == pytest.approx(rates)


def test_a_schedule_of_measurements_may_change_its_factor(make_trainer):
    changed = PLATEAU | {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}}
    rates, _ = rates_after_resuming(make_trainer, PLATEAU, changed)
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5, 0.5e-5])


def test_the_best_model_is_selected_anew_with_other_evaluation_data(make_trainer, rows, caplog):
    def train(rows, **resuming):
        trainer = make_trainer(
            "tr",
            eval_dataset=Dataset.from_list(rows),
            eval_strategy="steps",
            eval_steps=3,
            metric_for_best_model="loss",
            learning_rate=0.0,
        )
        trainer.train(**resuming)
        return trainer.state.best_metric

    checkpoint = {"resume_from_checkpoint": True}
    small = train(rows[:4])
    assert train(rows[:4], **checkpoint) == small
    assert "What selects the best model differs" not in caplog.text
    assert train(rows[:8], **checkpoint) > small
    assert "What selects the best model differs" in caplog.text


def test_a_schedule_does_not_compare_scores_on_different_dev_sets(make_trainer):
    rates, _ = rates_after_resuming(make_trainer, PLATEAU, PLATEAU, dev="b")
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5, 1e-6])


@pytest.mark.parametrize(
    ("before", "after", "rates"),
    [
        (PLATEAU, {}, [1e-3, 1e-3, 1e-4, 0.4e-3, 0.2e-3]),
        ({}, PLATEAU, [1e-3, 0.8e-3, 0.6e-3, 1e-3, 1e-3]),
        (PLATEAU, GREEDY, [1e-3, 1e-3, 1e-4, 1e-3, 2e-3]),
    ],
)
def test_a_schedule_of_another_kind_starts_at_the_resumed_step(make_trainer, before, after, rates):
    found, _ = rates_after_resuming(make_trainer, before, after)
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
@pytest.mark.parametrize("kind", ["mixed", "language", "data sets"])
def test_the_seed_of_the_data_orders_them(make_trainer, rows, sampler, kind):
    def first_batch(seed):
        data = Dataset.from_list(rows)
        trainer = make_trainer(
            "tr",
            dataset=DatasetDict(a=data, b=data) if kind == "data sets" else data,
            data_seed=seed,
            batch_sampler=sampler,
            batches="language" if kind == "language" else "mixed",
        )
        return next(iter(trainer.get_train_dataloader()))["source"]["text"].tolist()

    assert first_batch(1) == first_batch(1) != first_batch(2)
    assert first_batch(42) == first_batch(None)


def test_the_duration_of_a_resumed_run_is_that_of_all_its_parts(make_trainer):
    class Long(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            whole._began -= 100

    options = {"recipe": "tr", "max_steps": 2, "save_steps": 1}
    whole = make_trainer(**options)
    whole.add_callback(Long())
    whole.train()
    resumed = make_trainer(folder="resumed", **options)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-1"))
    assert resumed.training_seconds >= 100  # rounded to a tenth; the steps themselves may take less


def test_data_without_a_whole_batch_are_refused(make_trainer, rows):
    same = Dataset.from_list([{**row, "target": "yes"} for row in rows])
    options = {"batch_sampler": "no_duplicates", "dataloader_drop_last": True}
    with pytest.raises(CorpusError, match="too few different pairs for a step of 1 × 8, so nothing was trained"):
        make_trainer("tr", dataset=same, **options).train()


def test_every_head_and_the_encoder_learn(make_trainer):
    trainer = make_trainer(warmup_steps=0)
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert all(("word_embeddings" in name and "layers" in name) or "token_type" in name for name in still), still


def test_heads_have_their_learning_rate(make_trainer):
    trainer = make_trainer()
    trainer.create_optimizer()
    heads = {id(p) for p in trainer.head_parameters()}
    for group in trainer.optimizer.param_groups:
        wanted = 2e-3 if heads & {id(p) for p in group["params"]} else 1e-3
        assert group["lr"] == wanted
    assert heads & {id(p) for p in trainer.optimizer.param_groups[-1]["params"]}


def test_an_own_class_of_optimizer_trains_the_heads(make_trainer):
    trainer = make_trainer(head_learning_rate=None)
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 0.5})
    before = copy.deepcopy(trainer.head_parameters())
    trainer.train()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.head_parameters(), strict=True))


def test_an_own_optimizer_without_the_heads_is_refused(make_trainer):
    trainer = make_trainer(head_learning_rate=None)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    with pytest.raises(UsageError, match=r"The optimiser lacks \d+ parameters of the objectives' heads"):
        trainer.train()
    trainer.optimizer = torch.optim.SGD(trainer.loss.parameters(), lr=0.5)
    trainer.args.head_learning_rate = 1e-3
    with pytest.raises(UsageError, match="head_learning_rate does not apply to your own optimiser"):
        trainer.train()
    trainer.args.head_learning_rate = None
    trainer.train()


def test_a_second_training_has_the_optimizer_of_the_first(make_trainer):
    trainer = make_trainer(max_steps=1)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    trainer.optimizer = torch.optim.SGD(trainer.loss.parameters(), lr=0.5)
    with pytest.raises(UsageError, match="head_learning_rate does not apply to your own optimiser"):
        trainer.train()


def test_the_learning_rate_of_heads_is_not_written_into_the_arguments(make_trainer):
    trainer = make_trainer(learning_rate_mapping={"embeddings": 1e-5})
    trainer.create_optimizer()
    assert trainer.args.learning_rate_mapping == {"embeddings": 1e-5}
    trainer.optimizer, trainer.args.head_learning_rate = None, 3e-3
    assert [group["lr"] for group in trainer.create_optimizer().param_groups[2:4]] == [3e-3, 3e-3]


def test_a_training_starts_without_gradients_and_terms_of_one_that_failed(make_trainer):
    class FailsOnce(TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            failed.remove_callback(self)
            raise RuntimeError("failed")

    options = {"max_steps": 1, "gradient_accumulation_steps": 2, "optim": "sgd", "max_grad_norm": 0.0}
    failed, new = make_trainer(callbacks=[FailsOnce()], **options), make_trainer(**options)
    with pytest.raises(RuntimeError, match="failed"):
        failed.train()
    for trainer in (failed, new):
        torch.manual_seed(0)
        trainer.train()
    assert_equal(weights(failed), weights(new))
    assert losses(failed) == losses(new)


def test_an_encoder_with_a_pooler_is_resumed_without_it(make_trainer, tiny_encoder):
    encoder = tiny_encoder[0].auto_model
    encoder.pooler = BertPooler(encoder.config)
    make_trainer("tr", max_steps=1, save_steps=1).train()
    resumed = make_trainer("tr", max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert len(losses(resumed)) == 2
    assert resumed.model[0].auto_model.pooler is None


def test_a_recipe_without_heads_takes_a_head_learning_rate_all_the_same(make_trainer):
    trainer = make_trainer("tr")
    assert not trainer.head_parameters()
    trainer.train()
    assert not (Path(trainer.args.output_dir) / "checkpoint-6" / "heads").exists()


def test_clipping_covers_the_heads(make_trainer):
    trainer = make_trainer(max_grad_norm=1e-3)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.training_step(trainer.model, batch)
    norm = trainer._clip_grad_norm(trainer.model)
    grads = [p.grad for p in trainer.loss.parameters() if p.grad is not None]
    assert norm > 1
    assert torch.stack([grad.norm() for grad in grads]).norm().item() == pytest.approx(1e-3, rel=1e-2)
    heads = torch.stack([p.grad.norm() for p in trainer.head_parameters() if p.grad is not None]).norm()
    assert 0 < heads < 1e-3


@pytest.mark.parametrize(("name", "norm"), [("dap", 1.0), ("dap-release", 8.0)])
def test_gradients_are_clipped_at_the_norm_of_the_recipe(make_trainer, name, norm):
    """Those of `dap-release` are eight times the gradients of the released code, which clips them at 1."""
    applied, recipe = [], Recipe.load(name)

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            grads = [p.grad for p in trainer.loss.parameters() if p.grad is not None]
            applied.append(torch.nn.utils.get_total_norm(grads).item())

    steep = replace(recipe, terms=tuple(replace(term, weight=1000.0) for term in recipe.terms))
    limit = RunConfig(recipe=name, paper_training=True).max_grad_norm
    trainer = make_trainer(steep, max_grad_norm=limit, max_steps=1, save_strategy="no")
    trainer.add_callback(Norms())
    trainer.train()
    assert applied == [pytest.approx(norm, rel=1e-3)]


def test_accumulated_micro_batches_are_one_batch(make_trainer, rows, tiny_encoder):
    """For an objective without in-batch negatives whose micro-batches hold equally many scored pieces."""
    same = Dataset.from_list([rows[0], rows[0], rows[0], rows[0]])
    recipe = Recipe.from_dict({"name": "r", "terms": [{"objective": "rtl"}]})
    tiny_encoder[0].auto_model.config.hidden_dropout_prob = 0.0
    results = []
    for batch, accumulation in ((4, 1), (1, 4)):
        trainer = make_trainer(
            recipe,
            dataset=same,
            folder=f"accumulate-{accumulation}",
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            max_grad_norm=0.0,
        )
        for module in trainer.loss.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer.train()
        results.append((weights(trainer), [log["loss"] for log in trainer.state.log_history if "loss" in log]))
    (one, loss), (four, accumulated) = results
    assert accumulated == pytest.approx(loss, rel=1e-5)
    before = make_trainer(recipe, dataset=same).loss.state_dict()
    assert max((one[name] - before[name]).abs().max() for name in one) > 1e-4
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=1e-4, atol=2e-5, msg=name)


def test_heads_switch_between_training_and_evaluation(make_trainer, rows):
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, max_steps=2, eval_dataset=Dataset.from_list(rows))
    trainer.loss.eval()
    modes = []
    trainer.loss.heads.heads["rtl"].register_forward_pre_hook(lambda module, args: modes.append(module.training))
    trainer.train()
    assert modes[:2] == [True, True]
    assert modes[2:] == [False] * 3


def test_other_processes_write_no_checkpoint(make_trainer, tmp_path, monkeypatch):
    """transformers saves in every process, and an adapter is written by the first alone."""
    trainer = make_trainer("tr", lora_rank=2)
    monkeypatch.setattr(AlignmentTrainingArguments, "should_save", False)
    trainer.save_model(str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


def test_a_saved_model_is_replaced_by_its_release(make_trainer, tmp_path):
    trainer, folder = make_trainer("tr"), tmp_path / "final"
    for _ in range(2):  # also a release
        trainer.save_model(str(folder))
        assert verify(release(trainer.model, folder, recipe=None)) < 1e-5


def test_a_model_that_is_saved_among_other_files_is_not_replaced(make_trainer, tmp_path):
    trainer, folder = make_trainer("tr"), tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").touch()
    trainer.save_model(str(folder))
    with pytest.raises(UsageError, match="which metaphrase did not write"):
        release(trainer.model, folder, recipe=None)


def test_streams_are_not_mixed(make_trainer, rows):
    with pytest.raises(UsageError, match="a dictionary that contains a stream, but only Datasets can be mixed"):
        make_trainer("tr", dataset={"de": streamed(rows)})


def test_a_stream_trains(make_trainer, rows):
    stream = IterableDataset.from_generator(lambda: iter(rows), features=Dataset.from_list(rows).features)
    trainer = make_trainer(dataset=stream)
    trainer.train()
    assert len(losses(trainer)) == 6


class InOrder(DefaultBatchSampler):
    """The pairs in their order."""

    def __iter__(self):
        rows = range(len(self.sampler))
        yield from (list(rows[at : at + self.batch_size]) for at in range(0, len(rows), self.batch_size))


@pytest.mark.parametrize(
    "sampler", [InOrder, lambda *args, **options: InOrder(*args, **options), functools.partial(InOrder)]
)
def test_a_run_with_an_own_sampler_is_saved_and_resumed(make_trainer, sampler):
    options = {"batch_sampler": sampler, "lr_scheduler_type": "constant"}
    make_trainer(**options, max_steps=3).train()
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    straight = make_trainer(**options, folder="straight")
    straight.train()
    assert losses(resumed) == losses(straight)
    with pytest.raises(CheckpointError, match="differs in: batch_sampler"):
        make_trainer().train(resume_from_checkpoint=True)


def test_a_run_with_an_own_sampler_of_data_sets_is_saved(make_trainer, rows):
    parts = {"a": Dataset.from_list(rows[:12]), "b": Dataset.from_list(rows[12:])}
    options = {"dataset": parts, "per_device_train_batch_size": 4}
    make_trainer(**options, max_steps=3, multi_dataset_batch_sampler=ProportionalBatchSampler).train()
    with pytest.raises(CheckpointError, match="differs in: multi_dataset_batch_sampler"):
        make_trainer(**options).train(resume_from_checkpoint=True)


def test_workers_start_and_return_batches_as_requested(make_trainer):
    trainer = make_trainer(
        dataloader_num_workers=1, dataloader_multiprocessing_context="spawn", dataloader_in_order=False
    )
    loader = trainer.get_train_dataloader()
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert not loader.in_order


def test_transformers_handler_of_signals_is_not_installed(make_trainer):
    handler = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(enable_jit_checkpoint=True, max_steps=1)
    assert signal.getsignal(signal.SIGTERM) == handler
    trainer.train()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_batches_that_are_too_few_for_a_step_leave_no_gradients(make_trainer, rows):
    """A stream of six batches has one step of four."""
    stream = IterableDataset.from_generator(lambda: iter(rows), features=Dataset.from_list(rows).features)
    trainer = make_trainer(
        "tr", dataset=stream, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2
    )
    step, pending = trainer.training_step, []

    def spied(model, *args):
        pending.append(any(parameter.grad is not None for parameter in model.parameters()))
        return step(model, *args)

    trainer.training_step = spied
    trainer.train()
    assert pending == 2 * [False, True, True, True]


def test_batches_without_duplicates_ignore_the_language_columns(make_trainer, rows):
    trainer = make_trainer(dataset=Dataset.from_list(rows * 2), batch_sampler="no_duplicates")
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == 6
    for batch in batches:
        assert len(set(batch["target"]["text"].tolist())) == 8


@pytest.mark.slow
def test_it_learns(make_trainer):
    trainer = make_trainer(max_steps=60, learning_rate=2e-3, logging_steps=5)
    trainer.train()
    (_, ranking, translation), *_, (_, last_ranking, last_translation) = losses(trainer)
    assert last_ranking < 0.95 * ranking
    assert last_translation < 0.85 * translation


def test_checkpoints_hold_heads_and_no_pooler(make_trainer):
    trainer = make_trainer()
    trainer.train()
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-6"
    assert AlignmentHeads.from_pretrained(checkpoint / "heads").config.objectives.keys() == {"tr", "rtl"}
    model = SentenceTransformer(str(checkpoint), device="cpu", model_kwargs={"add_pooling_layer": False})
    trainer.model.eval()
    assert (model.encode("ja") == trainer.model.encode("ja")).all()


def test_wrong_arguments_are_refused(make_trainer, tiny_encoder, tmp_path):
    with pytest.raises(ValueError, match="requires an AlignmentLoss, but got Identity"):
        AlignmentTrainer(model=tiny_encoder, loss=torch.nn.Identity())
    with pytest.raises(ValueError, match="trains without prompts"):
        make_trainer(prompts="query: ")
    with pytest.raises(UsageError, match="neftune_noise_alpha does not apply"):
        make_trainer(neftune_noise_alpha=5.0)
    with pytest.raises(UsageError, match="label_smoothing_factor does not apply"):
        make_trainer(label_smoothing_factor=0.1)
    with pytest.raises(UsageError, match="auto_find_batch_size does not apply"):
        make_trainer(auto_find_batch_size=True)
    with pytest.raises(
        UsageError, match="train_sampling_strategy does not apply to alignment, but is 'group_by_length'"
    ):
        make_trainer(train_sampling_strategy="group_by_length")
    with pytest.raises(UsageError, match="liger_kernel_config does not apply"):
        make_trainer(liger_kernel_config={"rope": True})
    with pytest.raises(UsageError, match="parallelism_config divides the weights or batches"):
        make_trainer(parallelism_config=ParallelismConfig())
    with pytest.raises(UsageError, match="no labels to group batches by"):
        make_trainer(batch_sampler="group_by_label")


@pytest.mark.parametrize(
    "options", [{"fsdp": "full_shard"}, {"fsdp": True}, {"deepspeed": '{"zero_optimization": {}}'}]
)
def test_divided_weights_are_refused_without_changing_the_process(tmp_path, options):
    environment = dict(os.environ)
    with pytest.raises(UsageError, match="FSDP and DeepSpeed divide the weights"):
        AlignmentTrainingArguments(str(tmp_path), use_cpu=True, **options)
    assert dict(os.environ) == environment


def test_divided_weights_of_accelerate_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match="FSDP and DeepSpeed divide the weights"):
        AlignmentTrainingArguments(str(tmp_path), use_cpu=True)


@pytest.mark.parametrize("pattern", ["(", 3])
def test_patterns_of_learning_rates_are_checked(tmp_path, pattern):
    with pytest.raises(UsageError, match=rf"the key {re.escape(repr(pattern))}, which is not a regular expression: "):
        AlignmentTrainingArguments(str(tmp_path), use_cpu=True, learning_rate_mapping={pattern: 1e-3})


def test_several_gpus_of_a_process_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(AlignmentTrainingArguments, "n_gpu", 2)
    monkeypatch.delattr("metaphrase.training.run.load_encoder")
    message = "2 GPUs are visible to one process"
    with pytest.raises(UsageError, match=message):
        TrainingRun(RunConfig(corpus=["sw-en.tsv"], output_dir=str(tmp_path / "run"))).execute()
    with pytest.raises(UsageError, match=message):
        Adaptation(AdaptationConfig(["sw-en.tsv"], ["sw"], output_dir=str(tmp_path / "sw"))).execute()


def test_a_loss_of_another_encoder_is_refused(tiny_encoder):
    """It would be trained in place of the model, which would not change."""
    loss = AlignmentLoss(copy.deepcopy(tiny_encoder), Recipe.load("tr"))
    with pytest.raises(UsageError, match="The loss belongs to another encoder"):
        AlignmentTrainer(model=tiny_encoder, loss=loss)
    with pytest.raises(UsageError, match="The loss belongs to another encoder"):
        AlignmentTrainer(model_init=lambda: tiny_encoder, loss=lambda encoder: loss)


def test_another_tokenizer_than_the_encoders_is_refused(tiny_encoder, tokenizer, tmp_path):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"))
    settings = {"args": AlignmentTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"), "loss": loss}
    AlignmentTrainer(tiny_encoder, processing_class=tiny_encoder.tokenizer, **settings)
    with pytest.raises(UsageError, match="`processing_class` is another tokenizer than the encoder's"):
        AlignmentTrainer(tiny_encoder, processing_class=tokenizer, **settings)


def test_data_of_other_types_are_refused(make_trainer, rows, tiny_encoder):
    with pytest.raises(UsageError, match=r"`train_dataset` must be a Dataset.* contains a list.*Dataset.from_list"):
        make_trainer(dataset=rows)
    with pytest.raises(UsageError, match="`eval_dataset` must be a Dataset"):
        make_trainer(eval_dataset={"de": rows})
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"))
    with pytest.raises(UsageError, match=r"`data_collator` must be a ParallelCollator.* but is a function"):
        AlignmentTrainer(model=tiny_encoder, loss=loss, data_collator=lambda rows: rows)
    collator = ParallelCollator(tiny_encoder.tokenizer, loss.views[:1])
    with pytest.raises(
        UsageError, match=r"does not build the view 'target', which the loss reads\. Pass it `loss.views`"
    ):
        AlignmentTrainer(model=tiny_encoder, loss=loss, data_collator=collator)
    data = Dataset.from_list(rows)
    with pytest.raises(UsageError, match="`train_dataset` is or contains a data set without rows"):
        make_trainer(dataset={"de": data, "fi": data.select([])})
    with pytest.raises(UsageError, match="`eval_dataset` is a dictionary without data sets"):
        make_trainer(eval_dataset=DatasetDict())
    with pytest.raises(UsageError, match=r"`train_dataset` is a stream without features.* features=Features"):
        make_trainer(dataset=IterableDataset.from_generator(lambda: iter(rows)))


def test_links_that_are_not_text_are_refused_before_training(make_trainer, rows):
    linked = Dataset.from_list([{**row, "alignment": [[0, 0], [1, 1]]} for row in rows])
    with pytest.raises(AlignmentFormatError, match="An alignment is text of the form '0-0 1-2', not"):
        make_trainer(recipe=Recipe.from_dict({"name": "wtr", "terms": [{"objective": "wtr"}]}), dataset=linked)


def test_a_split_for_validation_is_not_trained_on(make_trainer, rows):
    data = Dataset.from_list(rows)
    with pytest.raises(UsageError, match=r"`train_dataset` contains the split 'validation'.* `eval_dataset`"):
        make_trainer(dataset=DatasetDict(train=data, validation=data))
    make_trainer(dataset=DatasetDict(train=data, sw=data), eval_dataset=DatasetDict(validation=data))


@pytest.mark.parametrize("name", ["dataset", "eval_dataset"])
@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
def test_rows_without_a_batch_are_refused_before_training(make_trainer, rows, name, sampler):
    data = Dataset.from_list(rows)
    with pytest.raises(CorpusError, match=r"requires the columns 'source' and 'target', but \['source'\] is missing"):
        make_trainer(**{name: data.remove_columns("source")}, batch_sampler=sampler)
    with pytest.raises(CorpusError, match=r"'monolingual', which is missing.*Mix text in"):
        make_trainer("amber", **{name: {"de": data.remove_columns("monolingual")}}, batch_sampler=sampler)
    for kind in ("arrow", "pandas"):
        with pytest.raises(
            CorpusError, match=r"must be dictionaries, but are of type .*`dataset.with_format\(None\)`"
        ):
            make_trainer(**{name: data.with_format(kind)}, batch_sampler=sampler)


def test_tables_of_a_stream_are_refused(make_trainer, rows):
    trainer = make_trainer("tr", dataset=streamed(rows).with_format("arrow"))
    with pytest.raises(CorpusError, match=r"must be dictionaries, but are of type pyarrow\.lib\.Table"):
        trainer.train()


def test_another_trainer_is_refused(rows, tiny_encoder, tmp_path):
    args = SentenceTransformerTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    data = Dataset.from_list(rows).select_columns(["source", "target"])
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"))
    with pytest.raises(UsageError, match="Train with AlignmentTrainer"):
        SentenceTransformerTrainer(model=tiny_encoder, args=args, train_dataset=data, loss=loss).train()


def test_a_frozen_encoder_without_heads_is_refused(make_trainer):
    trainer = make_trainer("tr")
    trainer.model.requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        trainer.train()


def test_only_heads_are_trained_in_a_single_process(make_trainer, monkeypatch):
    trainer = make_trainer("dap", max_steps=2)
    trainer.model.requires_grad_(False)
    before = weights(trainer)
    trainer.train()
    changed = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert changed
    assert not any(name.startswith("model.") for name in changed)
    monkeypatch.setattr(AlignmentTrainingArguments, "world_size", 2)
    with pytest.raises(UsageError, match="Train only the heads of the objectives in a single process"):
        trainer.train()


@pytest.mark.parametrize("other", ["rows", "names", "sampler"])
def test_other_data_sets_are_not_resumed(make_trainer, rows, other):
    def trainer(parts, **options):
        data = DatasetDict({name: Dataset.from_list(part) for name, part in parts.items()})
        return make_trainer("tr", dataset=data, max_steps=2, save_steps=1, **options)

    parts = {"a": rows, "b": rows[:16]}
    trainer(parts).train()
    changed = {"rows": parts | {"b": rows[8:]}, "names": {"a": rows, "c": rows[:16]}}.get(other, parts)
    options = {"multi_dataset_batch_sampler": "round_robin"} if other == "sampler" else {}
    with pytest.raises(CheckpointError, match="multi_dataset_batch_sampler" if other == "sampler" else "corpus"):
        trainer(changed, **options).train(resume_from_checkpoint=True)


def test_a_checkpoint_with_more_steps_than_the_run_is_refused(make_trainer):
    make_trainer("tr", max_steps=3, save_steps=3).train()
    with pytest.raises(CheckpointError, match="has 3 steps, more than the 2 that these options train for"):
        make_trainer("tr", max_steps=2).train(resume_from_checkpoint=True)
    make_trainer("tr", max_steps=3).train(resume_from_checkpoint=True)


def test_a_resumed_run_logs_and_saves_as_configured(make_trainer):
    make_trainer("tr", max_steps=2, save_steps=1, logging_steps=1, save_total_limit=0).train()
    resumed = make_trainer("tr", max_steps=7, save_steps=3, logging_steps=2, save_total_limit=0)
    resumed.train(resume_from_checkpoint=True)
    saved = {int(path.name.partition("-")[2]) for path in Path(resumed.args.output_dir).glob("checkpoint-*")}
    assert saved == {1, 2, 3, 6, 7}
    assert [log["step"] for log in resumed.state.log_history if "loss" in log] == [1, 2, 4, 6]


def test_float16_without_a_gpu_is_disabled(tmp_path, caplog):
    args = AlignmentTrainingArguments(output_dir=str(tmp_path), fp16=True, use_cpu=True)
    assert not args.fp16
    assert "float16 requires a GPU: fp16 is disabled" in caplog.text


def test_a_checkpoint_without_an_optimizer_is_not_resumed(make_trainer):
    """The optimiser and the schedule would start anew."""
    make_trainer("tr", max_steps=2, save_steps=1, save_only_model=True).train()
    with pytest.raises(CheckpointError, match="written with save_only_model, so it has no optimiser"):
        make_trainer("tr", max_steps=2).train(resume_from_checkpoint=True)


class Scores(BaseEvaluator):
    primary_metric = "score"

    def __init__(self):
        super().__init__()
        self.steps = []

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        self.steps.append(steps)
        return {"score": 1.0}


class StopAt(TrainerCallback):
    """A signal within a step."""

    def __init__(self, trainer, step):
        self.trainer, self.step = trainer, step

    def on_substep_end(self, args, state, control, **kwargs):
        self.on_pre_optimizer_step(args, state, control)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.trainer._shutdown.received = signal.SIGTERM


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_run_whose_epochs_a_callback_stops_is_resumed_where_it_was(make_trainer, step):
    class StopEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 2

    whole, resumed = (make_trainer("tr", folder=name, max_steps=5, save_steps=1) for name in ("whole", "resumed"))
    for trainer in (whole, resumed):
        trainer.add_callback(StopEpoch())
    whole.train()
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{step}"))
    assert_equal(weights(resumed), weights(whole))


def test_a_longer_run_does_not_repeat_an_evaluation(make_trainer):
    options = {"recipe": "tr", "save_strategy": "epoch", "eval_strategy": "epoch"}
    first = make_trainer(evaluator=(before := Scores()), max_steps=3, **options)
    first.train()
    resumed = make_trainer(evaluator=(after := Scores()), max_steps=6, **options)
    resumed.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-3"))
    assert before.steps + after.steps == [3, 6]


def test_a_checkpoint_after_a_late_signal_is_written_to_the_held_folder_of_the_trial(make_trainer, monkeypatch):
    class Late(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            trainer._shutdown.received = signal.SIGTERM

    @contextmanager
    def hold():
        events.append("held")
        yield
        events.append("released")

    trial = pytest.importorskip("optuna").trial.FixedTrial({})
    trainer, events = make_trainer("tr", max_steps=1, save_strategy="no", callbacks=[Late()]), []
    monkeypatch.setattr(trainer, "hold_output_folder", hold)
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda model, trial: events.append(trial))
    with pytest.raises(SystemExit):
        trainer.train(trial=trial)
    assert events == ["held", trial, "released"]


def test_an_evaluation_that_is_made_up_for_is_that_of_the_uninterrupted_run(make_trainer, rows):
    """With the masks of its epoch, and the weights of its step."""
    terms = [{"objective": "tr"}, {"objective": "tlm", "weight": {"start": 0, "end": 1, "steps": 6}}]
    recipe = Recipe.from_dict({"name": "r", "terms": terms})
    options = {"recipe": recipe, "eval_dataset": Dataset.from_list(rows), "eval_strategy": "steps", "eval_steps": 4}
    whole = make_trainer(**options)  # three steps an epoch
    whole.train()
    stopped = make_trainer(folder="stopped", **options)
    stopped.add_callback(StopAt(stopped, 4))
    with pytest.raises(SystemExit):
        stopped.train()
    resumed = make_trainer(folder="stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    wanted, found = (
        [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log] for trainer in (whole, resumed)
    )
    assert found == wanted


def test_a_schedule_that_reads_the_metrics_resumes_after_an_evaluation_that_a_signal_skipped(make_trainer):
    options = {"recipe": "tr", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_score"}
    options |= {"lr_scheduler_type": "reduce_lr_on_plateau", "greater_is_better": False}
    options["lr_scheduler_kwargs"] = {"patience": 0, "factor": 0.1, "threshold": 0.9}
    whole = make_trainer(evaluator=Scores(), **options)
    whole.train()
    stopped = make_trainer(evaluator=Scores(), folder="stopped", **options)
    stopped.add_callback(StopAt(stopped, 4))
    with pytest.raises(SystemExit):
        stopped.train()
    resumed = make_trainer(evaluator=Scores(), folder="stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    rates = [[log["learning_rate"] for log in one.state.log_history if "loss" in log] for one in (whole, resumed)]
    assert rates[0] == rates[1]
    assert rates[0][0] > rates[0][-1]
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_run_that_a_signal_stops_at_its_last_evaluation_has_ended(make_trainer, strategy):
    """Early stopping ends it at the evaluation that the resumed run makes up for."""
    options = {"recipe": "tr", "max_steps": 12, "load_best_model_at_end": True, "metric_for_best_model": "eval_score"}
    options |= {"save_strategy": strategy, "eval_strategy": strategy, "eval_steps": 3}  # three steps an epoch
    options["callbacks"] = [EarlyStoppingCallback(early_stopping_patience=1)]
    first = make_trainer(evaluator=Scores(), **options)
    first.add_callback(StopAt(first, 6))
    with pytest.raises(SystemExit):
        first.train()
    resumed = make_trainer(evaluator=(after := Scores()), **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert after.steps == [6]


def streamed(rows, parts=1):
    return Dataset.from_list(rows).to_iterable_dataset(num_shards=parts)


@pytest.mark.parametrize("kind", ["stream", "map"])
@pytest.mark.parametrize("stop", [None, 3, 4])
def test_epochs_are_evaluated_once(make_trainer, rows, kind, stop):
    """A run of three steps an epoch is resumed from a checkpoint after step 3, with its evaluation, or without it."""
    options = {"recipe": "tr", "max_steps": 6, "save_strategy": "epoch", "eval_strategy": "epoch"}
    options["dataset"] = streamed(rows) if kind == "stream" else None
    first = make_trainer(evaluator=(before := Scores()), **options)
    if stop is not None:
        first.add_callback(StopAt(first, stop))
    with nullcontext() if stop is None else pytest.raises(SystemExit):
        first.train()
    last = 3 if stop is None else stop
    resumed = make_trainer(evaluator=(after := Scores()), **options)
    resumed.train(resume_from_checkpoint=str(Path(first.args.output_dir) / f"checkpoint-{last}"))
    assert [step for step in before.steps if step <= last] + after.steps == [3, 6]


@pytest.mark.parametrize(
    ("recipe", "named"), [("dap", "tr"), ("amber", "sa"), ("mgc-hard", "sentence-contrast"), ("wacse", "tr")]
)
def test_a_batch_without_negatives_is_refused(make_trainer, fault, recipe, named):
    with pytest.raises(UsageError, match=rf"^{named} compares the pairs .* a batch of 1 has no other.*at least 2"):
        make_trainer(recipe, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    fault("B3", f"a batch of one pair ({recipe})", tried=1, survived=1)


@pytest.mark.parametrize("kind", [Dataset, DatasetDict])
def test_a_single_pair_without_negatives_is_refused(make_trainer, rows, fault, kind):
    single = Dataset.from_list(rows[:1])
    dataset = single if kind is Dataset else DatasetDict(several=Dataset.from_list(rows), single=single)
    with pytest.raises(UsageError, match=r"^tr compares .* `train_dataset` .* a single pair, whose loss is always 0"):
        make_trainer("tr", dataset=dataset)
    with pytest.raises(UsageError, match=r"^tr compares .* `eval_dataset` .* a single pair, whose loss is always 0"):
        make_trainer("tr", eval_dataset=dataset)
    make_trainer("ppa", dataset=dataset, eval_dataset=dataset)
    fault("B3", "a single pair", tried=1, survived=1)


@pytest.mark.parametrize(("recipe", "batches"), [("tr", 2), ("ppa", 3)])
@pytest.mark.parametrize("kind", ["mixed", "language"])
def test_a_last_batch_of_a_single_pair_is_dropped_if_its_negatives_are_missing(
    make_trainer, rows, recipe, batches, kind
):
    data = Dataset.from_list([{**row, "source_lang": "de", "target_lang": "en"} for row in rows[:17]])
    trainer = make_trainer(recipe, dataset=data, eval_dataset=data, per_device_eval_batch_size=8, batches=kind)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert len(loader) == len(list(loader)) == batches


def test_evaluation_data_without_a_whole_batch_are_refused(make_trainer, rows):
    data = Dataset.from_list(rows[:7])
    make_trainer(eval_dataset=data)
    with pytest.raises(UsageError, match="a data set with 7 pairs, which do not fill a batch of 8"):
        make_trainer(eval_dataset={"a": Dataset.from_list(rows[:8]), "b": data}, dataloader_drop_last=True)
    trainer = make_trainer("tr", eval_dataset=streamed(rows[:7]), dataloader_drop_last=True)
    with pytest.raises(CorpusError, match=r"evaluation data have no pairs, or too few for a batch.* which is 8"):
        trainer.evaluate()


def test_the_terms_of_an_evaluation_are_those_of_its_data(make_trainer, rows):
    trainer = make_trainer("tr", eval_dataset=Dataset.from_list(rows[:8]))
    trainer.predict(Dataset.from_list(rows[:4]))
    trainer.evaluate()
    logged = trainer.state.log_history[-1]
    assert logged["eval_tr"] == pytest.approx(logged["eval_loss"], abs=1e-3)


def test_an_evaluation_leaves_no_trace_in_the_random_state(make_trainer, rows):
    trainer = make_trainer("tr", eval_dataset=Dataset.from_list(rows[:8]))
    before = torch.get_rng_state()
    trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_terms_of_an_evaluation_are_means_over_its_pairs(make_trainer, rows):
    def evaluated(rows):
        trainer = make_trainer("tr", eval_dataset=Dataset.from_list(rows))
        loss = trainer.evaluate()["eval_loss"]
        assert trainer.state.log_history[-1]["eval_tr"] == pytest.approx(loss, abs=1e-4)
        return loss

    first, last, both = (evaluated(part) for part in (rows[:8], rows[8:11], rows[:11]))
    assert both == pytest.approx((8 * first + 3 * last) / 11, abs=1e-5)


def test_the_terms_of_each_evaluation_data_set_are_logged(make_trainer, rows):
    data = {"first": Dataset.from_list(rows[:8]), "second": Dataset.from_list(rows[8:24])}
    trainer = make_trainer("tr", eval_dataset=data)
    assert "eval_first_tr" not in trainer.evaluate()  # like `eval_tr`
    for name, logged in zip(data, trainer.state.log_history[-2:], strict=True):
        assert logged[f"eval_{name}_tr"] == pytest.approx(logged[f"eval_{name}_loss"], abs=1e-3)
        assert "eval_steps" not in logged


def test_an_evaluation_batch_without_negatives_is_refused(make_trainer, rows):
    settings = {"eval_dataset": Dataset.from_list(rows), "per_device_eval_batch_size": 1}
    with pytest.raises(UsageError, match=r"^tr compares .* an evaluation batch of 1 has no other.*at least 2"):
        make_trainer("tr", **settings)
    make_trainer("ppa", **settings)
    make_trainer("tr", per_device_eval_batch_size=1)


def test_processes_do_not_divide_the_files_of_an_evaluation_stream(make_trainer, rows, monkeypatch):
    """They would evaluate different numbers of batches. Of a single file, all read all rows."""
    trainer = make_trainer("tr")
    monkeypatch.setattr(AlignmentTrainingArguments, "world_size", 2)
    check_evaluation_batches(streamed(rows), trainer.args, trainer.loss.objectives)
    with pytest.raises(UsageError, match=r"a stream of 3 parts.* 2 processes.* without streaming"):
        check_evaluation_batches(streamed(rows, parts=3), trainer.args, trainer.loss.objectives)


@pytest.mark.parametrize("recipe", ["ppa", "mexma"])
def test_what_needs_no_other_pairs_may_have_a_batch_of_one(make_trainer, recipe):
    trainer = make_trainer(recipe, per_device_train_batch_size=1, max_steps=2)
    trainer.train()
    assert all(loss > 0 for loss, *_ in losses(trainer))


def test_negatives_of_other_processes_do(make_trainer, monkeypatch):
    trainer = make_trainer("tr")
    trainer.args.per_device_train_batch_size = 1
    monkeypatch.setattr(AlignmentTrainingArguments, "world_size", 2)
    check_arguments(trainer.args, trainer.loss.objectives)
    trainer.loss.objectives["tr"].gather = False
    with pytest.raises(UsageError, match="a batch of 1 has no other"):
        check_arguments(trainer.args, trainer.loss.objectives)


def test_a_release_for_each_language_is_not_pushed_by_checkpoints(make_trainer, monkeypatch):
    monkeypatch.setattr(AlignmentTrainer, "init_hf_repo", lambda *args, **kwargs: pytest.fail("the Hub was asked"))
    with pytest.raises(UsageError, match=r"push_to_hub cannot push .*one release per language.*metaphrase push"):
        make_trainer("wacse-language", push_to_hub=True, hub_model_id="me/it")


def digest(checkpoint):
    files = [checkpoint / "model.safetensors", checkpoint / "heads" / "model.safetensors"]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tiny_encoder_dir, bitext_path, tmp_path):
    def run(folder, die_at):
        done = run_python("-m", "tests.training_script", tiny_encoder_dir, bitext_path, tmp_path / folder, die_at)
        return done.returncode, done.stdout + done.stderr

    status, output = run("undisturbed", "none")
    assert status == 0, output
    status, output = run("killed", "6")  # by SIGKILL, in its sixth step
    assert status == -signal.SIGKILL, output
    assert (tmp_path / "killed" / "checkpoint-4").is_dir()
    assert not (tmp_path / "killed" / "checkpoint-8").exists()
    status, output = run("killed", "none")
    assert status == 0, output
    assert digest(tmp_path / "killed" / "checkpoint-8") == digest(tmp_path / "undisturbed" / "checkpoint-8")


@pytest.mark.slow
def test_two_ranks_end_their_passes_together(tiny_encoder_dir, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for at in range(3):  # one rank reads two files, 10 batches, the other one, 5: in groups of two
        rows = "".join(f"satz {at} {i} hier\tsentence {at} {i} here\n" for i in range(20))
        (corpus / f"de-en.{at}.tsv").write_text(f"source\ttarget\n{rows}")
    script = Path(__file__).parents[1] / "uneven_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    command += [str(tiny_encoder_dir), str(corpus), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"<(\d+) (\w+)>", done.stdout)
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0][0] == "5"


@pytest.mark.slow
def test_two_ranks_hold_the_same_heads(tiny_encoder_dir, bitext_path, tmp_path, fault):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--master_port",
            "29617",
            "-m",
            "tests.two_ranks",
            str(tiny_encoder_dir),
            str(bitext_path),
            str(tmp_path),
        ],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    for name, value in ranks[0]["after"].items():
        assert torch.equal(value, ranks[1]["after"][name]), name
    for recipe in list_recipes():
        moved = [
            name
            for name, value in ranks[0]["after"].items()
            if name.startswith(f"{recipe.name}:") and not torch.equal(value, ranks[0]["before"][name])
        ]
        assert any(":model." in name for name in moved), recipe.name
        has_heads = any(name.startswith(f"{recipe.name}:heads.") for name in ranks[0]["after"])
        assert has_heads == any(":heads." in name for name in moved), recipe.name
    gathered, whole = ranks[0]["gathered"], ranks[0]["whole"]
    assert max(value.abs().max() for value in whole.values()) > 0
    same = [torch.allclose(value, whole[name], rtol=1e-9, atol=1e-12) for name, value in gathered.items()]
    fault("F4", "gradient over two ranks equals that of the whole batch", tried=len(same), survived=sum(same))


@pytest.mark.long
@pytest.mark.parametrize("recipe", mostly_slow(["dap", "ppa"], ["ppa"]))
def test_where_memory_runs_out_the_step_is_made_again_in_smaller_parts(make_trainer, recipe, caplog, fault):
    options = {"max_steps": 4, "save_steps": 4, "packing": False}
    plain = make_trainer(recipe, folder="plain", micro_batch_size=4, **options)
    plain.train()
    tight = make_trainer(recipe, folder="tight", **options)

    def allocate(module, args):
        if len(args[0]) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    tight.model[0].auto_model.encoder.register_forward_pre_hook(allocate)
    with caplog.at_level("WARNING", logger="metaphrase"):
        tight.train()
    said = [record.args[0] for record in caplog.records if "Out of memory" in record.msg]
    assert said == [8, 4]  # of 16 rows: two sides, or queries beside concatenations
    losses_of = [[log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer in (plain, tight)]
    same = losses_of[1] == pytest.approx(losses_of[0], rel=1e-4)
    fault("E1", f"out of memory: smaller micro-batches, same loss ({recipe})", tried=1, survived=same)
    if recipe == "ppa":  # a batch joined the queue once, however often its step was made
        queues = [trainer.alignment_loss.heads.heads["moco"].pointer for trainer in (plain, tight)]
        assert queues[0] == queues[1] == 32 % 20


def test_a_repeated_micro_batch_counts_once_in_the_log(make_trainer):
    trainer = make_trainer("tr", max_steps=2, logging_steps=2)
    backward, calls = trainer.accelerator.backward, []

    def fail_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("MPS backend out of memory (not really)")
        backward(*args, **kwargs)

    trainer.accelerator.backward = fail_once
    trainer.train()
    ((loss, term),) = losses(trainer)
    assert len(calls) == 3
    assert term == pytest.approx(loss, abs=1e-4)


def test_memory_that_runs_out_behind_pending_gradients_ends_the_run(make_trainer, fault):
    trainer = make_trainer(gradient_accumulation_steps=2, packing=False)
    calls = []

    def allocate(module, args):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    trainer.model[0].auto_model.encoder.register_forward_pre_hook(allocate)
    with pytest.raises(MemoryBudgetError, match=r"Out of memory with 16 rows.*--micro_batch_size 8"):
        trainer.train()
    fault("E1", "out of memory with accumulated gradients", tried=1, survived=1)


def test_memory_that_runs_out_at_one_row_is_explained(make_trainer, fault):
    trainer = make_trainer("ppa", per_device_train_batch_size=1, packing=False)

    def allocate(module, args):
        raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    trainer.model[0].auto_model.encoder.register_forward_pre_hook(allocate)
    with pytest.raises(MemoryBudgetError, match=r"^Out of memory with one row at a time\. Shorten the sentences"):
        trainer.train()
    fault("E1", "out of memory at one row", tried=1, survived=1)


def test_memory_that_runs_out_with_a_decoder_is_explained(make_trainer):
    trainer = make_trainer(packing=False)
    encoder = trainer.model[0].auto_model
    encoder.config.is_encoder_decoder, encoder.decoder = True, torch.nn.Identity()

    def allocate(module, args):
        raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    encoder.encoder.register_forward_pre_hook(allocate)
    with pytest.raises(
        MemoryBudgetError, match=r"^Out of memory with 16 rows\. Encoders with a decoder, such as bert"
    ):
        trainer.train()


def test_memory_that_runs_out_in_one_of_several_processes_is_explained(make_trainer, monkeypatch, fault):
    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    trainer = make_trainer(packing=False)
    monkeypatch.setattr(AlignmentTrainingArguments, "world_size", 2)
    batch = next(iter(trainer.get_train_dataloader()))
    with pytest.raises(
        MemoryBudgetError, match=r"with 16 rows at a time in process 0; .* Resume with --micro_batch_size 8:"
    ):
        repeat_within_memory(
            fails,
            model=trainer.model,
            loss=trainer.loss,
            inputs=batch,
            args=trainer.args,
            accumulating=False,
            logged=trainer.accum_loss_components,
        )
    fault("E1", "out of memory in one of several processes", tried=1, survived=1)


def test_other_errors_are_not_taken_for_memory(make_trainer):
    trainer = make_trainer(packing=False)
    trainer.model[0].auto_model.encoder.register_forward_pre_hook(
        lambda *args: (_ for _ in ()).throw(RuntimeError("boom"))
    )
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()


def test_the_micro_batch_of_a_loss_is_kept_unless_the_arguments_set_one(tiny_encoder, tmp_path):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"))
    loss.micro_batch_size = 4
    for size, used in ((None, 4), (2, 2)):
        args = AlignmentTrainingArguments(str(tmp_path), micro_batch_size=size, use_cpu=True, report_to="none")
        AlignmentTrainer(tiny_encoder, args, loss=loss)
        assert loss.micro_batch_size == used


def test_a_micro_batch_of_nothing_is_refused(make_trainer):
    with pytest.raises(
        ValueError, match="'micro_batch_size' of AlignmentTrainingArguments must be a whole number from 1"
    ):
        make_trainer(micro_batch_size=0)


def test_the_batch_of_all_processes_is_divided_among_them(tmp_path, monkeypatch):
    arguments = AlignmentTrainingArguments(output_dir=str(tmp_path), effective_batch_size=96)
    assert arguments.per_device_train_batch_size == 96
    monkeypatch.setattr(AlignmentTrainingArguments, "world_size", 4)
    arguments = AlignmentTrainingArguments(output_dir=str(tmp_path), effective_batch_size=96)
    assert arguments.per_device_train_batch_size == 24
    with pytest.raises(UsageError, match=r"a multiple of the number of processes \(4\)"):
        AlignmentTrainingArguments(output_dir=str(tmp_path), effective_batch_size=98)


@pytest.mark.parametrize("able", [False, True])
def test_bfloat16_is_off_where_the_processor_has_no_instructions_for_it(tmp_path, monkeypatch, caplog, able):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": able})
    arguments = AlignmentTrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True)
    assert arguments.bf16 is able
    assert ("bf16 is disabled" in caplog.text) is not able


def test_ligers_kernel_is_asked_for_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("metaphrase.training.arguments.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[liger\]"):
        AlignmentTrainingArguments(output_dir=str(tmp_path), use_liger_kernel=True)


def test_adamw_is_fused(tmp_path):
    assert AlignmentTrainingArguments(output_dir=str(tmp_path)).optim == "adamw_torch_fused"


def searching(encoder, loss, rows, tmp_path, *, max_steps, **options):
    """A trainer for hyperparameter search."""
    args = AlignmentTrainingArguments(
        str(tmp_path / "search"),
        max_steps=max_steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Dataset.from_list(rows)
    return AlignmentTrainer(
        model_init=lambda: copy.deepcopy(encoder), loss=loss, args=args, train_dataset=data, **options
    )


@pytest.mark.long
def test_trials_of_a_search_share_no_weights(tiny_encoder, rows, tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rates, starts = [1e-2, 1e-3, 1e-2], []

    def loss(encoder):
        made = AlignmentLoss(encoder, Recipe.load("dap"), max_length=24)
        starts.append([weight.detach().clone() for weight in made.parameters()])
        return made

    class Evaluator(BaseEvaluator):
        primary_metric = "moved"

        def __call__(self, model, output_path=None, epoch=-1, steps=-1):
            assert model is trainer.alignment_loss.model
            ends = zip(trainer.alignment_loss.parameters(), starts[-1], strict=True)
            self.moved.append(sum(float((end.detach() - start).abs().sum()) for end, start in ends))
            return {"moved": self.moved[-1]}

    evaluator = Evaluator()
    evaluator.moved = []
    trainer = searching(tiny_encoder, loss, rows, tmp_path, max_steps=2, evaluator=evaluator)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {
            "learning_rate": rates[trial.number],
            "head_learning_rate": trial.suggest_float("head_learning_rate", 1e-3, 1e-3),
        },
        compute_objective=lambda metrics: metrics["eval_moved"],
        direction="minimize",
        backend="optuna",
        n_trials=3,
    )
    assert best.run_id == "1"
    first, second, third = evaluator.moved
    assert first == third > second > 0
    assert all(torch.equal(a, b) for start in starts[2:] for a, b in zip(start, starts[1], strict=True))
    with pytest.raises(UsageError, match="pass a function as `loss`"):
        AlignmentTrainer(model_init=lambda: tiny_encoder, loss=loss(tiny_encoder))


def test_a_search_has_no_collator_of_its_own(tiny_encoder, rows, tmp_path):
    """It would build the views of another trial's loss."""
    collator = ParallelCollator(tiny_encoder.tokenizer, AlignmentLoss(tiny_encoder, Recipe.load("tr")).views)
    with pytest.raises(
        UsageError, match="every trial builds the views of its own loss, so `data_collator` does not apply"
    ):
        searching(tiny_encoder, lambda encoder: None, rows, tmp_path, max_steps=1, data_collator=collator)


def test_a_trial_is_built_with_its_own_arguments(tiny_encoder, rows, tmp_path):
    """Not with those of the previous trial: its seed is that of new heads and of masks."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seeds, found = [3, 5], []

    def loss(encoder):
        made = AlignmentLoss(encoder, Recipe.load("tr"), max_length=24)
        found.append([torch.initial_seed()])
        return made

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            found[-1] += [trainer.data_collator.seed, trainer.alignment_loss.micro_batch_size]

    options = {"eval_dataset": Dataset.from_list(rows), "callbacks": [Watch()]}
    trainer = searching(tiny_encoder, loss, rows, tmp_path, max_steps=1, **options)
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"seed": seeds[trial.number], "micro_batch_size": 6 + trial.number},
        compute_objective=lambda metrics: 0.0,
        backend="optuna",
        n_trials=2,
    )
    assert found[1:] == [[3, 3, 6], [5, 5, 7]]


def test_a_trial_is_checked_and_divides_its_batch(tiny_encoder, rows, tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trials, sizes = [{"effective_batch_size": 6}, {"neftune_noise_alpha": 5.0}], []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            sizes.append(args.train_batch_size)

    def loss(encoder):
        return AlignmentLoss(encoder, Recipe.load("tr"), max_length=24)

    trainer = searching(tiny_encoder, loss, rows, tmp_path, max_steps=1, callbacks=[Watch()], evaluator=Scores())
    with pytest.raises(UsageError, match="neftune_noise_alpha does not apply to alignment"):
        trainer.hyperparameter_search(
            hp_space=lambda trial: trials[trial.number],
            compute_objective=lambda metrics: 0.0,
            backend="optuna",
            n_trials=2,
        )
    assert sizes == [6]


def test_evaluation_losses_have_the_final_weights(make_trainer, rows):
    """Otherwise, the checkpoint with the smallest weight would be the best."""
    weight = {"start": 0, "end": 1, "steps": 6}
    recipe = Recipe.from_dict({"name": "r", "terms": [{"objective": "tr", "weight": weight}]})
    trainer = make_trainer(recipe, eval_dataset=Dataset.from_list(rows), learning_rate=0.0)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert before > 0
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_loss_that_is_always_0_is_reported(make_trainer, caplog, rate):
    recipe = Recipe.from_dict({"name": "r", "terms": [{"objective": "tlm", "args": {"mask_rate": rate}}]})
    make_trainer(recipe, max_steps=2, save_strategy="no").train()
    assert ("The loss was 0 in all 2 steps, so nothing was learned" in caplog.text) == (rate == 0)


def test_a_log_without_values_has_no_line(caplog):
    """As at the end of a run that is resumed after its last step."""
    state = SimpleNamespace(is_local_process_zero=True, global_step=8)
    with caplog.at_level(logging.INFO, logger="metaphrase"):
        for logs in ({"train_runtime": 0.1, "epoch": 0.2}, {"loss": 1.0}):
            LoggingCallback().on_log(None, state, None, logs)
    assert caplog.messages == ["step 8: loss 1"]
