"""The training loss: the objectives of a recipe over shared encodings."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from metaphrase.corpus.loading import Corpus
from metaphrase.encoders.adapters import encoder_of
from metaphrase.encoders.folders import MODULES
from metaphrase.encoders.loading import origin_of, pooling_of, used_piece_ids
from metaphrase.encoders.pooler import remove_pooler
from metaphrase.exceptions import ModelError, RecipeError, UsageError
from metaphrase.io.arguments import Length, checked, is_of_type
from metaphrase.io.configuration import plain
from metaphrase.merging.projection import freeze_projections
from metaphrase.modeling.encoding import Encoding, encode_views, has_decoder, unwrap
from metaphrase.modeling.matryoshka import CITATION, truncated
from metaphrase.modeling.views import View
from metaphrase.objectives import HeadSources, Objective
from metaphrase.objectives.base import check_positions, code_digest
from metaphrase.objectives.vocabulary import VocabularyHead
from metaphrase.training.heads import AlignmentHeads, check_same_state
from metaphrase.training.recipe import Recipe, Term, views_of

logger = logging.getLogger(__name__)


@checked
class AlignmentLoss(nn.Module):
    """The weighted objectives of a recipe over one encoding of each view.

    Args:
        model: The encoder to train. An optional pooler of transformers, which sentence embeddings never use, is removed. If
            its weights are in half precision, they are converted to float32, as small updates would be rounded away.
            A projection that removes directions (:mod:`metaphrase.merging.projection`) is frozen.
        recipe: The objectives and their weights.
        max_length: Maximum number of pieces per sentence; None uses the recipe's.
        english_ids: Sorted ids of the English subset vocabulary, for heads that use one (see
            :func:`metaphrase.encoders.loading.used_piece_ids`).
        languages: Languages of the corpus, for objectives that embed them.

    Attributes:
        heads: The parameters of the objectives.
        objectives: The objectives by name.
        views: The views that the objectives read, without duplicates.
        step: Completed steps of the optimiser, on which scheduled weights depend; the trainer sets it.

    Raises:
        UsageError: The model has no Transformer, or the recipe is not a :class:`Recipe`.
        ModelError: The model has no Pooling, or a module with which it could not be loaded again.
        ValueError: Two objectives read different views of the same name, or an objective does not support this encoder.
        RecipeError: An argument of an objective is invalid, or it has parameters outside of its head.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        recipe: Recipe,
        *,
        max_length: Length | None = None,
        english_ids: Tensor | None = None,
        languages: Sequence[str] = (),
    ) -> None:
        super().__init__()
        _check_model(model)
        if not isinstance(recipe, Recipe):
            raise UsageError(
                f"AlignmentLoss requires a Recipe, but got a {type(recipe).__name__}. Load one with Recipe.load(name), or "
                "build one with Recipe.from_dict(content)."
            )
        if any(weight.dtype in (torch.float16, torch.bfloat16) for weight in model.parameters()):
            model.float()
        remove_pooler(model[0].auto_model)
        freeze_projections(model)
        self.model = model
        self.recipe = recipe
        self.max_length = max_length or recipe.max_length
        objectives = recipe.objectives(self.max_length)
        self.step = 0
        sources = _head_sources(model, english_ids, languages)
        _check_tokenizer(sources, objectives)
        check_positions(sources, self.max_length, recipe.name)
        for term in recipe.terms:
            _check_matryoshka(term, objectives[term.name], sources.embedding_size)
        if recipe.language_embedding and has_decoder(sources.encoder):
            raise ModelError(
                f"Language embeddings do not support encoders with a decoder, such as {sources.encoder.config.model_type}. "
                "Set language_embedding to false, or choose another encoder."
            )
        arguments = {term.name: {"max_length": self.max_length, **plain(term.args)} for term in recipe.terms}
        made = {name: (objective, arguments[name]) for name, objective in objectives.items()}
        self.heads = AlignmentHeads.from_encoder(sources, made, language_embedding=recipe.language_embedding)
        _check_token_states(sources, self.heads.heads)
        for objective in objectives.values():
            _check_state(objective)
        self.objectives = nn.ModuleDict(objectives)
        self._micro_batch_size: int | None = None
        self.views = _distinct(view for objective in objectives.values() for view in views_of(objective))

    @cached_property
    def digests(self) -> dict[str, dict[str, str]]:
        """For each objective, the digests of what it reads and no checkpoint contains, and of its code."""
        return {name: _digests(objective) for name, objective in self.objectives.items()}

    def forward(self, features: Mapping[str, Mapping[str, Tensor]], labels: None = None) -> dict[str, Tensor]:
        """The weighted loss of each objective.

        Args:
            features: ``{view: {feature: tensor}}``, from :class:`ParallelCollator`.
            labels: Ignored; part of sentence-transformers' calling convention.

        Returns:
            ``{objective: scalar}``; the trainer optimises the sum and logs each.

        Raises:
            UsageError: The features are not views, because another trainer than :class:`AlignmentTrainer` built them.
        """
        if not isinstance(features, Mapping):
            raise UsageError(
                "AlignmentLoss reads views of a batch, which AlignmentTrainer builds, but got tokenized columns. Train with "
                "AlignmentTrainer."
            )
        encodings = encode_views(
            self.model, features, self.heads.language_embedding, micro_batch_size=self.micro_batch_size
        )
        weights, sizes = self.weights, {term.name: term.matryoshka for term in self.recipe.terms}
        return {
            name: self._value(objective, encodings, sizes[name]) * weights[name]
            for name, objective in self.objectives.items()
        }

    def _value(self, objective: Any, encodings: Mapping[str, Encoding], sizes: Sequence[int]) -> Tensor:
        """An objective, or its sum over sizes of embeddings (Kusupati et al. 2022, equation 1)."""
        value = sum(objective(truncated(encodings, size)) for size in sizes) if sizes else objective(encodings)
        if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
            is_tensor = isinstance(value, Tensor)
            found = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}" if is_tensor else repr(value)
            raise RecipeError(
                f"The loss of the objective {type(objective).name!r} must be a real-valued scalar tensor, but is {found}. "
                "Reduce it, for example with mean(), and return it from forward()."
            )
        if torch.is_grad_enabled() and value.grad_fn is None and any(p.requires_grad for p in self.model.parameters()):
            raise RecipeError(
                f"The loss of the objective {type(objective).name!r} has no gradient, so the objective has no effect. "
                "Compute it from the encodings or the head, without detach(); for a batch with nothing to learn from, "
                "return `tensor.sum() * 0.0`."
            )
        return value

    @property
    def micro_batch_size(self) -> int | None:
        """Number of rows per encoder call (see :func:`metaphrase.modeling.encoding.encode_views`); None for all at once.

        Setting a number raises :class:`ModelError` if the encoder has a decoder.
        """
        return self._micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, size: int | None) -> None:
        encoder = unwrap(self.model)[0].auto_model
        if size is not None and has_decoder(encoder):
            raise ModelError(
                f"Encoders with a decoder, such as {encoder.config.model_type}, cannot encode a batch in parts. Omit "
                "micro_batch_size; if memory is short, lower the batch size."
            )
        self._micro_batch_size = size

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each objective at the current step; in evaluation the final one, so that losses can be compared."""
        return {
            term.name: term.weight_at(self.step) if self.training else term.final_weight for term in self.recipe.terms
        }

    def after_step(self) -> None:
        """Update the state of the objectives, such as momentum encoders; called after every optimiser step.

        Raises:
            RecipeError: The shape of a weight or buffer of a head has changed, or its buffers differ between processes.
        """
        followers = [one for one in self.objectives.values() if type(one).after_step is not Objective.after_step]
        encoder = encoder_of(unwrap(self.model)) if followers else None
        for objective in followers:
            objective.after_step(encoder)
        self.heads.check_shapes()
        if self.step == 0:  # later steps are checked before each checkpoint
            check_same_state(self.heads)

    def get_config_dict(self) -> dict[str, Any]:
        """Name, maximum length and terms of the recipe, for the model card."""
        return {"recipe": self.recipe.name, "max_length": self.max_length, "terms": self.recipe.to_dict()["terms"]}

    @property
    def citation(self) -> str:
        """BibTeX entries of the objectives, for the model card."""
        entries = [objective.citation for objective in self.objectives.values()]
        entries += [CITATION] if any(term.matryoshka for term in self.recipe.terms) else []
        return "\n\n".join(dict.fromkeys(filter(None, entries)))

    def transforms(self) -> dict[str, str]:
        """For each objective that predicts pieces, the transform before its vocabulary projection."""
        parts = [(name, part) for name, one in self.objectives.items() for part in one.modules()]
        return {name: part.transform_kind for name, part in parts if isinstance(part, VocabularyHead)}


def build_loss(model: SentenceTransformer, recipe: Recipe, corpus: Corpus) -> AlignmentLoss:
    """Build a recipe's loss, with the vocabulary and the languages of the corpus.

    Raises:
        UsageError: An English vocabulary is requested for a stream.
    """
    english_ids = None
    vocabularies = [getattr(objective, "vocabulary", None) for objective in recipe.objectives().values()]
    if any(isinstance(one, str) and one == "english" for one in vocabularies):
        if not isinstance(corpus.dataset, Dataset):
            raise UsageError("The English subset vocabulary is read from the corpus; a stream does not provide it.")
        english_ids = used_piece_ids(corpus.dataset["target"], model.tokenizer)
        logger.info("English subset vocabulary: %d pieces.", len(english_ids))
    languages = {language for file in corpus.files for language in file.get("languages", ())}
    return AlignmentLoss(model, recipe, english_ids=english_ids, languages=sorted(languages))


def _check_model(model: Any) -> None:
    """Refuse a model without sentence embeddings, or whose checkpoints could not be loaded."""
    if not isinstance(model, SentenceTransformer) or not isinstance(model[0], Transformer):
        found = type(model[0] if isinstance(model, SentenceTransformer) else model).__name__
        raise UsageError(
            f"AlignmentLoss requires a SentenceTransformer whose first module is a Transformer, but got a {found}. "
            "Load an encoder with load_encoder()."
        )
    kinds = [type(module) for module in model.children()]
    if unknown := [kind.__name__ for kind in kinds if kind not in MODULES.values()]:
        raise ModelError(
            f"A model consists of {', '.join(MODULES)}, but this one has the module {unknown[0]}, so its checkpoints could "
            "not be loaded. Train without it."
        )
    if Pooling not in kinds:
        raise ModelError(
            "The model has no Pooling, which computes the embeddings of sentences. Add one: "
            "SentenceTransformer(modules=[model[0], Pooling(model[0].get_embedding_dimension())])."
        )


def _head_sources(model: SentenceTransformer, english_ids: Tensor | None, languages: Sequence[str]) -> HeadSources:
    """The sources of the heads of objectives that train a model."""
    with model.truncate_embeddings(None):  # only `encode` truncates them
        size = model.get_embedding_dimension()
    return HeadSources(
        encoder=encoder_of(model),
        tokenizer=model.tokenizer,
        name=origin_of(model),
        english_ids=english_ids,
        languages=tuple(sorted(languages)),
        pooling=pooling_of(model),
        modules=tuple(model.children())[1:],
        prompts=model.prompts,
        embedding_size=size,
    )


def _check_state(objective: Objective) -> None:
    """Refuse trained parameters and buffers that would not be saved with checkpoints."""
    frozen = {name for name, parameter in objective.named_parameters() if not parameter.requires_grad}
    if outside := [name for name in objective.state_dict() if not name.startswith("head.") and name not in frozen]:
        raise RecipeError(
            f"The objective {type(objective).name!r} has parameters or buffers outside of its head "
            f"({', '.join(outside[:3])}), which checkpoints do not contain. Create them in make_head(), "
            "or register constants with persistent=False."
        )


def _digests(objective: Objective) -> dict[str, str]:
    digests = objective.digests()
    if not is_of_type(digests, dict[str, str]):
        raise RecipeError(
            f"digests() of the objective {type(objective).name!r} must return a dictionary of text, such as "
            f"{{'table': files_sha256([path])}}, but returns {reprlib.repr(digests)}."
        )
    code = code_digest(type(objective))
    return digests if code is None else {"code": code, **digests}


def _check_matryoshka(term: Term, objective: Objective, size: int | None) -> None:
    """Refuse sizes of embeddings that an objective or the encoder does not have."""
    if term.matryoshka and not objective.truncatable:
        raise RecipeError(
            f"'matryoshka' of {term.name!r} truncates sentence embeddings, but the objective, with these 'args', does not "
            "read them, or only in their full size. Omit it; 'tr' without a projection, 'anchor' of normalised sentence "
            "embeddings and 'similarity-preservation' support it."
        )
    if size is not None and max(term.matryoshka, default=0) > size:
        raise RecipeError(
            f"'matryoshka' of {term.name!r} has the size {max(term.matryoshka)}, but the embeddings of this encoder have "
            f"{size} components. List sizes up to {size}."
        )


def _distinct(views: Any) -> tuple[View, ...]:
    by_name: dict[str, View] = {}
    for view in views:
        if by_name.setdefault(view.name, view) != view:
            raise RecipeError(
                f"Two objectives read different views named {view.name!r}: {by_name[view.name]} and {view}. "
                "Give them the same settings, or give the views different names."
            )
    return tuple(by_name.values())


def _check_token_states(sources: HeadSources, heads: Collection[str]) -> None:
    """Refuse heads if a module changes the states of tokens before the pooling, as heads are sized by the encoder."""
    if heads and any(getattr(module, "module_output_name", None) == "token_embeddings" for module in sources.modules):
        raise ModelError(
            f"{', '.join(heads)} read the encoder's states of tokens, but a module of {sources.name or 'this encoder'} "
            "changes them before the pooling. Use a recipe without heads, such as 'tr' or 'metaphrase'."
        )


def _check_tokenizer(sources: HeadSources, objectives: Mapping[str, Objective]) -> None:
    """Refuse a tokenizer that does not match the encoder or the objectives."""
    tokenizer, name = sources.tokenizer, sources.name or "this encoder"
    if tokenizer.pad_token_id is None:
        raise ModelError(f"The tokenizer of {name} has no pad token. Set its pad_token.")
    if particular := [objective.name for objective in objectives.values() if not objective.any_tokenizer]:
        _check_special_tokens(tokenizer, name, ", ".join(particular))
    embedded: Any = sources.encoder.get_input_embeddings()
    rows, pieces = len(embedded.weight), max(tokenizer.get_vocab().values()) + 1
    if pieces > rows:
        raise ModelError(
            f"The tokenizer of {name} has {pieces} pieces, but the encoder has embeddings for {rows} of them. Load the "
            f"matching tokenizer; if you have added pieces, resize the embeddings: "
            f"model[0].auto_model.resize_token_embeddings({pieces})."
        )
    of_words = [objective.name for objective in objectives.values() if objective.reads_words]
    if of_words and not tokenizer.is_fast:
        raise ModelError(
            f"{', '.join(of_words)} needs the pieces of each word, but the tokenizer of {name}, a "
            f"{type(tokenizer).__name__}, is a slow tokenizer, which does not return them. Convert it to a fast tokenizer "
            "(tokenizer.json), or use a recipe without words, such as 'dap'."
        )


def _check_special_tokens(tokenizer: PreTrainedTokenizerBase, name: str, particular: str) -> None:
    """Refuse a tokenizer without special tokens that objectives require."""
    for token in ("cls", "sep", "mask"):
        if getattr(tokenizer, f"{token}_token_id") is None:
            raise ModelError(
                f"The tokenizer of {name} has no {token} token, required by {particular}. Use a recipe such as 'tr' or "
                "'metaphrase', or an encoder of the BERT or XLM-R family."
            )
    ids, special = tokenizer("a")["input_ids"], {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    if ids[0] not in special or ids[-1] not in special:
        raise ModelError(
            f"The tokenizer of {name} does not put a special token before and after every text, as required by {particular}. "
            "Use a recipe such as 'tr' or 'metaphrase', or add a post-processor that does "
            "(`tokenizer.backend_tokenizer.post_processor`)."
        )
