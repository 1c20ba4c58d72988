"""Steps between training and release: the merge with the original encoder, and the removal of language identity."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sentence_transformers import SentenceTransformer
from torch import Tensor

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.encoders.adapters import shared_copy
from metaphrase.encoders.debiasing import language_directions, without_directions
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.prompts import search_prompts
from metaphrase.evaluation.guard_data import LabelledData, Part, load_guard_data, spread
from metaphrase.evaluation.guards import AlphaCurve, Guard, choose_alpha, data_guard, structure_guard
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.similarity_structure import structure_texts
from metaphrase.merging import TaskVector
from metaphrase.merging.projection import find_projection
from metaphrase.modeling.bulk import distinct_texts
from metaphrase.postprocessing.debiasing import (
    DECLARATION,
    MEASURED,
    SAMPLED_TEXTS,
    DirectionsCurve,
    check_direction_count,
    choose_directions,
    debias,
    embed_languages,
    in_one_pool,
    parallel_texts,
)
from metaphrase.postprocessing.merging import write_curve
from metaphrase.publishing.contents import CURVE
from metaphrase.training.configuration import RunConfig

logger = logging.getLogger(__name__)

#: Weights of the trained encoder that ``merge: auto`` measures. Guards may hold at large weights if a term keeps the encoder
#: close to the original one, and without such a term only at the smallest weight.
COARSE_ALPHAS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
#: Maximum numbers when each weight is measured: items per language of a guard, and dev pairs of all languages.
GUARD_ITEMS, DEV_PAIRS = 100, 1000
#: What the number of directions of language identity is chosen by, in words.
COMPARED = "The gain is that over 0 directions; the guards compare with the encoder before training."
#: Maximum number of texts of a guard that is measured during training.
TRAINING_TEXTS = 5000
#: Similarity structure also covers up to so many languages of the dev sets that have so many different sentences.
OWN_LANGUAGES, OWN_SENTENCES = 5, 20


@dataclass(frozen=True)
class Finished:
    """An encoder for release, the facts ``merge`` and ``debias`` for its card, and gain and cost by weight, if the weight
    was chosen.
    """

    encoder: SentenceTransformer
    facts: dict[str, Any] = field(default_factory=dict)
    curve: AlphaCurve | None = None


def check_finish(model: SentenceTransformer, config: RunConfig) -> None:
    """Refuse guards without data, and more directions than languages can differ in, before training.

    Raises:
        MissingFileError: A folder of a guard has no data.
        DataError: Its data cannot be read, or are too few to be halved.
        UsageError: There are too many directions.
    """
    for part in get_args(Part):
        _guard_data(config, part)
    directions: Any = config.debias
    if directions != "auto":
        check_direction_count(directions, model)


def release_guards(
    original: SentenceTransformer, config: RunConfig, part: Part, dev: Mapping[str, ParallelSet] | None = None
) -> list[Guard]:
    """Guards on abilities other than retrieval of translations, measured before training.

    Weights are chosen on the part ``dev`` and releases measured on the part ``test``, which share no item; halves of one file
    may share texts, such as paragraphs. Similarity structure also covers languages of ``dev``.
    """
    structure = structure_guard(original, _structure_texts(part, dev), max_loss=config.max_structure_loss)
    return [structure, *_label_guards(original, config, part)]


def training_guards(original: SentenceTransformer, config: RunConfig, dev: Mapping[str, ParallelSet]) -> list[Guard]:
    """Guards measured during training on the ``dev`` part of their data; like the dev sets, encoded without a prompt.

    Data with many texts, such as answers to find among all sentences of a benchmark, would take too long.
    """
    data = _guard_data(config, "dev")
    if large := [one.name for one in data if not _is_small(one)]:
        logger.warning(
            "Skipped during training, because they have more than %d texts: %s.", TRAINING_TEXTS, ", ".join(large)
        )
    guards = (data_guard(original, one) for one in data if _is_small(one))
    return [structure_guard(original, _structure_texts("dev", dev)), *guards]


def _is_small(data: LabelledData) -> bool:
    return len(data.texts) <= TRAINING_TEXTS


def encoded_texts(
    config: RunConfig, dev: Mapping[str, ParallelSet], *, prompts: int, evaluations: int = 0
) -> list[tuple[list[str], int]]:
    """Groups of texts that `finish` and the guards of a run encode, and how often each group is encoded.

    ``prompts`` is the number of prompts that the original encoder is measured with, ``evaluations`` the number of
    measurements during training.
    """
    texts = parallel_texts() if config.debias else {}
    groups = [(_distinct(_structure_texts("test")), 2)]  # before and after training
    groups += [(data.texts, prompts + 1) for data in _guard_data(config, "test")]
    if evaluations:
        groups.append((_distinct(_structure_texts("dev", dev)), 1 + evaluations))
        groups += [(data.texts, 1 + evaluations) for data in _guard_data(config, "dev") if _is_small(data)]
    if config.merge == "auto":
        groups.append((_distinct(_structure_texts("dev", dev)), 1 + len(COARSE_ALPHAS)))
        groups += [
            (data.texts, prompts + len(COARSE_ALPHAS)) for data in (_gain_data(dev), *_guard_data(config, "dev"))
        ]
    if config.merge == "auto" and config.debias and config.debias != "auto":
        groups.append((_distinct(parallel_texts(most=SAMPLED_TEXTS)), len(COARSE_ALPHAS)))
    if config.debias == "auto":
        groups.append((_gain_data(dev).texts, 2 + len(MEASURED)))  # before, and without 0 to 40 directions
        groups += [(data.texts, prompts + 1 + len(MEASURED)) for data in _guard_data(config, "dev")]
    return [*groups, (_distinct(texts), 1)]


def finish(
    model: SentenceTransformer,
    config: RunConfig,
    *,
    pooling: str,
    dev: Mapping[str, ParallelSet],
    show_progress: bool = False,
) -> Finished:
    """Merge a trained encoder with the original one, and project language identity out of it, as configured.

    The encoder itself does not change. If the weight is to be chosen, ``dev`` shows the gain, and the curve is written to
    the output folder. A number of directions that is to be chosen is chosen after the weight. ``pooling`` is the pooling of
    an original encoder that has none.
    """
    facts: dict[str, Any] = {}
    curve = None
    texts = parallel_texts() if config.debias else {}
    if config.merge is not None or config.debias == "auto":
        start = load_encoder(config.model, pooling=config.pooling, default_pooling=pooling, device=str(model.device))
        start = start.to(model.dtype)  # a model in half precision is trained in float32
        start.max_seq_length = model.max_seq_length
    if config.merge is not None:
        vector = TaskVector.between(start, shared_copy(model))
        alpha: Any = config.merge
        if alpha == "auto":
            curve = _choose(start, vector, config, dev)
            write_curve(curve, Path(str(config.output_dir)) / CURVE)
            alpha = curve.alpha
        merged = vector.apply(start, alpha)
        merged.model_card_data = copy.copy(model.model_card_data)
        model, facts["merge"] = merged.eval(), {"alpha": alpha}
        if curve is not None:
            facts["merge"] |= {"chosen": str(curve)}
    directions: Any = config.debias if config.debias == "auto" else _further_directions(model, config.debias)
    if config.debias and not directions:
        logger.info("--debias %d removes nothing: the encoder projects out as many directions already.", config.debias)
    if directions:
        facts["debias"] = {"directions": directions, "languages": len(texts), "data": DECLARATION}
        embeddings = embed_languages(model, texts, show_progress=show_progress)
        if directions == "auto":
            chosen = _choose_directions(start, model, embeddings, config, dev)
            directions = chosen.directions
            facts["debias"] |= {"directions": directions, "chosen": f"{chosen} {COMPARED}"}
        if directions:
            model = without_directions(model, language_directions(embeddings, directions)[0])
    return Finished(model, facts, curve)


def _further_directions(model: SentenceTransformer, directions: Any) -> int:
    """How many directions remain to be removed; a model that was made from a debiased one projects some out already."""
    removed = find_projection(model, len(model))
    return max(0, directions - (0 if removed is None else len(removed[1])))


def _choose(
    start: SentenceTransformer,
    vector: TaskVector,
    config: RunConfig,
    dev: Mapping[str, ParallelSet],
) -> AlphaCurve:
    """Choose the weight by its gain on the dev pairs, under guards."""
    directions: Any = 0 if config.debias == "auto" else config.debias  # chosen after the weight
    sample = parallel_texts(most=SAMPLED_TEXTS) if directions else {}

    def finished(model: SentenceTransformer) -> SentenceTransformer:
        further = _further_directions(model, directions)
        model = debias(model, sample, further)[0] if further else shared_copy(model)
        model.prompts = search_prompts(start.prompts)
        return model

    gain = data_guard(start, _gain_data(dev), prompt="auto", prompts=[None])
    guards = release_guards(start, config, "dev", dev)
    return choose_alpha(start, vector, gain, guards, alphas=COARSE_ALPHAS, finish=finished)


def _choose_directions(
    start: SentenceTransformer,
    model: SentenceTransformer,
    embeddings: Mapping[str, Tensor],
    config: RunConfig,
    dev: Mapping[str, ParallelSet],
) -> DirectionsCurve:
    """Choose the number of directions to remove from a merged encoder, under the guards with labels.

    The gain is that over the merged encoder; the guards compare with the encoder before training.
    """
    released = shared_copy(model)
    released.prompts = {} if config.merge is None else search_prompts(start.prompts)
    gain = data_guard(released, in_one_pool(_gain_data(dev)), prompt="auto")
    return choose_directions(released, embeddings, gain, _label_guards(start, config, "dev"))


def _label_guards(original: SentenceTransformer, config: RunConfig, part: Part) -> list[Guard]:
    return [data_guard(original, one, prompt="auto", prompts=[None]) for one in _guard_data(config, part)]


def _structure_texts(part: Part, dev: Mapping[str, ParallelSet] | None = None) -> dict[str, dict[str, str]]:
    """The packaged texts of a part, and sentences of dev sets in languages that these lack, with their translations."""
    texts = structure_texts(english=GUARD_ITEMS, articles="odd" if part == "dev" else "even")
    distinct = {language: one.english for language, one in sorted((dev or {}).items())}
    own = [one for one, sentences in distinct.items() if one not in texts and len(sentences) >= OWN_SENTENCES]
    return texts | {one: dict(spread([*distinct[one].items()], GUARD_ITEMS)) for one in spread(own, OWN_LANGUAGES)}


def _guard_data(config: RunConfig, part: Part) -> list[LabelledData]:
    return [load_guard_data(folder, part, halved=True, max_items=GUARD_ITEMS) for folder in config.guard]


def _gain_data(dev: Mapping[str, ParallelSet]) -> LabelledData:
    """The dev pairs that show the gain of a weight."""
    pairs = {}
    for language, one in dev.items():
        pairs[language] = one.rows(spread(range(len(one.sources)), max(20, DEV_PAIRS // len(dev))))
    return LabelledData("dev", pairs, evaluate_retrieval)


def _distinct(texts: Mapping[str, Iterable[str]]) -> list[str]:
    """The distinct texts of all languages, each of which is encoded once."""
    return distinct_texts(texts.values())[0]
