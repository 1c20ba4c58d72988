"""Trainers whose checkpoints are whole or not there, and hold finite weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from metaphrase.checkpoints.folders import PARTIAL, last_good, publish, rotate, size
from metaphrase.exceptions import CheckpointError, NonFiniteError


class WholeCheckpoints(Trainer):
    """What a trainer is given by standing before its parent: checkpoints of :mod:`metaphrase.checkpoints.folders`.

    A checkpoint is written aside and put into place when all of it is on the disk; older ones go when it verifies. Weights
    that are not finite are never written.
    """

    _staging: Path | None = None  # where a checkpoint is being written
    _written: Path | None = None  # the last checkpoint

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the parent's.

        Raises:
            NonFiniteError: A weight is infinite or no number.
        """
        check_finite(self._saved(), lambda: last_good(self.args.output_dir))
        super().save_model(*args, **kwargs)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any
    ) -> tuple[int, int]:
        """Epochs that are done, and batches of the next one; all epochs of a finished run, which gets no step more."""
        done = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else done

    def _saved(self) -> nn.Module:
        """What holds all weights of a checkpoint."""
        return self.model

    def _facts(self) -> dict[str, Any]:
        """What a manifest says of the run."""
        return {"step": self.state.global_step}

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The parent's, written aside and put into place when all of it is on the disk."""
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
            super()._save_checkpoint(model, trial)
            self._wait()
            if str(self.state.best_model_checkpoint or "").startswith(str(staging)):
                self.state.best_model_checkpoint = str(place)
            if self.args.should_save:
                self.state.save_to_json(str(staging / place.name / TRAINER_STATE_NAME))
                publish(staging / place.name, place, self._facts())
                shutil.rmtree(staging, ignore_errors=True)
            self._wait()
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            free = size(shutil.disk_usage(output).free) if output.is_dir() else "nothing"
            raise CheckpointError(
                f"{place} could not be written: {error}. The disk has {free} free, and a checkpoint takes about "
                f"{size(sum(self._bytes()))}. {last_good(output)} Go on with --resume_from_checkpoint true."
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
        """Of the weights, and of what AdamW remembers of them."""
        saved = self._saved()
        weights = sum(value.nbytes for value in saved.state_dict().values())
        return weights, 2 * sum(p.nbytes for p in saved.parameters() if p.requires_grad)


def check_finite(module: nn.Module, advice: Callable[[], str] = str) -> None:
    """Refuse weights that must not be written.

    Args:
        module: An encoder, or a loss with it and its heads.
        advice: Gives what the message ends with; asked where there is a message.

    Raises:
        NonFiniteError: With the first weight that is infinite or no number.
    """
    values = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
    finite = torch.stack([torch.isfinite(value).all() for value in values.values()]).tolist()
    for name, good in zip(values, finite, strict=True):
        if not good:
            raise NonFiniteError(
                f"{name} has become infinite or no number; the model is not written. {advice()}".rstrip()
            )
