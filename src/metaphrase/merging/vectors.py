"""Task vectors: the difference between the weights of a tuned model and those of the model that it was tuned from.

Reference: Ilharco et al. 2023, "Editing Models with Task Arithmetic"; Wortsman et al. 2022, "Robust fine-tuning of zero-shot
models", for the interpolation.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from metaphrase.exceptions import ModelError, NonFiniteError, UsageError
from metaphrase.io.arguments import Finite, checked
from metaphrase.io.counts import first_names
from metaphrase.io.digests import module_settings, tensors_digest, weights_digest
from metaphrase.merging.files import SETTINGS, read_vector, write_vector
from metaphrase.merging.pooling import replace_pooling
from metaphrase.merging.projection import find_projection, project_out
from metaphrase.merging.quantization import Bits

#: Smallest overlap of two projections that count as the same: rounding, or training elsewhere, changes directions slightly.
_SAME_DIRECTIONS = 0.99
_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class TaskVector:
    """The change of a model's weights in training.

    Attributes:
        differences: Tuned minus base, by name of the weight, in float32. Weights that did not change are absent.
        base: Digest of the base's weights (:func:`metaphrase.io.digests.weights_digest`). A vector fits no other model.
        base_name: Name of the base: a Hub id, with its commit if it is known.
        alpha: Weight with which the vector is applied by default.
        recipe: The recipe of the tuned model, as data.
        license: Licence of the vector, as the Hub spells it.
        card: Text of a model card.
        prompts: The prompts that the tuned model stores, by name; None if it has none, or if its prompts and default prompt
            equal the base's.
        directions: Orthonormal directions that the tuned model projects out of its embeddings, shape
            ``(directions, hidden)``, as after `metaphrase debias`; they are removed with any alpha.
        default_prompt_name: The prompt of `prompts` that the tuned model uses by default, if any.
        settings: The settings among ``max_seq_length``, ``truncate_dim`` and ``similarity_fn_name`` in which the tuned model
            differs from the base, and the ``pooling`` of a tuned model whose base has none; None if there are none.

    >>> base, one, other = (nn.Linear(2, 1) for _ in range(3))
    >>> both = TaskVector.between(base, one) + TaskVector.between(base, other)
    >>> mean = both.apply(base, 0.5)
    >>> torch.allclose(mean.weight, (one.weight + other.weight) / 2)
    True
    """

    differences: Mapping[str, Tensor]
    base: str
    base_name: str | None = None
    alpha: float = 1.0
    recipe: Mapping[str, Any] | None = None
    license: str | None = None
    card: str | None = None
    prompts: Mapping[str, str] | None = None
    directions: Tensor | None = None
    default_prompt_name: str | None = None
    settings: Mapping[str, Any] | None = None

    @classmethod
    def between(cls, base: nn.Module, tuned: nn.Module, **facts: Any) -> TaskVector:
        """Subtract the weights of a model from those of the same model after training.

        Args:
            base: The model before training.
            tuned: The model after training.
            **facts: Further attributes: `base_name`, `alpha`, `recipe`, `license`, `card`.

        Raises:
            ModelError: The models differ in more than the values of their weights: in modules, shapes, vocabulary, or buffers
                that are not floating-point; or each projects out other directions.
            NonFiniteError: A difference is NaN or infinite.
        """
        old, new = base.state_dict(), tuned.state_dict()
        # training removes an optional pooler, which embeddings never use
        old = {name: tensor for name, tensor in old.items() if name in new or ".pooler." not in name}
        base_modules, tuned_modules = module_settings(base), module_settings(tuned)
        _check_projections(base, tuned)
        if (projection := find_projection(tuned, len(tuned_modules) - len(base_modules))) is not None:
            places, facts["directions"] = projection
            tuned_modules = [module for at, module in enumerate(tuned_modules) if at not in places]
            prefixes = tuple(f"{at}." for at in places)
            new = {name: tensor for name, tensor in new.items() if not name.startswith(prefixes)}
        prompts = {name: text for name, text in (getattr(tuned, "prompts", None) or {}).items() if text is not None}
        default = getattr(tuned, "default_prompt_name", None)
        known = getattr(base, "prompts", None), getattr(base, "default_prompt_name", None)
        if any(prompts.values()) and (prompts, default) != known:
            facts |= {"prompts": prompts, "default_prompt_name": default if default in prompts else None}
        before, after = _settings(base), _settings(tuned)
        facts["settings"] = {name: value for name, value in after.items() if before.get(name) != value} or None
        _check_weights(old, new)
        if base_modules != tuned_modules:
            raise ModelError(
                f"The two models have different modules, or different settings of them ({_in_words(base_modules)}; "
                f"{_in_words(tuned_modules)}). Merge models with the same modules and settings."
            )
        _check_vocabularies(base, tuned)
        differences = {}
        for name, old_tensor in old.items():
            difference = new[name].to(old_tensor.device).float() - old_tensor.float()
            if not difference.any():
                continue
            if not old_tensor.is_floating_point():
                raise ModelError(
                    f"{name} differs, and is of type {old_tensor.dtype}: only floating-point weights are merged."
                )
            differences[name] = difference
            if not torch.isfinite(difference).all():
                raise NonFiniteError(f"{name} of one of the models is NaN or infinite. Use an earlier checkpoint.")
        return cls(differences, weights_digest(base), **facts)

    @checked
    def apply(self, base: _Model, alpha: Finite | None = None) -> _Model:
        """Return a copy of the base with ``alpha · difference`` added and the directions projected out.

        The copy shares the weights that do not change. Settings and prompts are those of the vector, where it has any, else
        those of the base; with alpha 0, always those of the base. A base in half precision is converted to float32, as in
        training, because it would round small differences away.

        Args:
            base: The model that the vector was computed from; it does not change.
            alpha: Weight of the difference: 0 is the base, 1 the tuned model. None takes the vector's own.

        Raises:
            ModelError: The base is another model.
            NonFiniteError: A weight of the result is NaN or infinite.
        """
        if (digest := weights_digest(base)) != self.base:
            name = f" of {self.base_name}" if self.base_name else ""
            raise ModelError(
                f"This task vector changes the weights{name} with the digest {self.base}, but those of this model have "
                f"the digest {digest}. Load the model that the vector was made from, at the same revision."
            )
        weights = dict(_tensors(base))
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if wrong := [name for name, difference in self.differences.items() if shapes.get(name) != difference.shape]:
            raise ModelError(
                f"This task vector has weights that the model does not have, or has in another shape: {first_names(wrong)}. "
                "Make the vector again from the two models."
            )
        weight = self.alpha if alpha is None else alpha
        merged = _copy(base, [weights[name] for name in self.differences], exact=bool(weight))
        places = dict(_tensors(merged))
        with torch.no_grad():
            for name, difference in self.differences.items():
                old = weights[name]
                # Two roundings: some CPUs would fuse `torch.add(old, difference, alpha=weight)` into one.
                places[name].copy_(old + difference.to(old.device) * weight)
                if not torch.isfinite(places[name]).all():
                    raise NonFiniteError(f"{name} is NaN or infinite with alpha {weight:g}. Choose a smaller alpha.")
        if self.directions is not None:
            project_out(merged, self.directions)
        if not weight:
            return merged
        if self.prompts is not None:
            merged.prompts, merged.default_prompt_name = dict(self.prompts), self.default_prompt_name
        for name, value in (self.settings or {}).items():
            if name == "pooling":
                replace_pooling(merged, value)
            else:
                setattr(merged, name, value)
        return merged

    def __add__(self, other: TaskVector) -> TaskVector:
        """Add the differences of two vectors of one base.

        Facts and settings on which the vectors disagree are dropped, and an alpha on which they disagree is 1. Licences are
        joined by ``AND``, and cards are concatenated. The directions are the principal ones of those of both vectors, as
        many as the larger number.

        Raises:
            ModelError: The vectors belong to different bases, or have different poolings.
        """
        if not isinstance(other, TaskVector):
            return NotImplemented
        if self.base != other.base:
            raise ModelError(
                f"Task vectors of different bases cannot be added: {self.base_name or self.base} and "
                f"{other.base_name or other.base}. Tune both models from the same one."
            )
        poolings = [(vector.settings or {}).get("pooling") for vector in (self, other)]
        if poolings[0] != poolings[1]:
            raise ModelError(
                f"Task vectors of models with different poolings cannot be added: {' and '.join(map(str, poolings))}. Tune "
                "both models with the same pooling."
            )
        total = dict(self.differences)
        for name, difference in other.differences.items():
            if name in total and total[name].shape != difference.shape:
                raise ModelError(f"{name} has another shape in one of the vectors. Make them again from their models.")
            total[name] = total[name] + difference.to(total[name].device) if name in total else difference
        other_facts = other._facts()
        facts = {name: value for name, value in self._facts().items() if value == other_facts[name]}
        if self.prompts != other.prompts:
            facts.pop("default_prompt_name", None)
        settings = other.settings or {}
        shared = {name: value for name, value in (self.settings or {}).items() if (name, value) in settings.items()}
        facts["settings"] = shared or None
        joined = {"license": " AND ", "card": "\n\n"}
        for name, mark in joined.items():
            facts[name] = mark.join(dict.fromkeys(filter(None, (getattr(self, name), getattr(other, name))))) or None
        if not (self.license and other.license):
            facts["license"] = None
        spans = [vector.directions for vector in (self, other) if vector.directions is not None]
        if spans:
            facts["directions"] = torch.linalg.svd(torch.cat(spans).double())[2][: max(map(len, spans))]
        return TaskVector(total, **facts)

    @checked
    def scaled(self, alpha: Finite) -> TaskVector:
        """Multiply the differences by a number; the result is best applied with an alpha of 1."""
        differences = {name: alpha * difference for name, difference in self.differences.items()}
        return replace(self, differences=differences, alpha=1.0)

    @checked
    def save(self, path: str | Path, *, bits: Bits = 16) -> Path:
        """Write the vector as one safetensors file, atomically.

        Args:
            path: The file; an existing one is replaced.
            bits: Precision of the differences: 16 (float16), 8 or 4, with a scale for each block of 64 values.

        Raises:
            NonFiniteError: A difference is NaN, infinite or too large for float16.
        """
        return write_vector(path, self.differences, self._facts(), bits, directions=self.directions)

    @classmethod
    def load(cls, path: str | Path) -> TaskVector:
        """Read a file that `save` wrote.

        Raises:
            MissingFileError: There is no such file.
            ModelFileError: The file is damaged, is not a task vector, or was written by a later version of this library.
        """
        differences, directions, facts = read_vector(path)
        return cls(differences, directions=directions, **facts)

    def _facts(self) -> dict[str, Any]:
        tensors = ("differences", "directions")
        return {fact.name: getattr(self, fact.name) for fact in fields(self) if fact.name not in tensors}


@checked
def interpolate(base: _Model, tuned: nn.Module, alpha: Finite) -> _Model:
    """Return ``(1 - alpha) · base + alpha · tuned``; see `TaskVector.between` and `TaskVector.apply`."""
    return TaskVector.between(base, tuned).apply(base, alpha)


@checked
def combine(vectors: Sequence[TaskVector], alpha: Finite | None = None) -> TaskVector:
    """Add vectors of one base, to be applied with `alpha`, or else each with its own alpha.

    Raises:
        ModelError: The vectors belong to different bases.
        UsageError: There is no vector, or one is given twice.
    """
    if not vectors:
        raise UsageError("There are no task vectors to add. Pass at least one.")
    changing = [vector for vector in vectors if vector.differences or vector.directions is not None]
    if len(changing) > 1 and len(set(map(_digest, changing))) < len(changing):
        raise UsageError(
            "Two of the task vectors are the same, perhaps under different names. Pass each once, and choose its weight with "
            "alpha."
        )
    if alpha is None and len({vector.alpha for vector in vectors}) > 1:
        vectors = [vector.scaled(vector.alpha) for vector in vectors]
    total = reduce(operator.add, vectors)
    return total if alpha is None else replace(total, alpha=alpha)


def _digest(vector: TaskVector) -> str:
    """Digest of what a vector changes, regardless of its alpha and its facts."""
    directions = {} if vector.directions is None else {"directions": vector.directions}
    return tensors_digest({**vector.differences, **directions})


def _settings(model: nn.Module) -> dict[str, Any]:
    """The settings of an encoder that are not those of its modules."""
    names = SETTINGS.keys() - {"pooling"} if isinstance(model, SentenceTransformer) else ()
    return {name: getattr(model, name) for name in names}


def _check_projections(base: nn.Module, tuned: nn.Module) -> None:
    """Check that two models do not project different directions out: the mean of two projections is not a projection."""
    old, new = (find_projection(model, len(list(model.children()))) for model in (base, tuned))
    if old is None or new is None or old[0] != new[0]:
        return
    old_kh, new_kh = old[1], new[1]
    shared = float((old_kh @ new_kh.T).square().sum()) / max(len(old_kh), len(new_kh))
    if shared < _SAME_DIRECTIONS:
        raise ModelError(
            f"Both models project out directions of language identity, {len(old_kh)} and {len(new_kh)}, but not the same "
            "ones. Merge the models before directions are removed, and remove them from the result with --debias."
        )


def _check_weights(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Check that the weights of two models differ in their values only."""
    shapes = [{name: tensor.shape for name, tensor in weights.items()} for weights in (old, new)]
    if other := [name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name)]:
        raise ModelError(
            f"Models are merged weight by weight, but these two differ in the shape or presence of {first_names(other)}. "
            "Merge models that were tuned from one base, with its vocabulary and its layers."
        )


def _check_vocabularies(*models: nn.Module) -> None:
    vocabularies = [model.tokenizer.get_vocab() for model in models if isinstance(model, SentenceTransformer)]
    if any(vocabulary != vocabularies[0] for vocabulary in vocabularies):
        raise ModelError(
            "The tokenizers of the two models have different vocabularies, so the same row of the embeddings belongs to "
            "different pieces. Merge models that were tuned from one base, with its tokenizer."
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all of their names."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _copy(model: _Model, changed: Iterable[Tensor], *, exact: bool) -> _Model:
    """Copy a model whose weights will change; other tensors are shared. If `exact`, half precision becomes float32."""
    if exact and any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in changed):
        return copy.deepcopy(model).float()
    copied = set(map(id, changed))
    return copy.deepcopy(model, {id(tensor): tensor for _, tensor in _tensors(model) if id(tensor) not in copied})


def _in_words(modules: Iterable[Any]) -> str:
    """The `module_settings` of a model, with the mode of pooling."""
    modes = ((name, settings.get("pooling_mode")) for name, settings in modules)
    return ", ".join(name if mode is None else f"{name} {mode}" for name, mode in modes)
