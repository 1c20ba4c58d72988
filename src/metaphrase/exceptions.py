"""The exceptions of this library, as one tree: ``except MetaphraseError`` catches every error it raises on bad input.

Each class also inherits from the matching builtin, so that ``except ValueError`` and ``except OSError`` work as usual.
Programming errors raise a plain ``ValueError`` or ``TypeError``. Errors of other libraries are passed on unchanged.

>>> from metaphrase.exceptions import AlignmentFormatError, MetaphraseError
>>> issubclass(AlignmentFormatError, MetaphraseError) and issubclass(AlignmentFormatError, ValueError)
True
"""

from __future__ import annotations


class MetaphraseError(Exception):
    """Base class. The message states what was expected, what was found, and what to do."""


class UsageError(MetaphraseError, ValueError):
    """Unknown, invalid or conflicting options, from the command line or from training arguments."""


class ConfigError(MetaphraseError, ValueError):
    """An invalid YAML file, from ``--config`` or a recipe. The message contains the line and column."""


class RecipeError(ConfigError):
    """A recipe with an unknown or invalid key, objective or value."""


class MissingFileError(MetaphraseError, FileNotFoundError):
    """A file, folder, recipe or language does not exist."""


class DataError(MetaphraseError, ValueError):
    """Test or fine-tuning data in an unexpected format."""


class CorpusError(DataError):
    """A bitext or monolingual text that is malformed, empty or in an unknown format."""


class AlignmentFormatError(CorpusError):
    """Word links that are not in Pharaoh format (``0-0 1-2``) or point outside their sentences."""


class DataMismatchError(DataError):
    """Inputs that do not match, such as two results over different pairs."""


class ModelError(MetaphraseError, ValueError):
    """An encoder or aligner that does not support the requested operation."""


class ModelFileError(ModelError, OSError):
    """Damaged or modified files of an encoder or aligner."""


class CheckpointError(MetaphraseError, ValueError):
    """A checkpoint that is damaged, belongs to another run, or cannot be written."""


class NewerCheckpointError(CheckpointError):
    """A checkpoint in the format of a later version of this library."""


class NonFiniteError(MetaphraseError, ValueError):
    """A loss, gradient, weight or embedding that is NaN or infinite."""


class WorkerError(MetaphraseError, ChildProcessError):
    """A worker of a data loader or of an engine, or another process of a run, died or did not respond in time."""


class HubError(MetaphraseError, RuntimeError, OSError):
    """A failed upload to, or download from, the Hub."""


class HubAccessError(HubError, PermissionError):
    """The access token is missing, invalid or lacks the required permission."""


class HubConnectionError(HubError, ConnectionError):
    """The Hub cannot be reached, or kept failing after all retries."""


class HubMissingError(HubError, FileNotFoundError):
    """The repository does not exist on the Hub, or is not visible with this token."""


class StorageError(MetaphraseError, OSError):
    """Not enough disk space, or a location that is not writable."""


class MissingExtraError(MetaphraseError, ImportError):
    """An optional dependency that is not installed. The message contains the ``pip install`` command."""


class MemoryBudgetError(MetaphraseError, MemoryError):
    """Training does not fit into memory. The message names the options to lower."""
