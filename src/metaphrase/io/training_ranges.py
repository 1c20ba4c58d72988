"""Ranges of the numbers among the training arguments of transformers and sentence-transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from typing import Annotated, Any, Literal, get_type_hints

from metaphrase.exceptions import MissingExtraError, UsageError, WorkerError
from metaphrase.io.arguments import (
    AtLeast0,
    BelowOne,
    Count,
    CountOr0,
    Positive,
    Range,
    Seed,
    Share,
    check_values,
    hints_of,
)
from metaphrase.io.configuration import did_you_mean, plain

#: Options that are JSON objects on the command line.
JSON_OBJECTS = (
    "accelerator_config",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "learning_rate_mapping",
    "lr_scheduler_kwargs",
)

#: What ``optim_args`` sets for optimisers that ignore other names. Parameter groups override its weight decay.
OPTIM_ARGS: dict[str, set[str]] = {
    "sgd": {"momentum", "dampening", "nesterov"},
    "adagrad": {"lr_decay", "eps"},
    "rmsprop": {"momentum", "alpha", "eps", "centered"},
    **{name: set() for name in ("adamw_torch", "adamw_torch_fused", "adafactor")},
}


class TrainingRanges:
    """Mixed in before a class of training arguments, whose annotations these replace. It adds no fields."""

    per_device_train_batch_size: Count
    per_device_eval_batch_size: Count
    gradient_accumulation_steps: Count
    num_train_epochs: Annotated[float, Range(above=0, most=1_000_000)]
    max_steps: Annotated[int, Range(-1, 2**31 - 1)]
    learning_rate: AtLeast0
    learning_rate_mapping: str | None | dict[str, AtLeast0]  # noqa: RUF036 - the order that HfArgumentParser reads
    warmup_steps: AtLeast0
    warmup_ratio: Share | None
    weight_decay: AtLeast0
    adam_beta1: BelowOne
    adam_beta2: BelowOne
    adam_epsilon: Annotated[float, Range(above=0, most=1)]
    max_grad_norm: AtLeast0
    label_smoothing_factor: BelowOne
    neftune_noise_alpha: AtLeast0 | None
    torch_empty_cache_steps: Count | None
    logging_steps: Positive
    eval_steps: Positive | None
    eval_delay: AtLeast0
    eval_accumulation_steps: Count | None
    save_steps: Positive
    save_total_limit: CountOr0 | None
    seed: Seed
    data_seed: Seed | None
    dataloader_num_workers: Annotated[int, Range(0, 1024)]
    dataloader_prefetch_factor: Count | None
    ddp_bucket_cap_mb: Count | None
    ddp_timeout: Count
    hub_strategy: Literal["every_save", "end"]  # the others push optimiser states, but only releases are pushed
    parallelism_config: None  # not supported
    local_rank: Annotated[int, Range(-1, 2**31 - 1)]

    def __post_init__(self) -> None:
        """Check the arguments, convert NumPy's numbers to Python's, and connect the processes of ``torchrun``.

        Raises:
            UsageError: A value is invalid, or two values contradict each other.
            MissingExtraError: The optimiser requires a package that is not installed.
            WorkerError: The processes cannot be connected.
        """
        vars(self).update(plain(vars(self)))
        _parse_objects(vars(self))
        check_values(hints_of(type(self)), vars(self), type(self).__name__)
        if self.max_steps == 0:
            raise UsageError(
                "max_steps is 0, so nothing would be trained. Set it to at least 1, or omit it to train for num_train_epochs."
            )
        given: Any = self
        if given.dataloader_persistent_workers and self.dataloader_num_workers == 0:
            raise UsageError(
                "dataloader_persistent_workers keeps worker processes, but dataloader_num_workers is 0. Set it to at least "
                "1, or omit dataloader_persistent_workers."
            )
        if _processes() == 1:
            given.ddp_backend = None  # transformers would require the other processes
        try:
            super().__post_init__()  # type: ignore[misc]
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
        except RuntimeError as error:
            if _processes() == 1:
                raise
            reason, address = str(error).partition("\n")[0], os.environ.get("MASTER_ADDR")
            raise WorkerError(
                f"The processes of this run could not be connected: {reason}. MASTER_ADDR is {address} and MASTER_PORT "
                f"{os.environ.get('MASTER_PORT')}. Check that the first process runs there, that the port is free and "
                "can be reached, and that each process has a GPU of its own, or none. torchrun sets these variables."
            ) from error
        check_schedule(self)
        _check_optimizer(self)


def _parse_objects(values: dict[str, Any]) -> None:
    """Parse the options that are JSON objects in text. ``accelerator_config`` may also be a file."""
    from accelerate.utils import GradientAccumulationPlugin
    from transformers.trainer_pt_utils import AcceleratorConfig

    for name in JSON_OBJECTS:
        given = values.get(name)
        if given not in (None, "") and (name != "accelerator_config" or str(given).startswith("{")):
            values[name] = _json_object(given, name)
    config = values["accelerator_config"] if isinstance(values["accelerator_config"], dict) else {}
    _check_keys("accelerator_config", config, AcceleratorConfig())
    name = "gradient_accumulation_kwargs of accelerator_config"
    accumulation = _json_object(config.get("gradient_accumulation_kwargs") or {}, name)
    _check_keys(name, accumulation, GradientAccumulationPlugin())


def _check_keys(name: str, given: Mapping[str, Any], config: Any) -> None:
    """Refuse keys that a dataclass does not have."""
    known = [one.name for one in fields(config)]
    for key in given:
        if key not in known:
            raise UsageError(f"{name} has an unknown key {key!r}{did_you_mean(str(key), known)}.")


def _json_object(given: Any, name: str) -> Mapping[str, Any]:
    try:
        value, reason = json.loads(given) if isinstance(given, str) else given, ""
    except ValueError as error:
        value, reason = None, f" ({error})"
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a JSON object, such as '{{\"name\": 0.5}}', but is {given!r}{reason}.")
    return value


def check_schedule(arguments: Any) -> None:
    """Refuse arguments of the learning rate schedule that are missing, unknown or invalid.

    Raises:
        UsageError: The schedule cannot be built; the message lists the arguments that it has.
    """
    import torch
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

    kind, given = arguments.lr_scheduler_type, dict(arguments.lr_scheduler_kwargs or {})
    steps = max(arguments.max_steps, 1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=arguments.learning_rate)
    try:
        get_scheduler(kind, optimizer, arguments.get_warmup_steps(steps), steps, given)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        own = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs"}
        names = [name for name in signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters if name not in own]
        hint = (
            f"Set lr_scheduler_kwargs to a JSON object with {', '.join(names)}." if names else "Correct or omit them."
        )
        raise UsageError(
            f"lr_scheduler_type is {kind.value!r} and lr_scheduler_kwargs {given}, which cannot be used: {error}. {hint}"
        ) from error


def _check_optimizer(arguments: Any) -> None:
    """Refuse an optimiser whose package is not installed, or whose arguments are invalid or ignored."""
    import torch
    from transformers import Trainer

    name = arguments.optim.value
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Module())
    except ImportError as error:
        raise MissingExtraError(f"The optimiser {name!r} cannot be used: {error}") from error
    except (TypeError, ValueError) as error:
        if not arguments.optim_target_modules:  # which are looked for in the model
            raise UsageError(
                f"optim is {name!r} and optim_args {arguments.optim_args!r}, which cannot be used: {error}. Correct or omit "
                "them."
            ) from error
    given = {word.partition("=")[0].strip() for word in (arguments.optim_args or "").split(",")} - {""}
    known = OPTIM_ARGS.get(name, given)
    if ignored := sorted(given - known):
        raise UsageError(
            f"optim_args has {', '.join(ignored)}, but the optimiser {name!r} takes {', '.join(sorted(known)) or 'none'}. "
            "learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon are options themselves."
        )


def select_device(arguments: Any) -> None:
    """Set ``use_cpu`` where there is no GPU and transformers requires it: in bfloat16, and with several processes."""
    import torch

    if (arguments.bf16 or _processes() > 1) and not torch.accelerator.is_available():
        arguments.use_cpu = True


def _processes() -> int:
    """The number of processes that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


TRAINING_RANGES = get_type_hints(TrainingRanges, include_extras=True)
