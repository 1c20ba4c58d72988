"""Fault tolerance of training: signals, steps that are not finite, exhausted memory, and data loader workers that die."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from metaphrase.checkpoints.folders import last_good
from metaphrase.exceptions import MemoryBudgetError, NonFiniteError, WorkerError
from metaphrase.modeling.encoding import has_decoder, unwrap
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss

logger = logging.getLogger(__name__)

#: Texts of the errors that CPUs, MPS and cuBLAS raise instead of `torch.OutOfMemoryError`.
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")

#: Consecutive steps that float16's gradient scaler may skip while it searches for its scale, which it halves each time.
SCALE_SEARCH = 20


class GracefulShutdown:
    """Finishes the current step and then stops training, on SIGTERM and SIGINT.

    ``received`` is the signal of this process, ``agreed`` the signal on which all processes stop; 0 for none.
    """

    def __init__(self) -> None:
        self.received = self.agreed = 0

    @property
    def signal(self) -> int:
        """The signal that stops this run; 0 for none."""
        return self.agreed or self.received

    @contextmanager
    def handle_signals(self, *, repeat_after: float = 0.0) -> Iterator[None]:
        """Install the handlers. A second signal ends the process immediately.

        A repeated signal is ignored for ``repeat_after`` seconds: torchrun repeats an interrupt that the terminal has
        already sent to all processes.
        """
        self.received = self.agreed = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        pid, first = os.getpid(), 0.0

        def handler(number: int, frame: Any) -> None:
            nonlocal first
            if os.getpid() != pid:  # a data loader worker, which ends with this process
                return
            if self.received:
                if time.monotonic() - first >= repeat_after:
                    signal.signal(number, signal.SIG_DFL)
                    signal.raise_signal(number)
                return
            self.received, first = number, time.monotonic()
            message = (
                f"{signal.Signals(number).name}: stopping after this step, with a checkpoint. Repeat the signal to stop "
                "immediately.\n"
            )
            os.write(2, message.encode())  # a logger may hold its lock

        before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, previous or signal.SIG_DFL)

    @contextmanager
    def keep_checkpoints(self, args: AlignmentTrainingArguments) -> Iterator[None]:
        """Keep all checkpoints inside this block, to resume the last one; after a signal, do not load the best."""
        limit, best = args.save_total_limit, args.load_best_model_at_end
        args.save_total_limit, args.load_best_model_at_end = None, best and not self.signal
        try:
            yield
        finally:
            args.save_total_limit, args.load_best_model_at_end = limit, best

    def exit_if_signalled(self, step: int, max_steps: int) -> None:
        """End the process with 128 + the signal, if there was one."""
        if not self.signal:
            return
        name = signal.Signals(self.signal).name
        logger.warning("Stopped by %s after step %d of %d, with a checkpoint.", name, step, max_steps)
        raise SystemExit(128 + self.signal)


class StepGuard:
    """Skips optimiser steps whose loss or gradient is NaN or infinite, counts them, and fails if there are too many."""

    def __init__(self, args: AlignmentTrainingArguments) -> None:
        self.args = args
        self.reset()

    def reset(self, manifest: Mapping[str, Any] | None = None) -> None:
        """Start counting: from zero, or from the manifest of a checkpoint."""
        manifest = manifest or {"skipped_steps": 0, "skipped_in_a_row": 0, "overflows_in_a_row": 0}
        self.skipped = int(manifest["skipped_steps"])
        self._skipped_in_a_row = int(manifest["skipped_in_a_row"])
        self._overflows_in_a_row = int(manifest["overflows_in_a_row"])
        self.skipping = False
        self._scale = 0.0  # of float16's gradients, before the current step
        self._steps_since_log = self._skipped_since_log = 0
        self._steps_of_train = self._skipped_of_train = 0
        self._finite = torch.tensor(True)
        self._learns = torch.tensor(False)

    def facts(self) -> dict[str, int]:
        """The counters, for the manifest of a checkpoint."""
        return {
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "overflows_in_a_row": self._overflows_in_a_row,
        }

    def begin_step(self) -> None:
        """Prepare for the micro-batches of an optimiser step."""
        self._finite = torch.tensor(True, device=self.args.device)

    def observe_loss(self, loss: Tensor) -> None:
        """Note whether the loss of a micro-batch is finite, and whether any loss so far was not 0."""
        self._finite = self._finite.to(loss.device) & torch.isfinite(loss)
        self._learns = self._learns.to(loss.device) | (loss.detach() != 0)

    def is_finite(self, grad_norm: Any, scaler: Any) -> Tensor:
        """Whether losses and gradients of the step are finite in this process.

        The overflows of a gradient scaler are expected, so they are left to the scaler.
        """
        if scaler is not None:
            return self._finite
        return self._finite & torch.isfinite(torch.as_tensor(grad_norm)).to(self._finite)

    def record(self, *, skip: bool, step: int, terms: Mapping[str, Tensor], scaler: Any) -> None:
        """Record whether the current step is skipped, once all processes agree on it; too many such steps are an error."""
        self.skipping = skip
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skip else 0
        if scaler is not None:
            self._scale = scaler.get_scale()
        if not skip:
            return
        wrong = [name for name, value in terms.items() if not torch.isfinite(value).all()]
        cause = f"The loss of {', '.join(wrong)} is" if wrong else "A gradient, or the loss of another process, is"
        if self._skipped_in_a_row >= self.args.max_skipped_steps:
            raise NonFiniteError(
                f"{cause} NaN or infinite in step {step}. The {self._skipped_in_a_row - 1} steps before it were skipped for "
                f"the same reason. Lower --learning_rate (now {self.args.learning_rate:g}), increase --warmup_steps, or "
                f"inspect the data of these steps. {last_good(self.args.output_dir)}"
            )
        self.skipped += 1
        self._skipped_since_log += 1
        self._skipped_of_train += 1
        logger.warning("%s NaN or infinite in step %d, which is skipped.", cause, step)

    def end_step(self, step: int, scaler: Any) -> bool:
        """Finish an optimiser step.

        Returns whether the step changed the weights.
        """
        self._steps_since_log += 1
        self._steps_of_train += 1
        return not self.skipping and not self._has_overflowed(step, scaler)

    def _has_overflowed(self, step: int, scaler: Any) -> bool:
        """Whether the gradient scaler skipped the step: it has then lowered its scale. Fused optimisers do not report it."""
        if scaler is None or scaler.get_scale() >= self._scale:
            self._overflows_in_a_row = 0
            return False
        self._overflows_in_a_row += 1
        self.skipped += 1
        if self._overflows_in_a_row >= max(self.args.max_skipped_steps, SCALE_SEARCH):
            raise NonFiniteError(
                f"The gradients of step {step} are NaN or infinite in float16. The {self._overflows_in_a_row - 1} steps "
                f"before it were skipped for the same reason; the gradient scale is down to {scaler.get_scale():g}. Train "
                f"with --bf16 or in float32, or inspect the data of these steps. {last_good(self.args.output_dir)}"
            )
        return True

    def check_progress(self, steps: int) -> None:
        """Refuse the end of a run that changed nothing."""
        if 0 < steps <= self.skipped:
            raise NonFiniteError(
                f"All {steps} steps were skipped, because their loss or gradient was NaN or infinite: nothing was trained "
                f"or released. Lower --learning_rate (now {self.args.learning_rate:g}), increase --warmup_steps, or "
                "inspect the data."
            )
        if self._steps_of_train and not self._learns:
            logger.warning(
                "The loss was 0 in all %d steps, so nothing was learned. Check that the data have what the objectives read, "
                "such as word links, and the weights of the terms.",
                self._steps_of_train,
            )

    def correct_log(self, logs: dict[str, float]) -> None:
        """Average a training loss over the executed steps, and add the number of skipped ones."""
        if not self._steps_of_train:  # a finished run is resumed
            logs.pop("train_loss", None)
        if "train_loss" in logs and 0 < self._skipped_of_train < self._steps_of_train:
            logs["train_loss"] *= self._steps_of_train / (self._steps_of_train - self._skipped_of_train)
        if "loss" not in logs:
            return
        steps, skipped = self._steps_since_log, self._skipped_since_log
        self._steps_since_log = self._skipped_since_log = 0
        if self.skipped:
            logs["skipped_steps"] = self.skipped
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            del logs["grad_norm"]
        if steps and skipped == steps:
            del logs["loss"]
        elif skipped:
            logs["loss"] *= steps / (steps - skipped)


def restorer(heads: nn.Module, logged: dict[str, dict[str, Tensor]]) -> Callable[[], None]:
    """A function that undoes what a failed step changes: the buffers of the heads, and the sums of terms for the log.

    Objectives replace their buffers, such as a queue, so these are not copied. Normalisation layers change running means in
    place; these are copied.
    """
    buffers = [
        (layer, name, value.clone() if getattr(layer, "running_mean", None) is not None else value)
        for layer in heads.modules()
        for name, value in layer.named_buffers(recurse=False)
    ]
    terms = {name: value.clone() for name, value in logged["train"].items()}

    def restore() -> None:
        for layer, name, value in buffers:
            setattr(layer, name, value)
        logged["train"] = terms

    return restore


def repeat_within_memory(
    step: Callable[[], Tensor],
    *,
    model: nn.Module,
    loss: AlignmentLoss,
    inputs: Mapping[str, Any],
    args: AlignmentTrainingArguments,
    accumulating: bool,
    logged: dict[str, dict[str, Tensor]],
) -> Tensor:
    """Run forward and backward of a micro-batch; if memory runs out, halve ``loss.micro_batch_size`` and repeat.

    ``accumulating`` is whether gradients of earlier micro-batches of this step are pending; ``logged`` are the sums of terms
    for the log, to which a failed attempt does not add.
    """
    while True:
        cuda = torch.cuda.is_available()
        states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []
        restore = restorer(loss.heads, logged)
        try:
            return step()
        except RuntimeError as error:
            smaller = _smaller_micro_batch(loss, inputs, args, error, accumulating=accumulating)
        # Outside of the handler, because its traceback would keep the tensors of the failed step.
        model.zero_grad()
        loss.heads.zero_grad()
        restore()
        torch.set_rng_state(states[0])
        if cuda:
            torch.cuda.set_rng_state_all(states[1])
            torch.cuda.empty_cache()
        logger.warning("Out of memory: encoding %d rows at a time from now on (micro_batch_size).", smaller)
        loss.micro_batch_size = smaller


def _smaller_micro_batch(
    loss: AlignmentLoss,
    inputs: Mapping[str, Any],
    args: AlignmentTrainingArguments,
    error: Exception,
    *,
    accumulating: bool,
) -> int:
    """Half of the current micro-batch size; raises if a smaller one cannot help."""
    if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY):
        raise error
    views = [view for view in inputs.values() if isinstance(view, dict) and "input_ids" in view]
    rows = sum(len(view["input_ids"]) for view in views)
    current = min(loss.micro_batch_size or rows, rows)
    if current <= 1:
        raise MemoryBudgetError(
            "Out of memory with one row at a time. Shorten the sentences (--max_length), train fewer weights "
            "(--freeze_word_embeddings) or a smaller encoder, or use a device with more memory."
        ) from error
    encoder = unwrap(loss.model)[0].auto_model
    if has_decoder(encoder):
        raise MemoryBudgetError(
            f"Out of memory with {current} rows. Encoders with a decoder, such as {encoder.config.model_type}, cannot encode "
            "them in parts. Lower --per_device_train_batch_size or --max_length."
        ) from error
    if accumulating:
        raise MemoryBudgetError(
            f"Out of memory with {current} rows at a time, after earlier micro-batches of the same step, whose gradients "
            f"cannot be kept apart. Resume with --micro_batch_size {current // 2}."
        ) from error
    if args.world_size > 1:
        raise MemoryBudgetError(
            f"Out of memory with {current} rows at a time in process {args.process_index}; the other processes cannot "
            f"repeat the step. Resume with --micro_batch_size {current // 2}: the gradient stays the same."
        ) from error
    return current // 2


@contextmanager
def explain_worker_errors(args: AlignmentTrainingArguments) -> Iterator[None]:
    """Turn the errors of data loader workers that die or hang into a :class:`WorkerError` with advice."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("DataLoader timed out"):
            raise WorkerError(
                f"No data loader worker returned a batch within {args.dataloader_timeout:g} seconds, so one is considered "
                "hung, for example on a disk or network that does not respond. Check that the corpus is readable, or raise "
                f"--dataloader_timeout. {last_good(args.output_dir)}"
            ) from error
        if not str(error).startswith("DataLoader worker"):
            raise
        raise WorkerError(
            f"{error} The usual cause is memory: lower --dataloader_num_workers (0 reads in the training process). For a "
            "stream, which other workers read in another order, also pass --allow_changes to resume. "
            f"{last_good(args.output_dir)}"
        ) from error
