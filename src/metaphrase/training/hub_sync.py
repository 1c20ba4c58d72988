"""Pushing a run to the Hub, as a release: no pickle, no optimiser state, no heads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import HubStrategy

from metaphrase.checkpoints.folders import last_good
from metaphrase.checkpoints.saving import AtomicCheckpointMixin, check_finite
from metaphrase.exceptions import HubError, UsageError
from metaphrase.io.hub import is_transient
from metaphrase.publishing.hub import make_repository, push, push_command
from metaphrase.publishing.release import release
from metaphrase.training.loss import AlignmentLoss

logger = logging.getLogger(__name__)


def check_single_release(loss: AlignmentLoss) -> None:
    """Refuse to push a model that has one release per language."""
    if loss.heads.language_embedding is not None:
        raise UsageError(
            "push_to_hub cannot push this recipe's checkpoints. A model with a language embedding has one release per "
            "language. Write them with `metaphrase.publishing.release.release_languages`, and push each folder: metaphrase "
            "push FOLDER/xx --repo me/name-xx."
        )


class HubReleaseMixin(AtomicCheckpointMixin):
    """Trainer mixin that pushes checkpoints and the end of a run as releases. List it before the trainer class."""

    alignment_loss: AlignmentLoss

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository before training. If the Hub is unavailable, a warning is logged."""
        if not self.is_world_process_zero():
            return
        self.push_in_progress = None
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        private = bool(self.args.hub_private_repo if private is None else private)
        command = push_command(self.args.output_dir, name, private=private, revision=self.args.hub_revision)
        later = f"A release can also be pushed after training: `{command}`."
        try:
            self.hub_model_id = make_repository(name, private=private, token=token or self.args.hub_token, later=later)
        except HubError as error:
            if not is_transient(error):
                raise
            if "/" not in name:
                raise UsageError(
                    f"The Hub is unavailable, so the owner of {name!r} is unknown. Pass hub_model_id as organisation/name to "
                    "train without the Hub."
                ) from error
            self.hub_model_id = name
            logger.warning("%s Training continues, and each push tries again.", error)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Release the model to the output folder and push the release: no pickle, no optimiser state, no heads.

        When it returns, the upload is complete and verified. Returns the address of the commit; None on all processes but
        the first.
        """
        if not self.is_world_process_zero():
            return None
        check_single_release(self.alignment_loss)
        check_finite(self.alignment_loss, lambda: last_good(self.args.output_dir))
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        folder = Path(self.args.output_dir)
        card = self.model.model_card_data
        release(self.model, folder, recipe=self.alignment_loss.recipe.to_dict(), card=card)
        return push(
            folder,
            str(self.hub_model_id),
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            private=bool(self.args.hub_private_repo if private is None else private),
            commit_message=commit_message or "End of training",
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        before = self._written
        super()._save_checkpoint(model, trial)
        if self.args.push_to_hub and self._written != before:
            self._push_from_checkpoint(str(self._written))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the current model as a release; if the Hub fails or refuses, training continues."""
        if self._staging is not None or self.args.hub_strategy == HubStrategy.END:
            return
        try:
            self.push_to_hub(f"Training in progress, step {self.state.global_step}")
        except (HubError, UsageError) as error:
            logger.warning("%s Training continues; the next checkpoint and the end of training push again.", error)
