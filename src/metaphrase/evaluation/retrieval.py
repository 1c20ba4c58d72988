"""Translation retrieval: does a sentence find its own translation among all of the test set?

For each language the accuracy of cosine top-1 in both directions, with bootstrap intervals; means over the language
sets that the literature reports; paired tests between two results on the same data. Accuracies are in percent, but for
`RetrievalEvaluator`, which follows sentence-transformers' evaluators.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling

from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.evaluation.significance import (
    ALPHA,
    CONFIDENCE,
    RESAMPLES,
    holm,
    paired_bootstrap,
    pooled_bootstrap_interval,
    pooled_paired_bootstrap,
    verdict,
)
from metaphrase.exceptions import DataMismatchError, ModelError
from metaphrase.io.environment import versions
from metaphrase.mining.margins import neighbour_scores
from metaphrase.mining.search import nearest_neighbours
from metaphrase.modeling.languages import LanguageEmbedding, fold_languages
from metaphrase.modeling.packing import packed

logger = logging.getLogger(__name__)


def _languages(codes: str) -> tuple[str, ...]:
    return tuple(codes.split())


_XTREME = _languages(
    "af ar bg bn de el es et eu fa fi fr he hi hu id it ja jv ka kk ko ml mr nl pt ru sw ta te th tl tr ur vi zh"
)
_FEWER_THAN_1000 = _languages("jv ka kk ml sw ta te th")

#: The language sets whose means are reported on Tatoeba. 36, 28 and 14 are XTREME's and DAP's: 28 leaves out the
#: languages with fewer than 1,000 pairs, and 14, the languages of XNLI, is no subset of it (sw, th). 8, 5 and 4 are
#: the low-resource sets of WACSE.
TATOEBA_GROUPS: dict[str, tuple[str, ...]] = {
    "36": _XTREME,
    "28": tuple(language for language in _XTREME if language not in _FEWER_THAN_1000),
    "14": _languages("ar bg de el es fr hi ru sw th tr ur vi zh"),
    "8": _languages("tl jv sw ml te mr kk ka"),
    "5": _languages("kk te ka jv tl"),
    "4": _languages("kk te ka jv"),
}

DIRECTIONS = ("source_to_target", "target_to_source")

#: Encoders whose hidden state *k* is the output of their first *k* layers alone: no norm follows the last one.
_TRUNCATABLE = ("bert", "camembert", "electra", "mpnet", "roberta", "xlm-roberta")
#: Similarities held at a time (128 MB).
_CHUNK = 1 << 25
#: Mean cosine of sentences that are no translations of each other above which the embeddings have collapsed.
COLLAPSED_COSINE = 0.99

Hits = tuple[NDArray[np.bool_], NDArray[np.bool_]]
Encode = Callable[..., NDArray[Any]]
#: A model for all texts, or one for each language.
Encoders: TypeAlias = SentenceTransformer | Mapping[str, SentenceTransformer]


def retrieval_hits(
    source_nh: NDArray[Any],
    target_nh: NDArray[Any],
    *,
    match_text: tuple[Sequence[str], Sequence[str]] | None = None,
    margin_k: int | None = None,
) -> Hits:
    """Whether each sentence's nearest neighbour on the other side, by cosine, is its translation.

    Of equally similar candidates the first one counts.

    Args:
        source_nh: Embeddings of the sources, shape ``(n, hidden)``.
        target_nh: Embeddings of the targets, row ``i`` translating source row ``i``, shape ``(n, hidden)``.
        match_text: The texts of both sides: finding another copy of the translation's text is then a hit, too.
        margin_k: Of so many nearest neighbours, take the one with the largest ratio margin in place of the cosine's first;
            with 4, the misses in percent are the xsim error (Heffernan et al. 2022).

    Returns:
        Hits of source → target and of target → source, boolean, shape ``(n,)`` each.

    Raises:
        ValueError: The sides differ in length, or an embedding is not finite.
    """
    if len(source_nh) != len(target_nh):
        raise ValueError(
            f"Retrieval needs one target per source, but got {len(source_nh)} sources and {len(target_nh)} targets."
        )
    sides = _normalise(source_nh), _normalise(target_nh)
    hits = []
    for query, pool in ((0, 1), (1, 0)):
        found_n = (
            _nearest(sides[query], sides[pool])
            if margin_k is None
            else _largest_margin(sides[query], sides[pool], margin_k)
        )
        gold_n = np.arange(len(found_n))
        if match_text is not None:
            gold_n = np.unique(np.asarray(match_text[pool], dtype=object), return_inverse=True)[1]
            found_n = gold_n[found_n]
        hits.append(found_n == gold_n)
    return hits[0], hits[1]


def _normalise(embeddings_nh: NDArray[Any]) -> NDArray[np.float32]:
    embeddings_nh = np.asarray(embeddings_nh, dtype=np.float32)
    norms_n = np.linalg.norm(embeddings_nh, axis=1, keepdims=True)
    if not np.isfinite(norms_n).all():
        raise ModelError(
            f"{np.count_nonzero(~np.isfinite(norms_n))} of {len(norms_n)} embeddings are not finite. "
            "The model has diverged, or overflows in half precision."
        )
    return embeddings_nh / np.maximum(norms_n, np.finfo(np.float32).tiny)


def unrelated_cosine(source_nh: NDArray[Any], target_nh: NDArray[Any]) -> float | None:
    """Mean cosine of two sentences of either side that are neither the same nor each other's translation.

    Args:
        source_nh: Embeddings of the sources, shape ``(n, hidden)``.
        target_nh: Embeddings of the targets, row ``i`` translating source row ``i``, shape ``(n, hidden)``.

    Returns:
        The mean, or None of a single pair, which has no such sentences.

    Raises:
        ModelError: An embedding is not finite.

    >>> unrelated_cosine(np.eye(2), np.eye(2))
    0.0
    """
    n = len(source_nh)
    if n < 2:
        return None
    sides = [_normalise(side_nh).astype(np.float64) for side_nh in (source_nh, target_nh)]
    total_h = sides[0].sum(axis=0) + sides[1].sum(axis=0)
    related = sum(float(np.vdot(one, other)) for one in sides for other in sides)
    return (float(total_h @ total_h) - related) / (4 * n * (n - 1))


def _nearest(query_nh: NDArray[np.float32], pool_nh: NDArray[np.float32]) -> NDArray[np.intp]:
    """Row of the pool with the largest dot product, the first of equals, shape ``(n,)``.

    Copies of a row are searched once: a matrix product may round equal columns differently, and break their tie.
    """
    rows_n = np.ascontiguousarray(pool_nh).view(np.dtype((np.void, pool_nh.dtype.itemsize * pool_nh.shape[1])))
    first_m = np.sort(np.unique(rows_n.ravel(), return_index=True)[1])
    pool_hm = pool_nh[first_m].T
    size = max(1, _CHUNK // len(first_m))
    found = [(query_nh[i : i + size] @ pool_hm).argmax(axis=1) for i in range(0, len(query_nh), size)]
    return first_m[np.concatenate(found)]


def _largest_margin(query_nh: NDArray[np.float32], pool_nh: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Row of the pool with the largest ratio margin among the ``k`` nearest, shape ``(n,)``."""
    forward, backward = nearest_neighbours(query_nh, pool_nh, k), nearest_neighbours(pool_nh, query_nh, k)
    best_n = neighbour_scores(forward, backward, "ratio").argmax(axis=1)
    return forward.row_qk[np.arange(len(best_n)), best_n]


