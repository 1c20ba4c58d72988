"""Training arguments."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from accelerate.utils import parse_flag_from_env
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from torch import nn
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
    is_azureml_available,
    is_flytekit_available,
)

from metaphrase.exceptions import MissingExtraError, UsageError
from metaphrase.io.arguments import AtLeast0, Count, Range
from metaphrase.io.configuration import did_you_mean, option
from metaphrase.io.counts import counted
from metaphrase.io.environment import install_command
from metaphrase.io.training_ranges import TrainingRanges, select_device
from metaphrase.modeling.precision import usable_bfloat16
from metaphrase.objectives import Objective
from metaphrase.training.recipe import Batches
from metaphrase.training.sampling import parts_of

logger = logging.getLogger(__name__)

#: Arguments of the parent classes that would have no effect, with their default.
WITHOUT_EFFECT: dict[str, Any] = {
    "neftune_noise_alpha": None,
    "label_smoothing_factor": 0.0,
    "train_sampling_strategy": "random",
    "include_num_input_tokens_seen": "no",
    "router_mapping": {},
    "liger_kernel_config": None,
    "auto_find_batch_size": False,
    "label_names": None,
    "include_for_metrics": [],
    "batch_eval_metrics": False,
    "fp16_full_eval": False,  # would convert the weights, also those of the release
    "bf16_full_eval": False,
}

#: Kinds of distributed training that divide the weights, as in the environment that `accelerate launch` sets.
DIVIDING = ("FSDP", "DEEPSPEED")
#: Trackers that transformers may not list although they are installed: their packages, and the functions that look for these.
UNLISTED_TRACKERS = {
    "azure_ml": ("azureml-sdk", is_azureml_available),
    "flyte": ("flytekit", is_flytekit_available),
}


@dataclass
class AlignmentTrainingArguments(TrainingRanges, SentenceTransformerTrainingArguments):
    """Training arguments of sentence-transformers, extended for alignment.

    Attributes:
        head_learning_rate: Learning rate of the objectives' heads; None uses ``learning_rate``.
        weight_decay_toward: ``"zero"``, or ``"start"``: weight decay pulls the encoder toward its weights at the start of
            training, of which it holds a copy; heads still decay toward zero.
        packing: Run the encoder without padding if it supports this, and unless ``torch_compile`` is set, which would compile
            it for each combination of lengths.
        effective_batch_size: Number of pairs that are ranked against each other, over all processes. Sets
            ``per_device_train_batch_size``.
        micro_batch_size: Number of rows (sentences of either side) per encoder call; None encodes all views of a batch
            together. ``per_device_train_batch_size`` remains the batch that is ranked: the gradient is the same, for less
            memory and one more forward pass. If a step runs out of memory, the value is set or halved automatically and
            the step is repeated.
        batches: ``"mixed"``, or ``"language"``: all pairs of a batch are in the same languages, so that the language of a
            sentence does not give its translation away. ``"shared_target"``: pairs with the same target come together, for
            objectives that treat them as positives of each other.
        max_skipped_steps: Number of consecutive steps with a NaN or infinite loss or gradient after which training fails.
            Such a step is skipped and counted in the log as ``skipped_steps``. With float16, at least 20 steps are
            allowed, because the gradient scaler searches for its scale.
        resume_from_checkpoint: Checkpoint that :class:`metaphrase.TrainingRun` resumes; ``"true"`` resumes the last valid
            one, if there is one. With :class:`AlignmentTrainer`, pass the checkpoint to ``train()``.
        allow_changes: Resume a checkpoint even if recipe, encoder, data, batches or seed have changed.
        restore_callback_states_from_checkpoint: On by default, so that early stopping continues to count.
        bf16: Disabled with a warning on CPUs without bfloat16 instructions, where it is slower than float32. With None,
            :class:`metaphrase.TrainingRun` uses it on a CPU where a trial step is faster with it.
        use_liger_kernel: Compute the vocabulary loss with Liger's kernel, on CUDA (extra ``liger``).
        lr_scheduler_kwargs: The mode of ``reduce_lr_on_plateau`` and ``greedy`` is ``"max"`` by default if
            ``greater_is_better`` is true.
        logging_nan_inf_filter: Off by default, because steps with a NaN or infinite loss are skipped and counted.
        enable_jit_checkpoint: Has no effect: SIGTERM ends training with a checkpoint in any case.
        dataloader_pin_memory: On by default if there is a CUDA device.
        ddp_timeout: A day by default: the other processes wait while the first one measures, merges and releases.
        dataloader_timeout: Number of seconds to wait for a batch from worker processes; 0 waits forever.
    """

    head_learning_rate: AtLeast0 | None = option(
        None, "Learning rate of the objectives' heads; default: learning_rate."
    )
    weight_decay_toward: Literal["zero", "start"] = option(
        "zero", "What --weight_decay pulls the encoder's weights toward. zero, or start: their values before training."
    )
    packing: bool = option(
        True, "Run the encoder without padding: faster, with the same result. Has no effect with --torch_compile."
    )
    effective_batch_size: Count | None = option(
        None, "Pairs ranked against each other, over all processes; replaces the batch size per device."
    )
    micro_batch_size: Count | None = option(
        None,
        "Rows per encoder call, with the gradient of the whole batch; chosen automatically if a step runs out of "
        "memory.",
    )
    batches: Batches = option(
        "mixed",
        "Pairs of a batch. mixed: of all languages; language: of one, with harder negatives; shared_target: pairs with the "
        "same target together, for 'tr' with 'positives: shared_target'.",
    )
    bf16: bool | None = option(
        False,
        "Compute in bfloat16, if the device supports it. In a YAML file, null uses it on a CPU if a trial step is faster.",
    )
    resume_from_checkpoint: str | None = option(
        None, "Checkpoint to resume; true resumes the last valid one of the output folder, if there is one."
    )
    max_skipped_steps: Count = option(
        5, "Fail after this many consecutive steps with a NaN or infinite loss or gradient; each is skipped."
    )
    restore_callback_states_from_checkpoint: bool = option(
        True, "Resume the state of callbacks too, such as the patience of early stopping."
    )
    allow_changes: bool = option(
        False, "Resume a checkpoint of another recipe, encoder, corpus, batch size, seed or number of processes."
    )
    logging_nan_inf_filter: bool = option(False, "Hide NaN and infinite losses from the log.")
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin memory in data loaders."}
    )
    ddp_timeout: Count = option(
        86_400, "Seconds that a process waits for the others, which may measure and release meanwhile."
    )
    dataloader_timeout: Annotated[float, Range(0, 1_000_000)] = option(
        600.0, "Seconds after which a data loader worker that returns no batch is considered hung; 0 waits forever."
    )

    def __post_init__(self) -> None:
        self._refuse_divided_weights()
        self.enable_jit_checkpoint = False  # before and after training, its handler would ignore SIGTERM
        self.bf16 = bool(self.bf16)
        select_device(self)
        self.bf16 = usable_bfloat16(wanted=self.bf16, on_cpu=self.use_cpu)
        if getattr(self, "fp16", False) and self.use_cpu:
            logger.warning("float16 requires a GPU: fp16 is disabled. On a CPU, use --bf16.")
            self.fp16 = False
        super().__post_init__()
        self.divide_batch()
        self._check_patterns()
        if self.use_liger_kernel and find_spec("liger_kernel") is None:
            raise MissingExtraError(
                f"use_liger_kernel requires liger-kernel, which is not installed: {install_command('liger')}."
            )
        # With a stream, rank 0 would otherwise read for all ranks and slice tensors without a batch axis (links, queues).
        if self.accelerator_config.dispatch_batches is None:
            self.accelerator_config.dispatch_batches = False

    @property
    def learning_rate_of_heads(self) -> float:
        """``head_learning_rate``, or ``learning_rate`` if it is None."""
        return self.learning_rate if self.head_learning_rate is None else self.head_learning_rate

    def _refuse_divided_weights(self) -> None:
        """Refuse FSDP and DeepSpeed, before transformers reads their configuration or enables them for the whole process."""
        if self.parallelism_config is not None:
            raise UsageError(
                "parallelism_config divides the weights or batches among processes in a way that the objectives do not "
                "support. Omit it: torchrun starts one process per GPU."
            )
        if self.fsdp or self.deepspeed or any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in DIVIDING):
            raise UsageError(
                "FSDP and DeepSpeed divide the weights among processes, but the objectives and the clipping of their "
                "gradients require all weights in every process. Omit these options: torchrun starts one process per GPU."
            )

    def _check_patterns(self) -> None:
        """Refuse keys of ``learning_rate_mapping`` that are not regular expressions."""
        for pattern in self.learning_rate_mapping or ():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise UsageError(
                    f"learning_rate_mapping has the key {pattern!r}, which is not a regular expression: {error}. Escape "
                    "special characters of parameter names with a backslash."
                ) from error

    def divide_batch(self) -> None:
        """Divide ``effective_batch_size``, if it is set, among the processes."""
        if self.effective_batch_size is None:
            return
        size, rest = divmod(self.effective_batch_size, self.world_size)
        if rest or size < 1:
            raise UsageError(
                f"effective_batch_size must be a multiple of the number of processes ({self.world_size}), but is "
                f"{self.effective_batch_size}."
            )
        self.per_device_train_batch_size = size


def check_devices(args: AlignmentTrainingArguments) -> None:
    """Refuse several GPUs for one process."""
    if args.n_gpu > 1:
        raise UsageError(
            f"{args.n_gpu} GPUs are visible to one process. Start one process per GPU with torchrun, or select one with "
            "CUDA_VISIBLE_DEVICES=0."
        )


def check_arguments(args: AlignmentTrainingArguments, objectives: Mapping[str, Objective]) -> None:
    """Refuse arguments that do not support these objectives."""
    check_devices(args)
    if args.prompts:
        raise UsageError("Alignment trains without prompts. Remove `prompts` from the training arguments.")
    for name, usual in WITHOUT_EFFECT.items():
        if getattr(args, name) != usual:
            raise UsageError(f"{name} does not apply to alignment, but is {getattr(args, name)!r}. Omit it.")
    if args.batch_sampler == BatchSamplers.GROUP_BY_LABEL:
        raise UsageError(
            "A bitext has no labels to group batches by. Set batch_sampler to 'no_duplicates', or omit it."
        )
    _check_shared_targets(args, objectives)
    size = args.per_device_train_batch_size
    if ranking := _ranking_nothing(objectives, size, args.world_size):
        raise UsageError(
            f"{ranking} compares the pairs of a batch with each other, but a batch of {size} has no other "
            "pairs, so nothing is learned. Gradient accumulation does not add any. Set per_device_train_batch_size, or "
            "effective_batch_size, to at least 2, preferably 32 or more. If memory is short, set micro_batch_size as well."
        )


def _ranking_nothing(objectives: Mapping[str, Objective], size: int, processes: int) -> str:
    """The objectives whose negatives are the other pairs of the batch, if a batch of this size has no other pairs."""
    return ", ".join(
        name
        for name, objective in objectives.items()
        if objective.in_batch_negatives and size * (processes if objective.gather else 1) < 2
    )


def check_negatives(dataset: Any, name: str, objectives: Mapping[str, Objective]) -> None:
    """Refuse data with a single pair for objectives whose negatives are the other pairs of the batch."""
    ranking = _ranking_nothing(objectives, 1, processes=1)
    if ranking and any(isinstance(part, Dataset) and len(part) < 2 for part in parts_of(dataset)):
        raise UsageError(
            f"{ranking} compares the pairs of a batch with each other, but `{name}` is or contains a data set with a "
            "single pair, whose loss is always 0. Add pairs."
        )


def check_evaluation_batches(
    dataset: Any, args: AlignmentTrainingArguments, objectives: Mapping[str, Objective]
) -> None:
    """Refuse evaluation data whose loss is always 0, that do not fill a batch, or that processes cannot divide evenly."""
    check_negatives(dataset, "eval_dataset", objectives)
    size, processes = args.per_device_eval_batch_size, args.world_size
    if dataset is not None and (ranking := _ranking_nothing(objectives, size, processes)):
        raise UsageError(
            f"{ranking} compares the pairs of a batch with each other, but an evaluation batch of {size} has no "
            "other pairs, so its loss is always 0. Set per_device_eval_batch_size to at least 2."
        )
    size *= processes
    for part in parts_of(dataset):
        if isinstance(part, IterableDataset) and 1 < processes <= part.num_shards:
            raise UsageError(
                f"`eval_dataset` is a stream of {part.num_shards} parts, which would be divided among {processes} "
                "processes, but all must evaluate the same number of batches. Load the evaluation data without streaming."
            )
        if args.dataloader_drop_last and isinstance(part, Dataset) and len(part) < size:
            raise UsageError(
                f"`eval_dataset` is or contains a data set with {counted(len(part), 'pair')}, which do not fill a batch of "
                f"{size}, and incomplete batches are dropped, as always with several processes. Lower "
                "per_device_eval_batch_size, or add pairs."
            )


def check_trainable(encoder: nn.Module, heads: Sequence[nn.Parameter], *, processes: int) -> None:
    """Refuse to train nothing, or only heads in several processes, which divide the batches of the encoder."""
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        return
    if not heads:
        raise UsageError(
            "All parameters of the encoder are frozen and the objectives have none, so there is nothing to train. "
            "Set requires_grad of some parameters to True."
        )
    if processes > 1:
        raise UsageError(
            "All parameters of the encoder are frozen. Train only the heads of the objectives in a single process, without "
            "torchrun."
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    heads: Sequence[nn.Parameter],
    args: AlignmentTrainingArguments,
    *,
    is_own: bool,
) -> None:
    """Refuse the caller's own optimiser if it does not train the heads, or not at their learning rate."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if missing := sum(id(parameter) not in known for parameter in heads):
        raise UsageError(
            f"The optimiser lacks {counted(missing, 'parameter')} of the objectives' heads, which would not be trained. "
            "Create it with the parameters of the loss, `loss.parameters()`, not of the encoder only."
        )
    if is_own and args.head_learning_rate is not None:
        raise UsageError(
            "head_learning_rate does not apply to your own optimiser. Omit it, and pass `optimizers` with a parameter group "
            "for `loss.heads.parameters()`."
        )


