"""The parameters that objectives add to an encoder, as one model that is saved beside every checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from metaphrase.modeling.languages import LanguageEmbedding, check_language_embedding
from metaphrase.objectives import OBJECTIVES, HeadSources, Objective


class AlignmentHeadsConfig(PreTrainedConfig):
    """Shape of the heads.

    Args:
        encoder: Configuration of the encoder that the heads stand on, as a dictionary.
        objectives: For each objective its arguments (``args``) and what the encoder and corpus settled (``settings``).
        languages: Languages of an input language embedding; none without.
    """

    model_type = "alignment_heads"

    def __init__(
        self,
        encoder: dict[str, Any] | None = None,
        objectives: dict[str, dict[str, dict[str, Any]]] | None = None,
        languages: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.encoder = encoder or {}
        self.objectives = objectives or {}
        self.languages = languages or []
        super().__init__(**kwargs)


class AlignmentHeads(PreTrainedModel):
    """Every objective's head, by the objective's name.

    The heads train with the encoder and resume with it; they are no part of a released encoder. None of them owns the
    encoder's embeddings: those are handed to it in every step.

    Attributes:
        heads: The heads.
        language_embedding: Vectors that are added to the encoder's input by each text's language (WACSE, section 6.1);
            None without.
    """

    config_class = AlignmentHeadsConfig
    base_model_prefix = "heads"

    def __init__(self, config: AlignmentHeadsConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleDict()
        self.language_embedding: LanguageEmbedding | None = None
        if config.encoder:
            encoder = AutoConfig.for_model(**config.encoder)
            if config.languages:
                self.language_embedding = LanguageEmbedding(config.languages, encoder.hidden_size)
            for name, made in config.objectives.items():
                head = OBJECTIVES[name](**made["args"]).make_head(encoder, **made["settings"])
                if head is not None:
                    self.heads[name] = head
        self.post_init()

    @classmethod
    def from_encoder(
        cls,
        sources: HeadSources,
        objectives: dict[str, tuple[Objective, dict[str, Any]]],
        *,
        language_embedding: bool = False,
    ) -> AlignmentHeads:
        """Make the heads that objectives need and fill them from the encoder.

        Args:
            sources: The encoder and what else heads start from.
            objectives: For each name the objective and the arguments that it was made with. The objectives receive
                their heads.
            language_embedding: Add a vector for each language to the encoder's input.

        Raises:
            ValueError: A language embedding is wanted and no language is known, or the encoder cannot carry one.
        """
        if language_embedding and not sources.languages:
            raise ValueError(
                "An input language embedding needs the languages of the corpus, but none is known. Pass `languages` to "
                "AlignmentLoss, or set language_embedding to false."
            )
        if language_embedding:
            check_language_embedding(sources.encoder)
        shape = sources.encoder.config.to_dict()
        shape.pop("_name_or_path", None)  # a folder of this machine is nobody else's business
        config = AlignmentHeadsConfig(
            encoder=shape,
            objectives={
                name: {"args": args, "settings": objective.head_settings(sources)}
                for name, (objective, args) in objectives.items()
            },
            languages=list(sources.languages) if language_embedding else [],
        )
        heads = cls(config)
        heads.lend(objective for objective, _ in objectives.values())
        for objective, _ in objectives.values():
            objective.fill_head(sources)
        return heads.to(dtype=sources.encoder.dtype)

    def lend(self, objectives: Any) -> None:
        """Hand each objective its head."""
        for objective in objectives:
            objective.head = dict(self.heads.items()).get(objective.name)

    def _init_weights(self, module: nn.Module) -> None:
        """Fresh modules keep torch's initialisation but for linear layers, which get the encoder's."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.encoder.get("initializer_range", 0.02))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.encoder.get("initializer_range", 0.02))


AutoConfig.register(AlignmentHeadsConfig.model_type, AlignmentHeadsConfig)
AutoModel.register(AlignmentHeadsConfig, AlignmentHeads)
