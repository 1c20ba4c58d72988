"""The parameters that objectives add to an encoder, as one model that is saved with every checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from metaphrase.checkpoints.folders import HEADS
from metaphrase.encoders.checks import load_complete
from metaphrase.encoders.folders import CONFIG, WEIGHTS, open_heads
from metaphrase.exceptions import CheckpointError, ModelError, RecipeError, UsageError
from metaphrase.io.configuration import plain
from metaphrase.io.files import as_json
from metaphrase.io.redaction import redact
from metaphrase.modeling.languages import LanguageEmbedding, token_type_table
from metaphrase.objectives import OBJECTIVES, HeadSources, Objective
from metaphrase.training.distributed import differing

#: Arguments of `from_pretrained` that select the files.
_FILE_ARGUMENTS = {"subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download", "proxies"}


class AlignmentHeadsConfig(PreTrainedConfig):
    """Configuration of the heads.

    Args:
        encoder: Configuration of the encoder, as a dictionary.
        objectives: For each objective its arguments (``args``), the settings that follow from encoder and corpus
            (``settings``), and its class as ``package.module:Class`` if its name is not registered (``objective``).
        languages: Languages of an input language embedding; empty without one.
    """

    model_type = "alignment_heads"

    def __init__(
        self,
        encoder: dict[str, Any] | None = None,
        objectives: dict[str, dict[str, Any]] | None = None,
        languages: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.encoder = encoder or {}
        self.objectives = objectives or {}
        self.languages = languages or []
        super().__init__(**kwargs)


class AlignmentHeads(PreTrainedModel):
    """The heads of all objectives, by the objectives' names.

    The heads are trained and resumed with the encoder, and are not part of a released encoder. They do not own the encoder's
    embeddings, which are passed to them in every step.

    Attributes:
        heads: The heads.
        language_embedding: Language vectors that are added to the encoder's input (WACSE, section 6.1), or None.
    """

    config_class = AlignmentHeadsConfig
    base_model_prefix = "heads"

    def __init__(self, config: AlignmentHeadsConfig, objectives: Mapping[str, Objective] | None = None) -> None:
        super().__init__(config)
        self.heads = nn.ModuleDict()
        self.language_embedding: LanguageEmbedding | None = None
        if config.encoder:
            encoder = AutoConfig.for_model(**config.encoder)
            if config.languages:
                self.language_embedding = LanguageEmbedding(config.languages, encoder.hidden_size)
            for name, made in config.objectives.items():
                cls = _objective_class(name, made.get("objective", name))
                if cls.make_head is Objective.make_head:
                    continue  # without a head; its arguments may name files of the training
                objective = objectives[name] if objectives else cls(**_local_args(made["args"]))
                head = objective.make_head(encoder, **made["settings"])
                if head is None:
                    continue
                if not isinstance(head, nn.Module):
                    raise RecipeError(
                        f"make_head() of the objective {name!r} must return a torch.nn.Module or None, but returns a "
                        f"{type(head).__name__}. Make it a parameter or buffer of a module."
                    )
                self.heads[name] = head
        # Patterns of the names that safetensors cannot store twice.
        self._tied_weights_keys = {re.escape(name): first for name, first in self._shared_weights().items()}
        self.post_init()
        self._shapes = _shapes(self.state_dict())

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the heads, which may have no parameters but buffers."""
        values = chain(self.parameters(), self.buffers())
        return next((value.dtype for value in values if value.is_floating_point()), torch.float32)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The weights that modules share, as transformers restores them: each further name of a weight and its first name."""
        return self._shared_weights()

    def _shared_weights(self) -> dict[str, str]:
        first: dict[int, str] = {}
        names = [(name, id(weight)) for name, weight in self.named_parameters(remove_duplicate=False)]
        return {name: known for name, key in names if (known := first.setdefault(key, name)) != name}

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *args: Any, **kwargs: Any) -> AlignmentHeads:
        """Load heads from a folder or the Hub, from safetensors and with all of their weights.

        Args:
            name_or_path: Folder or Hub id.
            *args: Arguments of transformers' ``from_pretrained``.
            **kwargs: Likewise; ``subfolder`` and ``revision`` select the files.

        Raises:
            ModelError: The heads belong to an unknown objective.
            ModelFileError: The configuration is damaged, or weights are missing, damaged or of another shape.
            OSError: There are no heads.
        """
        where = {key: kwargs.pop(key) for key in _FILE_ARGUMENTS & kwargs.keys()}
        folder = Path(str(cached_file(name_or_path, CONFIG, **where))).parent
        cached_file(name_or_path, WEIGHTS, **where, _raise_exceptions_for_missing_entries=False)
        with open_heads(str(name_or_path), folder, cls._from_configuration) as copy:
            return load_complete(super().from_pretrained, copy, str(name_or_path), **kwargs)

    @classmethod
    def _from_configuration(cls, folder: Path) -> AlignmentHeads:
        return cls(AlignmentHeadsConfig.from_pretrained(folder, local_files_only=True))

    @classmethod
    def from_encoder(
        cls,
        sources: HeadSources,
        objectives: dict[str, tuple[Objective, dict[str, Any]]],
        *,
        language_embedding: bool = False,
    ) -> AlignmentHeads:
        """Create the heads of objectives and initialise them from the encoder.

        Args:
            sources: The encoder and other sources of initial weights.
            objectives: For each name the objective and the arguments of its constructor. The objectives receive their heads.
            language_embedding: Add a vector for each language to the encoder's input.

        Raises:
            ValueError: A language embedding is requested, but no language is known or the encoder does not support it.
        """
        if language_embedding and not sources.languages:
            raise UsageError(
                "An input language embedding requires the languages of the corpus, but none are known. Pass `languages` to "
                "AlignmentLoss, or set language_embedding to false."
            )
        if language_embedding:
            token_type_table(sources.encoder)
        for objective, _ in objectives.values():
            objective.attach(sources)
        shape = sources.encoder.config.to_dict()
        shape.pop("_name_or_path", None)  # a local folder is private
        config = AlignmentHeadsConfig(
            encoder=shape,
            objectives={name: _as_stored(name, one, args, sources) for name, (one, args) in objectives.items()},
            languages=list(sources.languages) if language_embedding else [],
        )
        heads = cls(config, {name: objective for name, (objective, _) in objectives.items()})
        for objective, _ in objectives.values():
            objective.head = dict(heads.heads.items()).get(objective.name)
            objective.fill_head(sources)
        heads.check_shapes()
        return heads.to(dtype=sources.encoder.dtype)

    def check_shapes(self) -> None:
        """Refuse weights and buffers that :meth:`Objective.make_head` did not create, or in another shape.

        Such heads could be saved, but not loaded, and weights that are added in training are in no optimiser.

        Raises:
            RecipeError: The names or shapes have changed.
        """
        if changed := _differences(self._shapes, now := _shapes(self.state_dict())):
            name = changed[0]
            raise RecipeError(
                f"{name} has the shape {now.get(name)}, but {self._shapes.get(name)} after make_head(), so no checkpoint of "
                "it could be resumed. Create all parameters and buffers of a head in make_head(), with their final shape; "
                "head_settings() can pass sizes to it."
            )

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise linear layers and embeddings like the encoder's; other modules keep torch's initialisation."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.encoder.get("initializer_range", 0.02))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


AutoConfig.register(AlignmentHeadsConfig.model_type, AlignmentHeadsConfig)
AutoModel.register(AlignmentHeadsConfig, AlignmentHeads)


def restore_heads(heads: AlignmentHeads, checkpoint: Path) -> None:
    """Set the weights of heads to those in a checkpoint.

    Raises:
        CheckpointError: The checkpoint has no heads, or heads of another recipe or encoder.
    """
    folder = checkpoint / HEADS
    saved = AlignmentHeads.from_pretrained(folder).state_dict() if folder.is_dir() else {}
    wanted, found = _shapes(heads.state_dict()), _shapes(saved)
    if changed := _differences(wanted, found):
        first = changed[0]
        raise CheckpointError(
            f"{checkpoint} cannot be resumed: {len(changed)} weights of its heads do not fit this recipe and encoder, "
            f"such as {first} (shape {wanted.get(first)}, in the checkpoint {found.get(first)}). Use the original recipe and "
            f"encoder, or start from its weights with --model {checkpoint} and new heads."
        )
    heads.load_state_dict(saved)


def check_same_state(heads: AlignmentHeads) -> None:
    """Refuse buffers that differ between processes: a checkpoint contains those of the first process only.

    Raises:
        RecipeError: Buffers differ.
    """
    saved = heads.state_dict()
    if different := differing({name: value for name, value in heads.named_buffers() if name in saved}):
        raise RecipeError(
            f"{different[0]} differs between processes, but a checkpoint contains that of the first process only, so a "
            "resumed run would differ. Update it from the rows of all processes, which "
            "functional.gather_with_gradient(tensor) returns; for nn.BatchNorm, use nn.SyncBatchNorm. If it need not be "
            "resumed, register it with persistent=False."
        )


def _shapes(state: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items()}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]


def _as_stored(name: str, objective: Objective, args: Mapping[str, Any], sources: HeadSources) -> dict[str, Any]:
    """An objective as the configuration of the heads stores it, see `AlignmentHeadsConfig`; paths do not reveal the home."""
    cls = type(objective)
    public = {key: redact(value) if isinstance(value, str) else value for key, value in args.items()}
    stored: dict[str, Any] = {"args": public, "settings": objective.head_settings(sources)}
    if OBJECTIVES.get(cls.name) is not cls:
        stored["objective"] = f"{cls.__module__}:{cls.__qualname__}"
    try:
        return dict(as_json(plain(stored)))
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"The 'args' and the head_settings() of the objective {name!r} are stored as JSON, but {error}. Convert their "
            "values to numbers, text, lists and dictionaries."
        ) from error


def _objective_class(name: str, reference: str) -> type[Objective]:
    try:
        return OBJECTIVES[reference]
    except (KeyError, RecipeError) as error:
        raise ModelError(
            f"The heads belong to an unknown objective {name!r}. Install the package that provides it, or register its class "
            f"first: metaphrase.OBJECTIVES[{name!r}] = Class."
        ) from error


def _local_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The stored arguments of an objective as they apply to this user: paths in the home folder are complete."""
    return {
        name: str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value
        for name, value in args.items()
    }