def _check_shared_targets(args: AlignmentTrainingArguments, objectives: Mapping[str, Objective]) -> None:
    """Refuse a sampler that keeps pairs with the same target apart, if batches or objectives need them together.

    Also refuse batches of such pairs for objectives that treat the copies of a target as negatives.
    """
    sharing = [name for name, objective in objectives.items() if objective.shares_targets]
    sampler = getattr(args.batch_sampler, "value", args.batch_sampler)
    if args.batches == "shared_target":
        if args.batch_sampler != BatchSamplers.BATCH_SAMPLER:
            raise UsageError(
                "'batches: shared_target' puts pairs with the same target into one batch, and requires batch_sampler "
                f"'batch_sampler', but it is {sampler!r}, as set by the recipe or an option. Change one of them."
            )
        for name, objective in objectives.items():
            if not objective.shares_targets and not getattr(objective, "mask_duplicates", True):
                raise UsageError(
                    f"With 'batches: shared_target', {name} would rank a translation against copies of it. Set its "
                    "'positives' to 'shared_target', or 'mask_duplicates' to true."
                )
    if sharing and args.batch_sampler in (BatchSamplers.NO_DUPLICATES, BatchSamplers.NO_DUPLICATES_HASHED):
        raise UsageError(
            f"The positives of {', '.join(sharing)} are pairs with the same target, which are never in one batch with "
            f"batch_sampler {sampler!r}. Set batches to 'shared_target' and batch_sampler to 'batch_sampler'."
        )


def check_best_metric(args: AlignmentTrainingArguments, metrics: Sequence[str]) -> None:
    """Refuse a metric for the best model that the evaluators do not compute.

    Sentence Transformers adds ``sequential_score``, the score of the last evaluator.
    """
    wanted = args.metric_for_best_model
    if wanted is not None and wanted.removeprefix("eval_") not in (*metrics, "sequential_score"):
        known = [f"eval_{name}" for name in metrics]
        default = ", the default," if wanted == "loss" else ""
        raise UsageError(
            f"--metric_for_best_model {wanted}{default} is not measured{did_you_mean(wanted, known)}; choose one of "
            f"{', '.join(known)}."
        )


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed."""
    known, installed = list(INTEGRATION_TO_CALLBACK), get_available_reporting_integrations()
    for name in names:
        if name not in known:
            raise UsageError(
                f"Unknown tracker {name!r}{did_you_mean(name, known)}; --report_to takes {', '.join(known)}, all or none."
            )
        package, is_installed = UNLISTED_TRACKERS.get(name, (name, lambda: False))
        if name not in installed and not is_installed():
            raise MissingExtraError(
                f"--report_to {name} requires a package that is not installed: pip install {package}"
            )
