"""Training arguments whose mistakes are reported before training."""

import json
import re
import socket

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from transformers.trainer_utils import HubStrategy

from metaphrase import AlignmentTrainingArguments
from metaphrase.cli import main
from metaphrase.exceptions import MissingExtraError, UsageError, WorkerError
from metaphrase.training.adaptation import AdaptationConfig
from metaphrase.training.configuration import RunConfig


def test_numbers_of_numpy_become_numbers_of_python(tmp_path):
    settings = {
        "max_steps": np.int64(3),
        "seed": np.int32(7),
        "micro_batch_size": np.int64(4),
        "learning_rate": np.float32(0.5),
        "learning_rate_mapping": {"bias": np.float64(0.25)},
        "save_steps": np.int64(1),
    }
    configs = [RunConfig(output_dir=str(tmp_path), **settings), AlignmentTrainingArguments(str(tmp_path), **settings)]
    configs.append(AdaptationConfig(["a.tsv"], ["sw"], seed=settings["seed"], minutes=np.float32(2.5)))
    for config in configs:
        assert not any(isinstance(value, np.generic) for value in vars(config).values())
    for config in configs[:2]:
        assert (config.max_steps, config.learning_rate, config.learning_rate_mapping) == (3, 0.5, {"bias": 0.25})
    assert json.loads(configs[1].to_json_string())["seed"] == 7
    assert configs[2].minutes == 2.5
    with pytest.raises(UsageError, match=r"'seed' of AlignmentTrainingArguments must be a whole number .*, but is -1"):
        AlignmentTrainingArguments(str(tmp_path), seed=np.int64(-1))


@pytest.mark.parametrize(
    ("schedule", "given", "message"),
    [
        (
            "warmup_stable_decay",
            None,
            "'num_decay_steps'. Set lr_scheduler_kwargs to a JSON object with num_decay_steps, ",
        ),
        ("warmup_stable_decay", {"num_decay_steps": "x"}, "{'num_decay_steps': 'x'}, which cannot be used: "),
        ("cosine_with_min_lr", None, " with num_cycles, min_lr, min_lr_rate."),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "Only one of min_lr or min_lr_rate"),
        ("linear", {"power": 2}, "unexpected keyword argument 'power'. Correct or omit them."),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused(tmp_path, schedule, given, message):
    settings = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": given}
    with pytest.raises(UsageError, match=re.escape(message)):
        AlignmentTrainingArguments(str(tmp_path), use_cpu=True, **settings)


@pytest.mark.parametrize(
    ("schedule", "given"),
    [
        ("warmup_stable_decay", {"num_decay_steps": 100}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2.0}),
        *[(name, None) for name in ("linear", "cosine", "polynomial", "constant", "inverse_sqrt")],
    ],
)
def test_a_schedule_with_its_arguments_is_accepted(tmp_path, schedule, given):
    settings = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": given, "warmup_steps": 10}
    assert AlignmentTrainingArguments(str(tmp_path), use_cpu=True, **settings).lr_scheduler_type == schedule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_kwargs": "{bad"}, "lr_scheduler_kwargs must be a JSON object, .* but is '{bad' \\(Expecting "),
        ({"learning_rate_mapping": "[1]"}, r"learning_rate_mapping must be a JSON object, .* but is '\[1\]'\."),
        ({"lr_scheduler_kwargs": [1]}, r"lr_scheduler_kwargs must be a JSON object, .* but is \[1\]\."),
        (
            {"learning_rate_mapping": '{"bias": -1}'},
            r"'learning_rate_mapping' .* keys and values, each a number of at least 0, but is {'bias': -1}",
        ),
        ({"activation_checkpointing_kwargs": "bad"}, "activation_checkpointing_kwargs must be a JSON object"),
        ({"accelerator_config": '{"even_batch": 1}'}, "unknown key 'even_batch' .did you mean 'even_batches'"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_step": 2}}},
            "gradient_accumulation_kwargs of accelerator_config has an unknown key 'num_step' .did you mean 'num_steps'",
        ),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": 2}},
            "gradient_accumulation_kwargs of accelerator_config must be a JSON object, .* but is 2",
        ),
        ({"dataloader_persistent_workers": True}, "dataloader_num_workers is 0. Set it to at least 1"),
        (
            {"optim": "sgd", "optim_args": "momentum"},
            "optim is 'sgd' and optim_args 'momentum', which cannot be used: ",
        ),
        (
            {"optim": "sgd", "optim_args": "momentum=0.9, momentu=0.8"},
            "optim_args has momentu, but the optimiser 'sgd' takes dampening, momentum, nesterov",
        ),
        (
            {"optim": "adafactor", "optim_args": "relative_step=True"},
            "optim_args has relative_step, but the optimiser 'adafactor' takes none",
        ),
        ({"hub_strategy": "checkpoint"}, "'hub_strategy' .* must be one of 'every_save', 'end', but is 'checkpoint'"),
    ],
)
def test_what_would_fail_in_training_is_refused_by_name(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        AlignmentTrainingArguments(str(tmp_path), use_cpu=True, **options)


def test_json_objects_are_accepted_as_text(tmp_path):
    options = {"learning_rate_mapping": '{"bias": 0.5}', "accelerator_config": '{"even_batches": false}'}
    arguments = AlignmentTrainingArguments(str(tmp_path), use_cpu=True, **options)
    assert arguments.learning_rate_mapping == {"bias": 0.5}
    assert not arguments.accelerator_config.even_batches


def test_the_arguments_of_an_optimiser_are_accepted(tmp_path):
    options = {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True"}
    assert AlignmentTrainingArguments(str(tmp_path), use_cpu=True, **options).optim == "sgd"


@pytest.mark.parametrize("strategy", ["end", HubStrategy.END])
def test_releases_are_pushed_by_strategy(tmp_path, strategy):
    arguments = AlignmentTrainingArguments(str(tmp_path), use_cpu=True, hub_strategy=strategy)
    assert arguments.hub_strategy == HubStrategy.END


def test_a_process_alone_joins_no_others(tmp_path):
    arguments = AlignmentTrainingArguments(str(tmp_path), use_cpu=True, ddp_backend="gloo")
    assert arguments.world_size == 1


def test_an_optimiser_whose_package_is_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    with pytest.raises(MissingExtraError, match=r"optimiser 'adamw_8bit' cannot be used: .*pip install"):
        AlignmentTrainingArguments(str(tmp_path), use_cpu=True, optim="adamw_8bit")


def test_a_file_has_no_division_among_processes(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("parallelism_config: {tp_size: 2}\n")
    assert main(["train", "--config", str(tmp_path / "c.yaml")]) == 2
    assert "'parallelism_config' must be null, but is {'tp_size': 2}" in capsys.readouterr().err


def test_the_command_reports_it_as_wrong_usage(tmp_path, capsys):
    (tmp_path / "sw-en.tsv").write_text("source\ttarget\nmaji\twater\n")
    words = ["train", "--corpus", str(tmp_path / "sw-en.tsv"), "--output_dir", str(tmp_path / "out")]
    assert main([*words, "--lr_scheduler_type", "warmup_stable_decay"]) == 2
    assert "missing 1 required positional argument: 'num_decay_steps'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_processes_that_cannot_be_connected_are_explained(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (port := server.getsockname()[1])}
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        message = rf"could not be connected: .* MASTER_ADDR is 127\.0\.0\.1 and MASTER_PORT {port}\. Check that"
        try:
            with pytest.raises(WorkerError, match=message):
                AlignmentTrainingArguments(str(tmp_path), use_cpu=True, ddp_backend="gloo")
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
