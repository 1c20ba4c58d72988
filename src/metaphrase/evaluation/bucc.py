"""Bitext mining as a test: which sentences of two monolingual texts are translations? BUCC, and xsim.

Numbers that are called "BUCC" come from protocols that cannot be compared: a threshold may be chosen on the very pairs
that are scored, or on others. Here each has a name (`PROTOCOLS`), and there is no default.

Reference: Zweigenbaum et al. 2017, "Overview of the Second BUCC Shared Task"; Artetxe and Schwenk 2019, "Margin-based
Parallel Corpus Mining with Multilingual Sentence Embeddings", section 4.1.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator

from metaphrase.corpus.parallel import TARGET_LANGUAGE
from metaphrase.corpus.text import MAX_CHARS, read_lines
from metaphrase.evaluation.retrieval import Encode, _protocol, resolve_prompt
from metaphrase.evaluation.significance import ALPHA, CONFIDENCE, RESAMPLES, holm, verdict
from metaphrase.exceptions import DataError, DataMismatchError, MissingFileError
from metaphrase.io.environment import versions
from metaphrase.mining.margins import (
    Margin,
    Pairs,
    Retrieval,
    best_threshold,
    f1_scores,
    neighbour_scores,
    select_pairs,
)
from metaphrase.mining.search import Neighbours, nearest_neighbours, unit_rows
from metaphrase.modeling.packing import packed

logger = logging.getLogger(__name__)


class BuccProtocol(NamedTuple):
    """What goes by the name of a protocol.

    Attributes:
        tuned: Split whose gold tells the threshold.
        scored: Split that is scored with it.
        duplicates: What becomes of repeated lines, one of `DUPLICATES`.
        comparison: How a kept pair's score stands to the threshold, one of `COMPARISONS`.
    """

    tuned: str
    scored: str
    duplicates: Duplicates
    comparison: Comparison


#: BUCC as it was measured.
#:
#: - ``train_oracle``: the best F1 that a threshold can give on the training set (DAP, Table 2);
#: - ``train_to_test``: the shared task's own; the gold of its test set is not public (DAP, Table 3);
#: - ``sample_to_train``: XTREME's, which calls the sample "dev" and the training set "test"; DAP's released code has the
#:   same splits, but keeps repeated lines and compares by ``>``;
#: - ``sample_oracle``: the best F1 on the sample (WACSE, mSimCSE).
PROTOCOLS: dict[str, BuccProtocol] = {
    "train_oracle": BuccProtocol("training", "training", "keep", ">"),
    "train_to_test": BuccProtocol("training", "test", "keep", ">"),
    "sample_to_train": BuccProtocol("sample", "training", "unify", ">="),
    "sample_oracle": BuccProtocol("sample", "sample", "keep", ">="),
}
#: What becomes of lines that occur more than once: ``unify`` searches them once and leaves them out of the pairs
#: (LASER, XTREME), ``keep`` searches each of them (DAP, mSimCSE).
DUPLICATES = ("unify", "keep")
#: How a pair's score has to stand to the threshold: ``>`` (DAP) or ``>=`` (LASER, XTREME).
COMPARISONS = (">", ">=")

Protocol = Literal["train_oracle", "train_to_test", "sample_to_train", "sample_oracle"]
Duplicates = Literal["unify", "keep"]
Comparison = Literal[">", ">="]

#: Queries that are searched between two steps of a progress bar.
_QUERIES = 1 << 13

_FILE = re.compile(r"(?P<language>[a-z]{2,3})-en\.(?P<split>[a-z]+)\.(?P<part>[a-z]+)(\.gz)?")


@dataclass(frozen=True)
class MiningSet:
    """Two monolingual texts, and which of their sentences are translations.

    Attributes:
        language: Language of the sources; the targets are English.
        split: ``"training"``, ``"test"`` or ``"sample"``.
        source_ids: Identifiers of the sources.
        sources: Sentences in the language.
        target_ids: Identifiers of the targets.
        targets: English sentences.
        gold: Identifiers of the pairs.
    """

    language: str
    split: str
    source_ids: tuple[str, ...]
    sources: tuple[str, ...]
    target_ids: tuple[str, ...]
    targets: tuple[str, ...]
    gold: frozenset[tuple[str, str]]

    @property
    def sha256(self) -> str:
        """Digest of both texts and the gold, as lines ``id<TAB>sentence`` and ``id<TAB>id``."""
        digest = hashlib.sha256()
        for ids, texts in ((self.source_ids, self.sources), (self.target_ids, self.targets)):
            digest.update("".join(f"{i}\t{text}\n" for i, text in zip(ids, texts, strict=True)).encode())
        digest.update("".join(f"{source}\t{target}\n" for source, target in sorted(self.gold)).encode())
        return digest.hexdigest()


MiningData = Mapping[str, Mapping[str, MiningSet]]


def load_bucc_folder(
    path: str | Path, protocol: Protocol, languages: Sequence[str] | None = None
) -> dict[str, dict[str, MiningSet]]:
    """Read what a protocol needs of BUCC: ``zh-en.sample.zh``, ``….en`` (``id<TAB>sentence``) and ``….gold`` (two ids).

    The files, packed (``.gz``) or not, lie in the folder or in a folder ``zh-en`` in it, under the shared task's names
    (``training``, ``test``, ``sample``), not under XTREME's. Lines end at line feeds, and quotation marks are text.

    Args:
        path: The folder.
        protocol: One of `PROTOCOLS`.
        languages: Languages to read, in this order; None reads all that have the splits.

    Returns:
        ``{"zh": {"sample": …}}``.

    Raises:
        FileNotFoundError: The folder, or a file of a split, is not there; the message says what is.
        ValueError: There is no such protocol, or a line is malformed; the message names it.
    """
    needed = _needed(protocol)
    folder = Path(path)
    files = bucc_files(folder)
    there = sorted(f"{language} {split}" for language, splits in files.items() for split in splits)
    chosen = list(languages or (language for language, splits in files.items() if splits.keys() >= set(needed)))
    sets: dict[str, dict[str, MiningSet]] = {}
    for language in chosen:
        sets[language] = {}
        for split in needed:
            parts = files.get(language, {}).get(split, {})
            if missing := [part for part in (language, TARGET_LANGUAGE, "gold") if part not in parts]:
                raise MissingFileError(
                    f"Protocol {protocol!r} needs {language}-en.{split}.{missing[0]}, which is not in {folder}. "
                    f"There is: {', '.join(there) or 'nothing of BUCC'}."
                )
            sets[language][split] = _read_set(language, split, parts)
    if not sets:
        raise MissingFileError(
            f"Protocol {protocol!r} needs the splits {' and '.join(needed)}, which no language in {folder} has. There "
            f"is: {', '.join(there) or 'nothing of BUCC'}."
        )
    return sets


def bucc_languages(path: str | Path, protocol: Protocol) -> list[str]:
    """Languages of a folder that have all files of a protocol's splits, in alphabetical order.

    Raises:
        FileNotFoundError: The folder is not there.
        ValueError: There is no such protocol.
    """
    needed = _needed(protocol)
    return sorted(
        language
        for language, splits in bucc_files(path).items()
        if all(splits.get(split, {}).keys() >= {language, TARGET_LANGUAGE, "gold"} for split in needed)
    )


def bucc_files(path: str | Path) -> dict[str, dict[str, dict[str, Path]]]:
    """Files of a folder by language, split, and what they hold (``"zh"``, ``"en"``, ``"gold"``).

    Raises:
        FileNotFoundError: The folder is not there.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise MissingFileError(f"{folder} is no folder. Give a folder with files such as zh-en.sample.zh.gz.")
    files: dict[str, dict[str, dict[str, Path]]] = {}
    for file in sorted([*folder.iterdir(), *folder.glob(f"*-{TARGET_LANGUAGE}/*")]):
        if match := _FILE.fullmatch(file.name):
            files.setdefault(match["language"], {}).setdefault(match["split"], {})[match["part"]] = file
    return files