def prepare(
    model: SentenceTransformer, *, pooling: str | None = None, layer: int | None = None, max_length: int | None = None
) -> SentenceTransformer:
    """A view of a model under another protocol; it shares the model's weights and leaves the model as it is.

    Args:
        model: The model.
        pooling: Pooling mode (``"cls"``, ``"mean"``, …) in place of the model's own.
        layer: Hidden layer to pool, counted as in XTREME: 0 are the embeddings, 12 the output of a base-size encoder;
            negative from the end. The layers above are dropped.
        max_length: Tokens after which a sentence is cut (DAP: 32).

    Raises:
        ValueError: The model has no such layer, or no pooling to replace.
    """
    if pooling is None and layer is None and max_length is None:
        return model
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
    if layer is not None:
        encoder = model[0].auto_model
        if encoder.config.model_type not in _TRUNCATABLE:
            raise ModelError(
                f"A layer can be chosen for {', '.join(_TRUNCATABLE)}, but this encoder is of type "
                f"{encoder.config.model_type}. Evaluate it without a layer."
            )
        layers = encoder.encoder.layer
        if not -len(layers) - 1 <= layer <= len(layers):
            raise ModelError(f"Layer {layer} was asked for, but the encoder has layers 0 to {len(layers)}.")
        del layers[layer if layer >= 0 else len(layers) + 1 + layer :]
        encoder.config.num_hidden_layers = len(layers)
    if pooling is not None:
        places = [name for name, module in model.named_children() if isinstance(module, Pooling)]
        if not places:
            raise ModelError(f"Pooling {pooling!r} was asked for, but the model has no pooling module to replace.")
        replaced = model.get_submodule(places[0])
        model.set_submodule(places[0], Pooling(replaced.embedding_dimension, pooling))
    if max_length is not None:
        model.max_seq_length = max_length
    return model


