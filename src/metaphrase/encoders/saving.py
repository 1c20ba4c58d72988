"""Saving an encoder."""

from __future__ import annotations

from pathlib import Path

from sentence_transformers import SentenceTransformer

from metaphrase.exceptions import StorageError
from metaphrase.io.files import as_os_errors


def save_encoder(model: SentenceTransformer, folder: Path, *, what: str, destination: Path) -> None:
    """Save an encoder without a card to a folder, from which it is moved to its destination.

    Raises:
        StorageError: The folder cannot be written to, for example because the disk is full.
    """
    try:
        with as_os_errors():
            model.save_pretrained(str(folder), create_model_card=False)
    except OSError as error:
        raise StorageError(
            f"The {what} cannot be written to {destination}: {error}. Free some space and run the command again."
        ) from error