def bucc_protocol(protocol: str) -> BuccProtocol:
    """A protocol by its name.

    Raises:
        ValueError: There is none of that name.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"BUCC is measured under a protocol: {', '.join(PROTOCOLS)}; {protocol!r} is none of them.")
    return PROTOCOLS[protocol]


def _needed(protocol: str) -> list[str]:
    """Its splits."""
    named = bucc_protocol(protocol)
    return list(dict.fromkeys((named.tuned, named.scored)))


def _read_set(language: str, split: str, parts: Mapping[str, Path]) -> MiningSet:
    sources, targets = (dict(_fields(parts[part], unique=True)) for part in (language, TARGET_LANGUAGE))
    gold = frozenset(_fields(parts["gold"]))
    if unknown := [pair for pair in sorted(gold) if pair[0] not in sources or pair[1] not in targets]:
        logger.warning("%s has pairs of unknown sentences, which cannot be found: %s.", parts["gold"], unknown[:3])
    return MiningSet(
        language, split, tuple(sources), tuple(sources.values()), tuple(targets), tuple(targets.values()), gold
    )


def _fields(path: Path, *, unique: bool = False) -> list[tuple[str, str]]:
    rows = []
    seen: set[str] = set()
    for number, line in read_lines(path, MAX_CHARS):
        fields = line.split("\t", 1) if isinstance(line, str) else []
        if len(fields) != 2:
            raise DataError(
                f"{path}:{number}: a line has two columns, {line if fields else 'unreadable'!r:.80} has not."
            )
        if unique and fields[0] in seen:
            raise DataError(f"{path}:{number}: the identifier {fields[0]!r} was used before.")
        seen.add(fields[0])
        rows.append((fields[0], fields[1]))
    return rows


def mine_set(
    model: Any,
    data: MiningSet,
    *,
    prompt: str | None = None,
    batch_size: int = 32,
    duplicates: Duplicates = "unify",
    show_progress: bool = False,
    encode: Encode | None = None,
    k: int = 4,
    margin: Margin = "ratio",
    retrieval: Retrieval = "max",
    device: str | None = None,
) -> Pairs:
    """The pairs that a model finds in a set, best first; arguments as in `evaluate_mining`.

    Returns:
        Pairs of positions in the set's texts.
    """
    sides = []
    for texts in (data.sources, data.targets):
        places: dict[str, int] = {}
        row_n = np.array([places.setdefault(text, len(places)) for text in texts])
        with packed(model) if isinstance(model, SentenceTransformer) else nullcontext():
            embeddings_th = (encode or model.encode)(
                list(places),
                prompt=resolve_prompt(model, prompt),
                batch_size=batch_size,
                show_progress_bar=show_progress,
                convert_to_numpy=True,
            )
        sides.append((unit_rows(embeddings_th), row_n))
    rows = [rows_th[row_n] if duplicates == "keep" else rows_th for rows_th, row_n in sides]
    forward, backward = (
        _neighbours(
            queries_qh, pool_ph, k, device=device, title=f"{data.language} {data.split}", show_progress=show_progress
        )
        for queries_qh, pool_ph in (rows, rows[::-1])
    )
    pairs = select_pairs(forward, backward, margin=margin, retrieval=retrieval)
    if duplicates == "keep":
        return pairs
    unique = [np.bincount(row_n) == 1 for _, row_n in sides]
    pairs = pairs.take(unique[0][pairs.source_c] & unique[1][pairs.target_c])
    first_s, first_t = (np.unique(row_n, return_index=True)[1] for _, row_n in sides)
    return Pairs(pairs.score_c, first_s[pairs.source_c], first_t[pairs.target_c])


def _neighbours(
    query_qh: NDArray[np.float32],
    pool_ph: NDArray[np.float32],
    k: int,
    *,
    device: str | None,
    title: str,
    show_progress: bool,
) -> Neighbours:
    """Nearest neighbours, with a progress bar."""
    parts = []
    with Progress(console=Console(stderr=True), transient=True, disable=not show_progress) as progress:
        bar = progress.add_task(f"Neighbours, {title}", total=len(query_qh))
        for first in range(0, max(len(query_qh), 1), _QUERIES):
            parts.append(nearest_neighbours(query_qh[first : first + _QUERIES], pool_ph, k, device=device))
            progress.advance(bar, len(parts[-1].row_qk))
    return Neighbours(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def evaluate_mining(
    model: Any,
    data: MiningData,
    *,
    protocol: Protocol,
    name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    k: int = 4,
    margin: Margin = "ratio",
    retrieval: Retrieval = "max",
    duplicates: Duplicates | None = None,
    comparison: Comparison | None = None,
    device: str | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    show_progress: bool = False,
    encode: Encode | None = None,
) -> dict[str, Any]:
    """Mine each language's texts, and score the pairs above a threshold against gold.

    Args:
        model: A SentenceTransformer, or anything with its ``encode``.
        data: Sets by language and split, from `load_bucc_folder`.
        protocol: One of `PROTOCOLS`: whose gold tells the threshold, and what is scored.
        name: The model's name in the result.
        prompt: Text before each sentence: None for nothing, ``"auto"`` for the query prompt that the model stores.
        batch_size: Sentences per forward pass.
        k: Neighbours in the margin.
        margin: ``"ratio"``, ``"distance"`` or ``"absolute"``; see `metaphrase.mining.margins.margin_score`.
        retrieval: See `metaphrase.mining.margins.select_pairs`.
        duplicates: One of `DUPLICATES`; None takes the protocol's own.
        comparison: One of `COMPARISONS`; None takes the protocol's own. It matters where scores equal a threshold from
            elsewhere.
        device: Where torch searches; see `metaphrase.mining.search.nearest_neighbours`.
        resamples: Bootstrap resamples of the intervals, over source sentences at a fixed threshold.
        seed: Seed of the bootstrap.
        show_progress: Show progress bars while encoding and searching.
        encode: Stands in for ``model.encode``, with its signature.

    Returns:
        A dictionary for JSON, shares in percent::

            {"suite": "mining", "model": name,
             "languages": {"zh": {"sources": 8624, "targets": 13589, "gold": 257, "sha256": …, "candidates": 8012,
                                  "kept": 250, "correct": 240, "precision": 96.0, "recall": 93.4, "f1": 94.7,
                                  "interval": [92.6, 96.5], "threshold": 1.12,
                                  "tuned_on": {"split": "sample", "sha256": …, "f1": 94.7}, "outcomes": {…}}},
             "average": {"n": 1, "f1": 94.7, "interval": …}, "settings": {…}, "versions": {…}, "seconds": 312.4}

        ``outcomes`` gives for each source sentence with a pair, kept or gold, the numbers of correct, kept and gold
        ones, by which `compare_mining` tests two results against each other later.

    Raises:
        ValueError: An option does not exist, or a language lacks a split.
    """
    start = time.perf_counter()
    tuned, scored, own_duplicates, own_comparison = bucc_protocol(protocol)
    duplicates, comparison = duplicates or own_duplicates, comparison or own_comparison
    _check_choice("duplicates", duplicates, DUPLICATES)
    _check_choice("comparison", comparison, COMPARISONS)
    languages: dict[str, Any] = {}
    for language, splits in data.items():
        if missing := {tuned, scored} - splits.keys():
            raise DataError(f"Protocol {protocol!r} needs the split {min(missing)!r} of {language!r}.")
        mined = {
            split: mine_set(
                model,
                splits[split],
                prompt=prompt,
                batch_size=batch_size,
                duplicates=duplicates,
                show_progress=show_progress,
                encode=encode,
                k=k,
                margin=margin,
                retrieval=retrieval,
                device=device,
            )
            for split in dict.fromkeys((tuned, scored))
        }
        best = best_threshold(mined[tuned].score_c, _correct(splits[tuned], mined[tuned]), len(splits[tuned].gold))
        score_c = mined[scored].score_c
        kept = mined[scored].take(score_c > best.threshold if comparison == ">" else score_c >= best.threshold)
        correct_c = _correct(splits[scored], kept)
        outcomes = _outcomes(splits[scored], kept, correct_c)
        shares = f1_scores(int(correct_c.sum()), len(correct_c), len(splits[scored].gold))
        languages[language] = {
            "sources": len(splits[scored].sources),
            "targets": len(splits[scored].targets),
            "gold": len(splits[scored].gold),
            "sha256": splits[scored].sha256,
            "candidates": len(score_c),
            "kept": len(correct_c),
            "correct": int(correct_c.sum()),
            **{key: 100 * share for key, share in zip(("precision", "recall", "f1"), shares, strict=True)},
            "threshold": best.threshold,
            "tuned_on": {"split": tuned, "sha256": splits[tuned].sha256, "f1": 100 * best.f1},
            "outcomes": {source: " ".join(map(str, counts)) for source, counts in outcomes.items()},
        }
        (resampled_r,) = _resampled_f1([languages[language]], resamples, np.random.default_rng(seed))
        languages[language]["interval"] = _interval(resampled_r)
    rng = np.random.default_rng(seed)
    resampled_lr = [_resampled_f1([languages[x]], resamples, rng)[0] for x in sorted(languages)]
    return {
        "suite": "mining",
        "model": name or type(model).__name__,
        "languages": languages,
        "average": {
            "n": len(languages),
            "f1": float(np.mean([result["f1"] for result in languages.values()])),
            "interval": _interval(np.mean(resampled_lr, axis=0)),
        },
        "settings": {
            "protocol": protocol,
            "tuned_on": tuned,
            "scored_on": scored,
            "margin": margin,
            "k": k,
            "retrieval": retrieval,
            "duplicates": duplicates,
            "comparison": comparison,
            "prompt": resolve_prompt(model, prompt),
            **_protocol(model),
            "batch_size": batch_size,
            "confidence": CONFIDENCE,
            "resamples": resamples,
            "seed": seed,
        },
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 3),
    }


def _check_choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"There is no {option} {value!r}; there are {', '.join(known)}.")


def _correct(data: MiningSet, pairs: Pairs) -> NDArray[np.bool_]:
    """Which pairs are gold, shape ``(pairs,)``."""
    return np.array(
        [
            (data.source_ids[source], data.target_ids[target]) in data.gold
            for source, target in zip(pairs.source_c.tolist(), pairs.target_c.tolist(), strict=True)
        ],
        dtype=bool,
    )


def _outcomes(data: MiningSet, kept: Pairs, correct_c: NDArray[np.bool_]) -> dict[str, tuple[int, int, int]]:
    """Correct, kept and gold pairs of each source sentence that has any."""
    sources = [data.source_ids[source] for source in kept.source_c.tolist()]
    n_kept, n_gold = Counter(sources), Counter(source for source, _ in data.gold)
    n_correct = Counter(source for source, right in zip(sources, correct_c.tolist(), strict=True) if right)
    return {source: (n_correct[source], n_kept[source], n_gold[source]) for source in sorted(n_kept | n_gold)}


def _resampled_f1(
    results: Sequence[Mapping[str, Any]], resamples: int, rng: np.random.Generator
) -> list[NDArray[np.float64]]:
    """F1, in percent, of results over the same set in samples of its source sentences, shape ``(resamples,)`` each.

    Source sentences with the same outcomes are drawn together, by one multinomial number.
    """
    sources = sorted({source for result in results for source in result["outcomes"]})
    table_sx = np.array(
        [[int(n) for r in results for n in r["outcomes"].get(source, "0 0 0").split()] for source in sources],
        dtype=np.int64,
    ).reshape(len(sources), -1)
    values_vx, count_v = np.unique(table_sx, axis=0, return_counts=True)
    n = max(results[0]["sources"], len(sources))
    drawn_rv = rng.multinomial(n, np.append(count_v, n - len(sources)) / n, size=resamples)
    sums_rx = drawn_rv[:, :-1] @ values_vx if len(sources) else np.zeros((resamples, 3 * len(results)))
    return [
        100 * 2 * sums_rx[:, at] / np.maximum(sums_rx[:, at + 1] + sums_rx[:, at + 2], 1)
        for at in range(0, 3 * len(results), 3)
    ]


def _interval(values_r: NDArray[np.float64]) -> list[float]:
    return np.quantile(values_r, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()


def compare_mining(
    before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Paired test of two results of `evaluate_mining` over the same sets: source sentences are drawn with replacement.

    Args:
        before: Result of the baseline; it may have more languages.
        after: Result to test; all of its languages are compared.
        resamples: Bootstrap resamples.
        seed: Seed of the bootstrap.

    Returns:
        What `metaphrase.evaluation.compare_retrieval` returns: per language and pooled ``before``, ``after``,
        ``difference``, ``interval`` (points of F1), ``p_value``, ``p_adjusted`` (Holm) and ``verdict``.

    Raises:
        ValueError: The results are over different sets, or under different protocols.
    """
    for key in ("protocol", "margin", "k", "retrieval", "duplicates", "comparison"):
        if before["settings"][key] != after["settings"][key]:
            raise DataMismatchError(
                f"The two results differ in {key}: {before['settings'][key]!r} and {after['settings'][key]!r}. "
                "Evaluate both models in the same way."
            )
    for language, result in after["languages"].items():
        other = before["languages"].get(language)
        if other is None or other["sha256"] != result["sha256"]:
            raise DataMismatchError(
                f"The baseline was not measured on the same set of {language!r}. Evaluate both on one."
            )
    rng = np.random.default_rng(seed)
    differences: dict[str, NDArray[np.float64]] = {}
    for language in sorted(after["languages"]):
        old_r, new_r = _resampled_f1([before["languages"][language], after["languages"][language]], resamples, rng)
        differences[language] = new_r - old_r
    tests = {language: _p_value(difference_r) for language, difference_r in differences.items()}
    adjusted = holm(tests)

    def compared(old: float, new: float, difference_r: NDArray[np.float64], p_value: float) -> dict[str, Any]:
        return {
            "before": old,
            "after": new,
            "difference": new - old,
            "interval": _interval(difference_r),
            "p_value": p_value,
        }

    languages = {}
    for language, result in after["languages"].items():
        old = before["languages"][language]["f1"]
        row = compared(old, result["f1"], differences[language], tests[language])
        row |= {"n": result["sources"], "p_adjusted": adjusted[language]}
        languages[language] = row | {"verdict": verdict(row["difference"], adjusted[language])}
    pooled_r = np.mean(list(differences.values()), axis=0)
    means = [float(np.mean([row[key] for row in languages.values()])) for key in ("before", "after")]
    pooled = compared(means[0], means[1], pooled_r, _p_value(pooled_r))
    return {
        "languages": languages,
        "pooled": {
            "languages": len(languages),
            **pooled,
            "verdict": verdict(pooled["difference"], pooled["p_value"]),
        },
        "settings": {
            "test": "paired bootstrap over source sentences, F1 at each result's threshold",
            "correction": "Holm",
            "alpha": ALPHA,
            "confidence": CONFIDENCE,
            "resamples": resamples,
            "seed": seed,
        },
    }