def resolve_prompt(model: SentenceTransformer, prompt: str | None) -> str:
    """Text to put before each sentence: ``"auto"`` is the query prompt that the model stores, None is no prompt."""
    if prompt == "auto":
        return getattr(model, "prompts", {}).get("query") or ""
    return prompt or ""


def find_translations(
    model: Encoders,
    sets: Mapping[str, ParallelSet],
    *,
    prompt: str | None = None,
    batch_size: int = 32,
    text_equality: bool = False,
    margin_k: int | None = None,
    show_progress: bool = False,
    encode: Encode | None = None,
) -> dict[str, Hits]:
    """Hits of `retrieval_hits` for every language, each distinct sentence encoded once.

    Arguments as in `evaluate_retrieval`.
    """
    sides = _embedded(model, sets, prompt=prompt, batch_size=batch_size, show_progress=show_progress, encode=encode)
    return {
        language: retrieval_hits(
            source_nh,
            target_nh,
            match_text=(sets[language].sources, sets[language].targets) if text_equality else None,
            margin_k=margin_k,
        )
        for language, source_nh, target_nh in sides
    }


def _embedded(
    model: Encoders,
    sets: Mapping[str, ParallelSet],
    *,
    prompt: str | None,
    batch_size: int,
    show_progress: bool,
    encode: Encode | None,
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Each language with the embeddings of its sources and targets, each distinct sentence encoded once."""
    models = model if isinstance(model, Mapping) else {"": model}
    texts: dict[str, dict[str, int]] = {}

    def model_of(language: str) -> str:
        return language if isinstance(model, Mapping) else ""

    def places(language: str, side: Iterable[str]) -> list[int]:
        """Where the sentences stand among the distinct ones of their model."""
        known = texts.setdefault(model_of(language), {})
        return [known.setdefault(text, len(known)) for text in side]

    rows = {
        language: (places(s.language, s.sources), places(TARGET_LANGUAGE, s.targets)) for language, s in sets.items()
    }
    if missing := sorted(texts.keys() - models.keys()):
        raise ValueError(f"There is no model for {', '.join(missing)}, only for {', '.join(sorted(models))}.")
    embeddings_th: dict[str, NDArray[Any]] = {}
    for key, known in texts.items():
        encoder = models[key]
        with packed(encoder) if isinstance(encoder, SentenceTransformer) else nullcontext():
            embeddings_th[key] = (encode or encoder.encode)(
                list(known),
                prompt=resolve_prompt(encoder, prompt),
                batch_size=batch_size,
                show_progress_bar=show_progress,
                convert_to_numpy=True,
            )
    for language, s in sets.items():
        source_t, target_t = rows[language]
        yield (
            language,
            embeddings_th[model_of(s.language)][source_t],
            embeddings_th[model_of(TARGET_LANGUAGE)][target_t],
        )


def evaluate_retrieval(
    model: Encoders,
    sets: Mapping[str, ParallelSet],
    *,
    name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    text_equality: bool = False,
    margin_k: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    show_progress: bool = False,
    encode: Encode | None = None,
) -> dict[str, Any]:
    """Measure retrieval in both directions for every language.

    Args:
        model: A SentenceTransformer, or anything with its ``encode``; or one for each language, English included (see
            :func:`metaphrase.modeling.languages.fold_languages`).
        sets: Parallel sentences per language, from `load_parallel_folder`.
        name: The model's name in the result.
        prompt: Text before each sentence on both sides: None for nothing, ``"auto"`` for the query prompt that the
            model stores (E5's ``"query: "``).
        batch_size: Sentences per forward pass.
        text_equality: Count another copy of the translation's text as a hit. Test sets repeat sentences; without this,
            only the translation's own row counts, as in the papers.
        margin_k: Retrieve by the ratio margin over so many neighbours, see `retrieval_hits`; None takes the cosine.
        resamples: Bootstrap resamples of the intervals.
        seed: Seed of the bootstrap.
        show_progress: Show a progress bar while encoding.
        encode: Stands in for ``model.encode``, with its signature.

    Returns:
        A dictionary for JSON, accuracies in percent::

            {"suite": "retrieval", "model": name,
             "languages": {"sw": {"n": 390, "sha256": …,
                                  "source_to_target": {"accuracy": 73.3, "interval": [68.9, 77.7], "hits": "1101…"},
                                  "target_to_source": {…}, "mean": {"accuracy": …, "interval": …}}},
             "groups": {"36": {"n": 36, "source_to_target": {…}, …}},  # where all its languages are there
             "average": {"n": 1, …}, "settings": {…}, "versions": {…}, "seconds": 12.3}

        ``n`` counts pairs for a language, languages for a group and the average. ``hits`` lets `compare_retrieval`
        test two results against each other later.
    """
    start = time.perf_counter()
    hits = find_translations(
        model,
        sets,
        prompt=prompt,
        batch_size=batch_size,
        text_equality=text_equality,
        margin_k=margin_k,
        show_progress=show_progress,
        encode=encode,
    )

    def summary(languages: Iterable[str]) -> dict[str, Any]:
        chosen = {language: hits[language] for language in languages}
        scores = {
            "source_to_target": {language: both[0] for language, both in chosen.items()},
            "target_to_source": {language: both[1] for language, both in chosen.items()},
            "mean": {language: np.mean(both, axis=0) for language, both in chosen.items()},
        }
        return {
            key: {
                "accuracy": 100 * float(np.mean([np.mean(score) for score in by_language.values()])),
                "interval": list(pooled_bootstrap_interval(by_language, resamples=resamples, seed=seed)),
            }
            for key, by_language in scores.items()
        }

    one: Any = next(iter(model.values())) if isinstance(model, Mapping) else model
    languages: dict[str, Any] = {}
    for language, both in hits.items():
        result = summary([language])
        for direction, hits_n in zip(DIRECTIONS, both, strict=True):
            result[direction]["hits"] = "".join("01"[hit] for hit in hits_n.tolist())
        languages[language] = {"n": len(both[0]), "sha256": sets[language].sha256, **result}
    return {
        "suite": "retrieval",
        "model": name or type(one).__name__,
        "languages": languages,
        "groups": {
            group: {"n": len(members), **summary(members)}
            for group, members in TATOEBA_GROUPS.items()
            if hits.keys() >= set(members)
        },
        "average": {"n": len(hits), **summary(hits)},
        "settings": {
            "prompt": resolve_prompt(one, prompt),
            **_protocol(one),
            "batch_size": batch_size,
            "text_equality": text_equality,
            "margin_k": margin_k,
            "confidence": CONFIDENCE,
            "resamples": resamples,
            "seed": seed,
            "data": ", ".join(sorted({_pattern(s) for s in sets.values() if s.path})),
            "data_sha256": hashlib.sha256("".join(sets[x].sha256 for x in sorted(sets)).encode()).hexdigest(),
        },
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 3),
    }


def _pattern(parallel: ParallelSet) -> str:
    """Path of a set for any language: ``data/xx-en.test.tsv.gz``."""
    path = parallel.path or Path()
    return str(path.with_name(f"xx{path.name.removeprefix(parallel.language)}"))


def _protocol(model: SentenceTransformer) -> dict[str, Any]:
    """Pooling, pooled layer and length limit of a model; None where it has no such thing."""
    modules = list(model) if isinstance(model, SentenceTransformer) else []
    config = getattr(getattr(modules[0], "auto_model", None), "config", None) if modules else None
    return {
        "pooling": next((module.pooling_mode for module in modules if isinstance(module, Pooling)), None),
        "layer": getattr(config, "num_hidden_layers", None),
        "max_length": getattr(model, "max_seq_length", None),
    }


def compare_retrieval(
    before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Paired test of two results of `evaluate_retrieval` over the same pairs, on the mean of both directions.

    Args:
        before: Result of the baseline; it may have more languages.
        after: Result to test; all of its languages are compared.
        resamples: Bootstrap resamples.
        seed: Seed of the bootstrap.

    Returns:
        ``{"languages": {"sw": {"n", "before", "after", "difference", "interval", "p_value", "p_adjusted", "verdict"}},
        "pooled": {…}, "settings": {…}}`` in percentage points. A language's verdict (``"better"``, ``"tie"``,
        ``"worse"``) follows from Holm's correction over the languages, the pooled one from its own p-value.

    Raises:
        ValueError: The results are not over the same pairs, or count hits differently.
    """
    if missing := sorted(after["languages"].keys() - before["languages"].keys()):
        raise DataMismatchError(
            f"The baseline result lacks {', '.join(missing)}; it has {', '.join(before['languages'])}. "
            "Evaluate both models on the same languages."
        )
    for language, result in after["languages"].items():
        if result["sha256"] != before["languages"][language]["sha256"]:
            raise DataMismatchError(
                f"The two results for {language!r} are over different pairs ({before['languages'][language]['n']} "
                f"before, {result['n']} after). Evaluate both models on the same data."
            )
    if before["settings"]["text_equality"] != after["settings"]["text_equality"]:
        raise DataMismatchError(
            "Only one of the two results counts equal texts as hits. Evaluate both in the same way."
        )
    if before["settings"].get("margin_k") != after["settings"].get("margin_k"):
        raise DataMismatchError(
            "The two results score neighbours by different margins. Evaluate both in the same way."
        )
    before_scores = {language: _item_scores(before["languages"][language]) for language in after["languages"]}
    after_scores = {language: _item_scores(result) for language, result in after["languages"].items()}
    tests = {
        language: paired_bootstrap(before_scores[language], scores, resamples=resamples, seed=seed)
        for language, scores in after_scores.items()
    }
    pooled = pooled_paired_bootstrap(before_scores, after_scores, resamples=resamples, seed=seed)
    adjusted = holm({language: test.p_value for language, test in tests.items()})
    return {
        "languages": {
            language: {
                "before": 100 * float(before_scores[language].mean()),
                "after": 100 * float(after_scores[language].mean()),
                **_as_json(asdict(test)),
                "p_adjusted": adjusted[language],
                "verdict": verdict(test.difference, adjusted[language]),
            }
            for language, test in tests.items()
        },
        "pooled": {
            "languages": len(tests),
            "before": 100 * float(np.mean([scores.mean() for scores in before_scores.values()])),
            "after": 100 * float(np.mean([scores.mean() for scores in after_scores.values()])),
            **_as_json(asdict(pooled)),
            "verdict": verdict(pooled.difference, pooled.p_value),
        },
        "settings": {
            "test": "paired bootstrap over pairs, mean of both directions",
            "correction": "Holm",
            "alpha": ALPHA,
            "confidence": CONFIDENCE,
            "resamples": resamples,
            "seed": seed,
        },
    }


def _item_scores(result: Mapping[str, Any]) -> NDArray[np.float64]:
    """Mean of each pair's hits in both directions, shape ``(n,)``."""
    return np.mean([[hit == "1" for hit in result[direction]["hits"]] for direction in DIRECTIONS], axis=0)


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


class RetrievalEvaluator(BaseEvaluator):
    """Retrieval accuracy in the training loop, by language and direction, and a warning of embeddings that collapse.

    As in sentence-transformers' evaluators, the metrics are fractions, their names begin with the evaluator's, and a
    line per evaluation is added to ``retrieval_evaluation_{name}_results.csv`` in the output folder. Beside the accuracies
    it has ``unrelated_cosine``, the mean over the languages; above `COLLAPSED_COSINE` it is warned of.

    Args:
        sets: Parallel sentences per language, from `load_parallel_folder`.
        name: Name of the data set, such as ``"dev"``.
        batch_size: Sentences per forward pass.
        prompt: Text before each sentence; None for nothing.
        show_progress_bar: Show a progress bar while encoding.
        write_csv: Write the CSV file.
        encode: Stands in for ``model.encode``, with its signature.
        language_embedding: A language embedding that is trained with the model; each text is then embedded with its
            language's vector.

    Relations: `sentence_transformers`' ``TranslationEvaluator`` measures one language and counts equal texts as hits.
    """

    def __init__(
        self,
        sets: Mapping[str, ParallelSet],
        *,
        name: str = "",
        batch_size: int = 32,
        prompt: str | None = None,
        show_progress_bar: bool = False,
        write_csv: bool = True,
        encode: Encode | None = None,
        language_embedding: LanguageEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.sets = dict(sets)
        self.name = name
        self.batch_size = batch_size
        self.prompt = prompt
        self.show_progress_bar = show_progress_bar
        self.write_csv = write_csv
        self.encode = encode
        self.language_embedding = language_embedding
        self.primary_metric = "mean_accuracy"
        self.csv_file = f"retrieval_evaluation{'_' * bool(name)}{name}_results.csv"

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model; arguments as in `BaseEvaluator`."""
        embedding = self.language_embedding
        sides = _embedded(
            model if embedding is None else fold_languages(model, embedding),
            self.sets,
            prompt=self.prompt,
            batch_size=self.batch_size,
            show_progress=self.show_progress_bar,
            encode=self.encode,
        )
        accuracies: dict[str, tuple[float, float]] = {}
        cosines: list[float] = []
        for language, source_nh, target_nh in sides:
            both = retrieval_hits(source_nh, target_nh)
            accuracies[language] = float(both[0].mean()), float(both[1].mean())
            if (cosine := unrelated_cosine(source_nh, target_nh)) is not None:
                cosines.append(cosine)
        directions = np.mean(list(accuracies.values()), axis=0)
        scores = {"mean_accuracy": float(directions.mean())}
        scores |= {f"{key}_accuracy": float(value) for key, value in zip(DIRECTIONS, directions, strict=True)}
        scores |= {f"{language}_accuracy": sum(both) / 2 for language, both in accuracies.items()}
        logger.info("Retrieval %s at step %d: %.2f %%", self.name, steps, 100 * scores["mean_accuracy"])
        if cosines:
            scores["unrelated_cosine"] = float(np.mean(cosines))
            self._warn_of_collapse(scores["unrelated_cosine"], steps)
        if output_path is not None and self.write_csv:
            self._append_csv(Path(output_path), {"epoch": epoch, "steps": steps, **scores})
        metrics = self.prefix_name_to_metrics(scores, self.name)
        accuracies_only = {key: value for key, value in metrics.items() if key.endswith("_accuracy")}
        self.store_metrics_in_model_card_data(model, accuracies_only, epoch, steps)
        return metrics

    def _warn_of_collapse(self, cosine: float, steps: int) -> None:
        if cosine > COLLAPSED_COSINE:
            logger.warning(
                "The embeddings have collapsed at step %d: sentences that do not translate each other have a mean cosine "
                "of %.4f, where at most %g is expected. Stop, and train again from the original encoder with a lower "
                "learning rate or larger batches; `metaphrase diagnose` tells more.",
                steps,
                cosine,
                COLLAPSED_COSINE,
            )

    def _append_csv(self, folder: Path, row: Mapping[str, float]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.csv_file
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(row.keys())
            writer.writerow(row.values())

    def get_config_dict(self) -> dict[str, Any]:
        """Settings that the model card names."""
        return {"prompt": self.prompt} if self.prompt else {}
