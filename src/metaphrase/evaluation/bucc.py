"""Bitext mining (BUCC): find the sentences of two monolingual texts that are translations of each other.

Published BUCC scores follow different protocols and are not comparable: the threshold is chosen on the scored pairs, or
on other pairs. Here each protocol has a name (`PROTOCOLS`), and there is no default.

Reference: Zweigenbaum et al. 2017, "Overview of the Second BUCC Shared Task"; Artetxe and Schwenk 2019, "Margin-based
Parallel Corpus Mining with Multilingual Sentence Embeddings", section 4.1.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import TARGET_LANGUAGE, add_file
from metaphrase.corpus.text import MAX_CHARS, read_lines
from metaphrase.evaluation.encoding import EncodingOptions, encode_texts, encoding_settings
from metaphrase.evaluation.evaluator import RecordedEvaluator
from metaphrase.evaluation.result import Measurement, Result, conditions, with_intervals
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.exceptions import DataError, MissingFileError, UsageError
from metaphrase.io.arguments import Count, Resamples, Seed, checked
from metaphrase.io.digests import text_digest
from metaphrase.mining.margins import Margin, Pairs, Retrieval, best_threshold, f1_scores, mine
from metaphrase.modeling.bulk import distinct_texts

logger = logging.getLogger(__name__)


class BuccProtocol(NamedTuple):
    """Definition of a protocol.

    Attributes:
        tuned: Split whose gold pairs determine the threshold.
        scored: Split that is scored with this threshold.
        duplicates: Treatment of repeated lines, `Duplicates`.
        comparison: Comparison of a kept pair's score with the threshold, `ThresholdComparison`.
    """

    tuned: str
    scored: str
    duplicates: Duplicates
    comparison: ThresholdComparison

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that it reads."""
        return tuple(dict.fromkeys((self.tuned, self.scored)))


#: The protocols of the literature.
#:
#: - ``train_oracle``: the best F1 of any threshold on the training set (DAP, Table 2);
#: - ``train_to_test``: the protocol of the shared task; the gold pairs of its test set are not public (DAP, Table 3);
#: - ``sample_to_train``: XTREME, which calls the sample "dev" and the training set "test"; DAP's released code uses
#:   the same splits, but keeps repeated lines and compares by ``>``;
#: - ``sample_oracle``: the best F1 on the sample (WACSE, mSimCSE).
PROTOCOLS: dict[str, BuccProtocol] = {
    "train_oracle": BuccProtocol("training", "training", "keep", ">"),
    "train_to_test": BuccProtocol("training", "test", "keep", ">"),
    "sample_to_train": BuccProtocol("sample", "training", "unify", ">="),
    "sample_oracle": BuccProtocol("sample", "sample", "keep", ">="),
}
Protocol = Literal["train_oracle", "train_to_test", "sample_to_train", "sample_oracle"]
#: Treatment of lines that occur more than once: ``unify`` searches them once and excludes them from the pairs (LASER,
#: XTREME), ``keep`` searches each of them (DAP, mSimCSE).
Duplicates = Literal["unify", "keep"]
#: Comparison of a pair's score with the threshold: ``>`` (DAP) or ``>=`` (LASER, XTREME).
ThresholdComparison = Literal[">", ">="]

_FILE = re.compile(r"(?P<language>[a-z]{2,3})-en\.(?P<split>[a-z]+)\.(?P<part>[a-z]+)(\.gz)?")


