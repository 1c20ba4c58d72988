"""Trainers that write checkpoints atomically and never write NaN or infinite weights."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from metaphrase.checkpoints.folders import PARTIAL, check_space, last_good, publish, rotate, tidy
from metaphrase.exceptions import CheckpointError, NonFiniteError, UsageError, WorkerError
from metaphrase.io.counts import format_size
from metaphrase.io.files import as_os_errors
from metaphrase.io.locks import exclusive
from metaphrase.io.outputs import claim_folder


class AtomicCheckpointMixin(Trainer):
    """Trainer mixin that writes the checkpoints of :mod:`metaphrase.checkpoints.folders`. List it before the trainer class.

    A checkpoint is written to a staging folder and moved into place once all of it is on disk. Older checkpoints are
    deleted once it verifies. NaN or infinite weights are never written.
    """

    _staging: Path | None = None  # folder that a checkpoint is being written to
    _written: Path | None = None  # the latest checkpoint

    @contextmanager
    def hold_output_folder(self) -> Iterator[None]:
        """Hold the output folder, if this process saves checkpoints there."""
        with exclusive(self.args.output_dir) if self._saves else nullcontext():
            yield

    def tidy_output_folder(self) -> None:
        """Clean up the output folder, if this process saves checkpoints there, and check the free space."""
        if self._saves:
            output = Path(self.args.output_dir)
            tidy(output)
            weights, optimiser = self._bytes()
            check_space(output, "checkpoint", weights, weights + optimiser)

    def how_to_resume(self) -> str:
        """How to resume this run, for error messages."""
        return how_to_resume(self.args.output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, if its weights are finite. A release into the same folder may replace it."""
        check_finite(self._saved(), lambda: last_good(self.args.output_dir))
        if output_dir is not None and not _internal_call and self.args.should_save:
            with suppress(UsageError):  # the folder holds other files, which no release may replace
                claim_folder(output_dir)
        super().save_model(output_dir, _internal_call)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any
    ) -> tuple[int, int]:
        """Completed epochs and batches of the next one. A finished run has completed all epochs and takes no more steps.

        Raises:
            CheckpointError: The checkpoint has more steps than the run.
        """
        done = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        if self.state.global_step > max_steps:
            raise CheckpointError(
                f"The checkpoint has {self.state.global_step} steps, more than the {max_steps} that these options train for. "
                "Pass a larger --max_steps, or choose another --output_dir to start over."
            )
        self.state.compute_steps(
            self.args, max_steps
        )  # of these options, not of those that the checkpoint was saved with
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else done

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with errors_of(checkpoint, "optimiser or schedule"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        # The checkpoint may be that of a run in float16, which continues in another precision.
        if self.accelerator.scaler is None:
            return
        with errors_of(checkpoint, "gradient scaler"):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with errors_of(checkpoint, "random states"):
            super()._load_rng_state(checkpoint)

    @property
    def _saves(self) -> bool:
        """Whether this process saves checkpoints."""
        return bool(self.args.should_save and self.args.save_strategy != SaveStrategy.NO)

    def _saved(self) -> nn.Module:
        """The module with all weights of a checkpoint."""
        return self.model

    def _facts(self) -> dict[str, Any]:
        """Facts of the run for the manifest."""
        return {"step": self.state.global_step}

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with delayed_worker_errors():
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint to a staging folder and move it into place."""
        output = Path(self._get_output_dir(trial))
        place = output / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if place == self._written:
            return
        staging = output / PARTIAL
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self._wait()
        try:
            self._staging = staging
            with as_os_errors():
                super()._save_checkpoint(model, trial)
            self._wait()
            if str(self.state.best_model_checkpoint or "").startswith(str(staging)):
                self.state.best_model_checkpoint = str(place)
            if self.args.should_save:
                self.state.save_to_json(str(staging / place.name / TRAINER_STATE_NAME))
                publish(staging / place.name, place, self._facts())
                shutil.rmtree(staging, ignore_errors=True)
            self._wait()
        except (OSError, RuntimeError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            if is_of_lost_process(error):
                raise
            free = format_size(shutil.disk_usage(output).free) if output.is_dir() else "nothing"
            raise CheckpointError(
                f"{place} could not be written: {error}. The disk has {free} free, and a checkpoint needs about "
                f"{format_size(sum(self._bytes()))}. {self.how_to_resume()}"
            ) from error
        finally:
            self._staging = None
        self._written = place
        if self.args.should_save:
            rotate(output, place, self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    def _bytes(self) -> tuple[int, int]:
        """Sizes of the weights and of the state of AdamW, in bytes."""
        saved = self._saved()
        weights = sum(value.nbytes for value in saved.state_dict().values())
        return weights, 2 * sum(p.nbytes for p in saved.parameters() if p.requires_grad)


@contextmanager
def delayed_worker_errors() -> Iterator[None]:
    """At the end of the block, raise the error of a data loader worker that died within it.

    Torch raises it once, at any line of the main thread. Code that catches all exceptions would lose it, as
    sentence-transformers does when it writes a model card, and training would wait until ``dataloader_timeout``. An error of
    the block itself takes precedence.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None  # not on Windows
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended: list[Any] = []
    signal.signal(signal.SIGCHLD, lambda number, frame: ended.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
    if ended:
        handler(signal.SIGCHLD, ended[-1])


@contextmanager
def explain_lost_processes(advice: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a collective operation whose other processes have ended into a :class:`WorkerError`.

    ``advice`` returns the end of its message.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_lost_process(error):
            raise
        raise WorkerError(
            "Another process of this run ended, or cannot be reached. Its own message states the reason; without one, the "
            f"usual cause is memory. {advice()}"
        ) from error


def how_to_resume(output: str | Path) -> str:
    """How to resume a training run, for error messages."""
    return f"{last_good(output)} Resume with --resume_from_checkpoint true."


def is_of_lost_process(error: Exception) -> bool:
    """Whether a collective operation failed because another process ended or cannot be reached."""
    if dist.is_available() and isinstance(error, dist.DistError):
        return True
    gloo = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # which raises plain RuntimeErrors
    return type(error) is RuntimeError and any(text in str(error) for text in gloo)


@contextmanager
def errors_of(checkpoint: str | Path | None, states: str) -> Iterator[None]:
    """Refuse states of a checkpoint that cannot be loaded safely, such as pickles with code, even if their digests match."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed: its {states} cannot be loaded ({type(error).__name__}), so this library did "
            f"not write them. Start from its weights with --model {checkpoint}, or choose another checkpoint."
        ) from error


def check_finite(module: nn.Module, advice: Callable[[], str] = str) -> None:
    """Refuse NaN or infinite weights.

    ``advice`` returns the end of the error message; it is called only if there is an error.
    """
    values = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
    finite = torch.stack([torch.isfinite(value).all() for value in values.values()]).tolist()
    for name, good in zip(values, finite, strict=True):
        if not good:
            raise NonFiniteError(
                f"{name} contains NaN or infinite values, so the model is not written. {advice()}".rstrip()
            )