def _p_value(difference_r: NDArray[np.float64]) -> float:
    tail = min(np.count_nonzero(difference_r <= 0), np.count_nonzero(difference_r >= 0))
    return min(1.0, 2 * (1 + int(tail)) / (1 + len(difference_r)))


def xsim_error(
    source_nh: NDArray[Any],
    target_mh: NDArray[Any],
    *,
    k: int = 4,
    margin: Margin = "ratio",
    target_texts: Sequence[str] | None = None,
) -> float:
    """xsim: how many sources do not find their translation by margin, in percent; lower is better.

    Each source takes, of its ``k`` nearest targets, the one with the largest margin. xsim is directed: swap the sides for
    the other direction.

    Args:
        source_nh: Embeddings of the sources, shape ``(n, hidden)``.
        target_mh: Embeddings of the targets, row ``i`` translating source row ``i``, shape ``(m, hidden)``, ``m ≥ n``;
            the rows behind them are distractors, as the altered sentences of xsim++ are.
        k: Neighbours.
        margin: See `metaphrase.mining.margins.margin_score`.
        target_texts: The targets' texts: finding another copy of the translation's text is then right, too.

    Raises:
        ValueError: There are fewer targets than sources, or an embedding is not finite.

    Reference: Heffernan et al. 2022, "Bitext Mining Using Distilled Sentence Representations for Low-Resource
    Languages", section 4.1; Chen et al. 2023, "xSIM++".

    >>> eye = np.eye(4, dtype=np.float32)
    >>> xsim_error(eye, eye[[0, 1, 3, 2]])
    50.0
    """
    if len(target_mh) < len(source_nh):
        raise ValueError(f"xsim needs a target for each source, but got {len(source_nh)} and {len(target_mh)}.")
    sources, targets = unit_rows(source_nh), unit_rows(target_mh)
    forward, backward = nearest_neighbours(sources, targets, k), nearest_neighbours(targets, sources, k)
    best_n = neighbour_scores(forward, backward, margin).argmax(axis=1)
    found_n = forward.row_qk[np.arange(len(best_n)), best_n]
    gold_n = np.arange(len(found_n))
    if target_texts is not None:
        text_m = np.unique(np.asarray(target_texts, dtype=object), return_inverse=True)[1]
        found_n, gold_n = text_m[found_n], text_m[gold_n]
    return 100 * float(np.mean(found_n != gold_n))


class MiningEvaluator(BaseEvaluator):
    """F1 of mining in the training loop, by language; metrics are fractions, as in sentence-transformers' evaluators.

    Args:
        data: Sets by language and split, from `load_bucc_folder`.
        protocol: One of `PROTOCOLS`.
        name: Name of the data set.
        **options: Of `evaluate_mining`.
    """

    def __init__(self, data: MiningData, *, protocol: Protocol, name: str = "", **options: Any) -> None:
        super().__init__()
        bucc_protocol(protocol)
        self.data, self.protocol, self.name, self.options = data, protocol, name, options
        self.primary_metric = "mean_f1"

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model; arguments as in `BaseEvaluator`."""
        result = evaluate_mining(model, self.data, protocol=self.protocol, **{"resamples": 1, **self.options})
        scores = {"mean_f1": result["average"]["f1"] / 100}
        scores |= {f"{language}_f1": row["f1"] / 100 for language, row in result["languages"].items()}
        logger.info("Mining %s at step %d: F1 %.2f %%", self.name, steps, result["average"]["f1"])
        metrics = self.prefix_name_to_metrics(scores, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def get_config_dict(self) -> dict[str, Any]:
        """Settings that the model card names."""
        return {"protocol": self.protocol, **self.options}