@dataclass(frozen=True)
class MiningSet:
    """Two monolingual texts and the pairs of their sentences that are translations.

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
        sides = zip(self.source_ids, self.sources, strict=True), zip(self.target_ids, self.targets, strict=True)
        return text_digest("".join(f"{a}\t{b}\n" for a, b in chain(*sides, sorted(self.gold))))

    def first_pairs(self, number: int | None) -> MiningSet:
        """The first gold pairs in the order of the sources, among as large a share of the other sentences; None for all."""
        if number is None or number >= len(self.gold):
            return self
        order = {source: place for place, source in enumerate(self.source_ids)}
        gold = sorted(self.gold, key=lambda pair: (order.get(pair[0], len(order)), pair))[:number]

        def sample(side: int, ids: Sequence[str], texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
            paired = {pair[side] for pair in self.gold}
            others = [identifier for identifier in ids if identifier not in paired]
            kept = {pair[side] for pair in gold}.union(others[: round(len(others) * number / len(self.gold))])
            rows = [row for row, identifier in enumerate(ids) if identifier in kept]
            return tuple(ids[row] for row in rows), tuple(texts[row] for row in rows)

        sides = sample(0, self.source_ids, self.sources), sample(1, self.target_ids, self.targets)
        return MiningSet(self.language, self.split, *sides[0], *sides[1], frozenset(gold))


MiningData = Mapping[str, Mapping[str, MiningSet]]


def load_bucc_folder(
    path: str | Path, protocol: Protocol, languages: Sequence[str] | None = None
) -> dict[str, dict[str, MiningSet]]:
    """Read the splits of a protocol: ``zh-en.sample.zh``, ``….en`` (``id<TAB>sentence``) and ``….gold`` (two ids).

    The files, compressed (``.gz``) or not, are in the folder or in its subfolder ``zh-en``. They have the names of the
    shared task (``training``, ``test``, ``sample``), not those of XTREME. Lines end at line feeds, and quotation marks are
    text.

    Args:
        path: The folder.
        protocol: One of `PROTOCOLS`.
        languages: Languages to read, in this order; None reads all languages with these splits.

    Returns:
        ``{"zh": {"sample": …}}``.

    Raises:
        FileNotFoundError: The folder or a file of a split is missing.
        ValueError: The protocol is unknown, or a line is malformed.
    """
    needed = bucc_protocol(protocol).splits
    folder = Path(path)
    files = bucc_files(folder)
    present = sorted(f"{language} {split}" for language, splits in files.items() for split in splits)
    available = f"Available: {', '.join(present) or 'no BUCC files'}."
    sets: dict[str, dict[str, MiningSet]] = {}
    for language in languages or (language for language, splits in files.items() if splits.keys() >= set(needed)):
        sets[language] = {}
        for split in needed:
            parts = files.get(language, {}).get(split, {})
            if missing := [part for part in (language, TARGET_LANGUAGE, "gold") if part not in parts]:
                raise MissingFileError(
                    f"Protocol {protocol!r} needs {language}-en.{split}.{missing[0]}, which is missing in {folder}. "
                    f"{available}"
                )
            sets[language][split] = _read_set(language, split, parts)
    if not sets:
        raise MissingFileError(
            f"Protocol {protocol!r} needs the splits {' and '.join(needed)}, which no language in {folder} has. {available}"
        )
    return sets


def bucc_languages(path: str | Path, protocol: Protocol) -> list[str]:
    """Languages of a folder with all files of the splits of a protocol, in alphabetical order."""
    needed = bucc_protocol(protocol).splits
    return sorted(
        language
        for language, splits in bucc_files(path).items()
        if all(splits.get(split, {}).keys() >= {language, TARGET_LANGUAGE, "gold"} for split in needed)
    )


def bucc_files(path: str | Path) -> dict[str, dict[str, dict[str, Path]]]:
    """Files of a folder by language, split and content (``"zh"``, ``"en"``, ``"gold"``)."""
    folder = Path(path)
    if not folder.is_dir():
        raise MissingFileError(f"{folder} is not a folder. Pass a folder with files such as zh-en.sample.zh.gz.")
    files: dict[str, dict[str, dict[str, Path]]] = {}
    for file in sorted([*folder.iterdir(), *folder.glob(f"*-{TARGET_LANGUAGE}/*")]):
        if match := _FILE.fullmatch(file.name):
            add_file(files.setdefault(match["language"], {}).setdefault(match["split"], {}), match["part"], file)
    return files


def bucc_protocol(protocol: str) -> BuccProtocol:
    """Protocol of a name."""
    if protocol not in PROTOCOLS:
        raise UsageError(f"Unknown BUCC protocol {protocol!r}. The protocols are {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[protocol]


def _read_set(language: str, split: str, parts: Mapping[str, Path]) -> MiningSet:
    sources, targets = (dict(_fields(parts[part], unique=True)) for part in (language, TARGET_LANGUAGE))
    gold = frozenset(_fields(parts["gold"]))
    if not gold:
        raise DataError(f"{parts['gold']} has no pairs, so nothing can be measured. Download the file again.")
    if unknown := [pair for pair in sorted(gold) if pair[0] not in sources or pair[1] not in targets]:
        logger.warning("%s has pairs of unknown sentences, which count as missed: %s.", parts["gold"], unknown[:3])
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
                f"{path}:{number}: a line must have two columns, but is {line if fields else 'unreadable'!r:.80}."
            )
        if unique and fields[0] in seen:
            raise DataError(f"{path}:{number}: the identifier {fields[0]!r} is used twice.")
        seen.add(fields[0])
        rows.append((fields[0], fields[1]))
    return rows


@checked
def mine_set(
    model: Any,
    data: MiningSet,
    *,
    duplicates: Duplicates = "unify",
    k: Count = 4,
    margin: Margin = "ratio",
    retrieval: Retrieval = "max",
    device: str | None = None,
    **encoding: Unpack[EncodingOptions],
) -> Pairs:
    """Pairs that a model finds in a set, best first. See `evaluate_mining` for the arguments.

    Returns pairs of positions in the texts of the set.
    """
    sides = []
    for texts in (data.sources, data.targets):
        distinct, (row_n,) = distinct_texts([texts])
        sides.append((encode_texts(model, distinct, **encoding), row_n))
    embeddings = [rows_th[row_n] if duplicates == "keep" else rows_th for rows_th, row_n in sides]
    pairs = mine(*embeddings, k=k, margin=margin, retrieval=retrieval, device=device)
    if duplicates == "keep":
        return pairs
    unique = [np.bincount(row_n) == 1 for _, row_n in sides]
    pairs = pairs.take(unique[0][pairs.source_c] & unique[1][pairs.target_c])
    first_s, first_t = (np.unique(row_n, return_index=True)[1] for _, row_n in sides)
    return Pairs(pairs.score_c, first_s[pairs.source_c], first_t[pairs.target_c])


@checked
def evaluate_mining(  # noqa: PLR0913 - options of the protocol, by keyword
    model: Any,
    data: MiningData,
    *,
    protocol: Protocol,
    name: str | None = None,
    k: Count = 4,
    margin: Margin = "ratio",
    retrieval: Retrieval = "max",
    duplicates: Duplicates | None = None,
    comparison: ThresholdComparison | None = None,
    device: str | None = None,
    resamples: Resamples = RESAMPLES,
    seed: Seed = 0,
    **encoding: Unpack[EncodingOptions],
) -> Result:
    """Mine the texts of each language, and score the pairs above a threshold against the gold pairs.

    Args:
        model: A SentenceTransformer, or an object with its ``encode``.
        data: Sets by language and split, from `load_bucc_folder`.
        protocol: One of `PROTOCOLS`.
        name: Name of the model in the result.
        k: Number of neighbours in the margin.
        margin: ``"ratio"``, ``"distance"`` or ``"absolute"``; see `metaphrase.mining.margins.margin_score`.
        retrieval: See `metaphrase.mining.margins.select_pairs`.
        duplicates: See `Duplicates`; None uses the protocol's.
        comparison: See `ThresholdComparison`; None uses the protocol's.
        device: Device of the search; see `metaphrase.mining.search.nearest_neighbours`.
        resamples: Number of bootstrap samples of the intervals, over source sentences at a fixed threshold.
        seed: Seed of the bootstrap.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.

    Returns:
        A result whose scores are F1 in percent. In JSON, a language also has::

            "sources": 8624, "targets": 13589, "gold": 257, "candidates": 8012, "kept": 250, "correct": 240,
            "precision": 96.0, "recall": 93.4, "f1": 94.7,
            "threshold": 1.12, "tuned_on": {"split": "sample", "sha256": …, "f1": 94.7}, "outcomes": {…}

        ``outcomes`` are the items that :func:`metaphrase.evaluation.compare.compare` tests: the numbers of correct, kept and
        gold pairs of each source sentence that has any.

    Raises:
        ValueError: An option is unknown, or a language lacks a split.
    """
    start = time.perf_counter()
    named = bucc_protocol(protocol)
    tuned, scored = named.tuned, named.scored
    duplicates, comparison = duplicates or named.duplicates, comparison or named.comparison
    search: dict[str, Any] = {"margin": margin, "k": k, "retrieval": retrieval}
    languages: dict[str, Measurement] = {}
    for language, splits in data.items():
        if missing := {tuned, scored} - splits.keys():
            raise DataError(f"Protocol {protocol!r} needs the split {min(missing)!r} of {language!r}.")
        mined = {
            split: mine_set(model, splits[split], duplicates=duplicates, device=device, **search, **encoding)
            for split in named.splits
        }
        best = best_threshold(mined[tuned].score_c, _correct(splits[tuned], mined[tuned]), len(splits[tuned].gold))
        texts, candidates = splits[scored], mined[scored]
        above_c = candidates.score_c > best.threshold if comparison == ">" else candidates.score_c >= best.threshold
        kept = candidates.take(above_c)
        correct_c = _correct(texts, kept)
        shares = f1_scores(int(correct_c.sum()), len(correct_c), len(texts.gold))
        details: dict[str, Any] = {
            "sources": len(texts.sources),
            "targets": len(texts.targets),
            "gold": len(texts.gold),
            "candidates": len(above_c),
            "kept": len(correct_c),
            "correct": int(correct_c.sum()),
            **{key: 100 * share for key, share in zip(("precision", "recall", "f1"), shares, strict=True)},
            "threshold": best.threshold,
            "tuned_on": {"split": tuned, "sha256": splits[tuned].sha256, "f1": 100 * best.f1},
            "outcomes": _outcomes(texts, kept, correct_c),
        }
        languages[language] = Measurement(details["sources"], details["f1"], sha256=texts.sha256, details=details)
    return Result(
        suite="mining",
        model=name or type(model).__name__,
        measure="F1",
        protocol=f"{protocol}: threshold from {tuned}, scored on {scored}; {margin} margin, k={k}, {retrieval} retrieval",
        **with_intervals("pairs_f1", languages, resamples=resamples, seed=seed),
        **conditions(
            start,
            resamples,
            seed,
            protocol=protocol,
            tuned_on=tuned,
            scored_on=scored,
            **search,
            duplicates=duplicates,
            comparison=comparison,
            **encoding_settings(model, **encoding),
        ),
    )


def _correct(data: MiningSet, pairs: Pairs) -> NDArray[np.bool_]:
    """Whether each pair is a gold pair, shape ``(pairs,)``."""
    return np.array(
        [
            (data.source_ids[source], data.target_ids[target]) in data.gold
            for source, target in zip(pairs.source_c.tolist(), pairs.target_c.tolist(), strict=True)
        ],
        dtype=bool,
    )


def _outcomes(data: MiningSet, kept: Pairs, correct_c: NDArray[np.bool_]) -> dict[str, str]:
    """Numbers of correct, kept and gold pairs of each source sentence with any pair, separated by spaces."""
    sources = [data.source_ids[source] for source in kept.source_c.tolist()]
    n_kept, n_gold = Counter(sources), Counter(source for source, _ in data.gold)
    n_correct = Counter(source for source, right in zip(sources, correct_c.tolist(), strict=True) if right)
    return {source: f"{n_correct[source]} {n_kept[source]} {n_gold[source]}" for source in sorted(n_kept | n_gold)}


class MiningEvaluator(RecordedEvaluator):
    """F1 of bitext mining (BUCC) during training, by language. The primary metric is ``mean_f1``.

    Metrics and CSV file are named as by `EmbeddingEvaluator`.

    Args:
        data: Sets by language and split, from `load_bucc_folder`.
        protocol: One of `PROTOCOLS`.
        name: Name of the data set.
        **options: Options of `evaluate_mining`, such as ``prompt`` or ``batch_size``.

    Relations: `RetrievalEvaluator` measures retrieval among parallel sentences, where every sentence has a translation.

    >>> class Letters:  # an encoder that counts letters
    ...     prompts = {}
    ...     def encode(self, texts, **options):
    ...         return np.array([[text.count(letter) for letter in "abcdef"] for text in texts], dtype=np.float32)
    >>> sample = MiningSet(
    ...     "de", "sample", ("s1", "s2"), ("ab", "cde"), ("t1", "t2", "t3"), ("ab", "ffa", "cde"),
    ...     frozenset({("s1", "t1"), ("s2", "t3")}),
    ... )
    >>> evaluator = MiningEvaluator({"de": {"sample": sample}}, protocol="sample_oracle", name="dev")
    >>> evaluator(Letters())
    {'dev_mean_f1': 1.0, 'dev_de_f1': 1.0}
    """

    kind = "mining"
    metric = "mean_f1"

    def __init__(self, data: MiningData, *, protocol: Protocol, name: str = "", **options: Any) -> None:
        super().__init__(name=name)
        bucc_protocol(protocol)
        self.data, self.protocol, self.options = data, protocol, options

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""
        result = evaluate_mining(model, self.data, protocol=self.protocol, **{"resamples": 1, **self.options})
        scores = {f"{language}_f1": measured.score / 100 for language, measured in result.languages.items()}
        return {"mean_f1": result.average.score / 100, **scores}

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        return {"protocol": self.protocol, **self.options}
