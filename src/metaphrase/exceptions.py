"""What can go wrong, as one tree: ``except MetaphraseError`` catches whatever this library refuses.

Every class is also the builtin that stands for its kind, so that ``except ValueError`` and ``except OSError`` work as they
do elsewhere. Misuse of a function by a programmer stays a plain ``ValueError`` or ``TypeError``; errors of other libraries
stay theirs.

>>> from metaphrase.exceptions import AlignmentFormatError, MetaphraseError
>>> issubclass(AlignmentFormatError, MetaphraseError) and issubclass(AlignmentFormatError, ValueError)
True
"""

from __future__ import annotations


class MetaphraseError(Exception):
    """The root. Its message says what was wanted, what came, and what to do."""


class UsageError(MetaphraseError, ValueError):
    """Options that are unknown, wrong or do not go together. Raised by the command line and by training arguments."""


class ConfigError(MetaphraseError, ValueError):
    """A YAML file that cannot be used; the message has line and column. Raised by ``--config`` and by recipes."""


class RecipeError(ConfigError):
    """A recipe with a key, an objective or a value that is unknown or of the wrong kind. Raised by :class:`Recipe`."""


class MissingFileError(MetaphraseError, FileNotFoundError):
    """A file, folder, recipe or language that is not there. Raised by whatever reads files."""


class DataError(MetaphraseError, ValueError):
    """Data that cannot be read as what they should be. Raised by readers of test sets and of fine-tuning data."""


class CorpusError(DataError):
    """A bitext or a monolingual text that is malformed, empty or of no known format. Raised by the corpus readers."""


class AlignmentFormatError(CorpusError):
    """Word links that are not in Pharaoh's form (``0-0 1-2``), or that point outside of their sentences."""


class DataMismatchError(DataError):
    """Things that should belong together and do not: two results over different pairs, work that another command left."""


class ModelError(MetaphraseError, ValueError):
    """An encoder or an aligner that cannot do what is asked of it. Raised when one is loaded or taken into use."""


class ModelFileError(ModelError, OSError):
    """Files of a model that are damaged or were altered. Raised by the starter encoder and by saved aligners."""


class CheckpointError(MetaphraseError, ValueError):
    """A checkpoint that is damaged, of another run, or in the way. Raised by training and by resuming."""


class NewerCheckpointError(CheckpointError):
    """A checkpoint in a format that a later version of this library writes."""


class NonFiniteError(MetaphraseError, ValueError):
    """A NaN or infinite loss, gradient, weight or embedding. Raised by training and by releases."""


class WorkerError(MetaphraseError, ChildProcessError):
    """A process that prepares batches died. Raised by training."""


class HubError(MetaphraseError, RuntimeError, OSError):
    """A release that cannot go to the Hub or did not arrive there as it was sent. Raised by ``push``."""


class HubAccessError(HubError, PermissionError):
    """There is no token, or the Hub does not let it do what was asked for."""


class HubConnectionError(HubError, ConnectionError):
    """The Hub is not there, or fails for longer than there was patience."""


class HubMissingError(HubError, FileNotFoundError):
    """The Hub has no such repository, or does not show it to this token."""


class StorageError(MetaphraseError, OSError):
    """A disk that is too small, or a place where nothing can be written. Raised by what writes much or for long."""


class MissingExtraError(MetaphraseError, ImportError):
    """An optional dependency that is not installed; the message has the ``pip install`` that brings it."""


class MemoryBudgetError(MetaphraseError, MemoryError):
    """Work that does not fit into the memory that there is; the message says what to lower. Raised by training."""
