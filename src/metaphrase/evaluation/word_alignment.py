"""Word alignment against gold links: precision, recall, F1 and the alignment error rate (AER).

Annotators mark links as *sure*, or as *possible* if they are ambiguous; sure links are also possible. Scores are computed
from counts over the whole corpus. Functions and evaluators return fractions, `evaluate_word_alignment` percent.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.aligners.base import Level, Method, WordPair
from metaphrase.aligners.embedding import EmbeddingAligner, Rule, check_softmax
from metaphrase.corpus.text import open_text
from metaphrase.corpus.words import Link, Words, parse_links
from metaphrase.evaluation.evaluator import RecordedEvaluator
from metaphrase.evaluation.result import Measurement, Result, conditions, with_intervals
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.exceptions import DataError
from metaphrase.io.arguments import Count, CountOr0, Positive, Resamples, Seed, Share, checked
from metaphrase.io.counts import counted
from metaphrase.io.progress import progress_bars

logger = logging.getLogger(__name__)

#: Number of pairs that are aligned between two steps of a progress bar.
_CHUNK = 64
_SENTENCE = re.compile(r"\s*<s\s+snum=\"?(\d+)\"?\s*>(.*?)</s>\s*")
_GOLD_LINK = re.compile(r"(\d+)([-p])(\d+)")


class AlignmentScores(NamedTuple):
    """Agreement of links with gold links.

    Attributes:
        precision: Share of the predicted links that are possible.
        recall: Share of the sure links that are predicted.
        f1: Harmonic mean of precision and recall.
        aer: Alignment error rate, lower is better; 1 − F1 if all gold links are sure.
    """

    precision: float
    recall: float
    f1: float
    aer: float


@dataclass(frozen=True)
class GoldPair:
    """A sentence pair with gold links.

    Attributes:
        source: Words of the source.
        target: Words of the target.
        sure: Sure links.
        possible: Possible links, including the sure ones.
    """

    source: Words
    target: Words
    sure: frozenset[Link]
    possible: frozenset[Link]

    @property
    def pair(self) -> WordPair:
        """The words of both sides."""
        return self.source, self.target

    def swapped(self) -> GoldPair:
        """The pair with source and target swapped."""
        sure, possible = (frozenset((j, i) for i, j in links) for links in (self.sure, self.possible))
        return GoldPair(self.target, self.source, sure, possible)


def alignment_scores(
    predicted: Iterable[Iterable[Link]], sure: Iterable[Iterable[Link]], possible: Iterable[Iterable[Link]]
) -> AlignmentScores:
    """Compute precision, recall, F1 and AER of predicted links, from counts over all pairs.

    ``precision = |A ∩ P| / |A|``, ``recall = |A ∩ S| / |S|``, ``AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)``. A share
    with an empty denominator is 0.

    Args:
        predicted: Links ``A`` of each pair.
        sure: Sure links ``S`` of each pair.
        possible: Possible links ``P`` of each pair; they may omit the sure ones.

    Raises:
        ValueError: The three differ in their number of pairs.

    Reference: Och and Ney 2003, "A Systematic Comparison of Various Statistical Alignment Models", section 6.

    >>> alignment_scores([[(0, 0), (1, 1)]], [[(0, 0)]], [[(0, 0), (1, 2)]]).aer  # 1 − (1 + 1) / (2 + 1)
    0.33333333333333337
    """
    n_predicted, n_sure, right, allowed = map(int, link_counts(predicted, sure, possible).sum(axis=0))
    precision = allowed / n_predicted if n_predicted else 0.0
    recall = right / n_sure if n_sure else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    aer = 1 - (right + allowed) / (n_predicted + n_sure) if n_predicted + n_sure else 0.0
    return AlignmentScores(precision, recall, f1, aer)


def link_counts(
    predicted: Iterable[Iterable[Link]], sure: Iterable[Iterable[Link]], possible: Iterable[Iterable[Link]]
) -> NDArray[np.int64]:
    """``|A|, |S|, |A ∩ S|, |A ∩ P|`` of each pair, shape ``(pairs, 4)``."""
    rows = []
    for links, surely, possibly in zip(predicted, sure, possible, strict=True):
        a, s = set(links), set(surely)
        rows.append((len(a), len(s), len(a & s), len(a & (s | set(possibly)))))
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


@checked
def parse_gold(alignment: str, *, first: CountOr0 = 0) -> tuple[frozenset[Link], frozenset[Link]]:
    """Sure and possible links of a Pharaoh string, in which possible links have a ``p`` instead of the hyphen.

    Words are counted from ``first``.

    >>> sure, possible = parse_gold("0-0 1p2")
    >>> sorted(sure), sorted(possible)
    ([(0, 0)], [(0, 0), (1, 2)])
    """
    sure, possible = set(), set()
    for text in alignment.split():
        match = _GOLD_LINK.fullmatch(text)
        if match is None:
            raise DataError(f"Gold links have the form '0-0 1p2' (p for possible), not {text[:80]!r}.")
        link = int(match[1]) - first, int(match[3]) - first
        if min(link) < 0:
            raise DataError(f"The words of these gold links are counted from {first}, but a link is {text[:80]!r}.")
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return frozenset(sure), frozenset(possible)


def load_pharaoh(source: str | Path, target: str | Path, gold: str | Path) -> list[GoldPair]:
    """Read gold pairs from three files with one pair per line: words separated by spaces, and Pharaoh links.

    Links are counted from 0, source word first; see `parse_gold`.

    Raises:
        DataError: The files differ in length, or a link is malformed.
    """
    lines = _lines_of_pairs(source, target, gold)
    return [GoldPair(Words.of(s), Words.of(t), *parse_gold(links)) for s, t, links in lines]


def load_gold_lines(texts: str | Path, gold: str | Path) -> list[GoldPair]:
    """Read gold pairs from two files with one pair per line: ``source ||| target``, and links counted from 1.

    This is the layout of the English-French and Romanian-English gold in the releases of SimAlign and awesome-align. Words
    are separated by spaces, also in languages written without them. Links are ``1-2`` (sure) and ``1p2`` (possible), source
    word first. A link beyond the end of a sentence is kept, with a warning.

    Raises:
        DataError: The files differ in length, or a line is malformed.
    """
    found = []
    for number, (text, alignment) in enumerate(_lines_of_pairs(texts, gold), 1):
        sides = [side.strip() for side in text.split("|||")]
        if len(sides) != 2:
            raise DataError(f"{texts}:{number}: a line must be 'source ||| target', not {text[:80]!r}.")
        try:
            found.append(GoldPair(Words.of(sides[0]), Words.of(sides[1]), *parse_gold(alignment, first=1)))
        except DataError as error:
            raise DataError(f"{gold}:{number}: {error}") from error
        for i, j in _beyond(found[-1]):
            logger.warning("%s:%d: gold link %d-%d points beyond the end of a sentence.", gold, number, i + 1, j + 1)
    return found


def _beyond(pair: GoldPair) -> list[Link]:
    """Gold links that point beyond the end of a sentence."""
    return sorted((i, j) for i, j in pair.possible if i >= len(pair.source) or j >= len(pair.target))


def peer_scores(pairs: Sequence[GoldPair], links: str | Path, *, first: int = 0) -> AlignmentScores:
    """Scores of the links that another program found for gold pairs: a file of Pharaoh links, counted from 0.

    The pairs before ``first`` are not scored.
    """
    lines = _without_surplus(_lines(links), len(pairs))
    if len(lines) != len(pairs):
        raise DataError(
            f"{links} must have one line per pair, but has {counted(len(lines), 'line')} for "
            f"{counted(len(pairs), 'pair')}."
        )
    return _scores(map(parse_links, lines[first:]), pairs[first:])


def _scores(predicted: Iterable[Iterable[Link]], pairs: Sequence[GoldPair]) -> AlignmentScores:
    return alignment_scores(predicted, [pair.sure for pair in pairs], [pair.possible for pair in pairs])


def load_wpt(source: str | Path, target: str | Path, gold: str | Path) -> list[GoldPair]:
    """Read gold pairs in the format of the shared tasks on word alignment (HLT-NAACL 2003, ACL 2005).

    Sentences are lines ``<s snum=26> words </s>``, gold links are lines ``26 2 1 [S|P] [confidence]``: the number of
    the sentence, and source and target word counted from 1. Links without a letter are sure. Links with word 0, the empty
    word, are skipped.

    Returns the pairs with gold links, in the order of the source. A link beyond the end of a sentence, such as one in the
    English-Hindi gold of 2005, is kept as a link that no aligner can find, with a warning.

    Raises:
        DataError: A line is malformed, or a pair has links but no sentences.

    Reference: Mihalcea and Pedersen 2003, "An Evaluation Exercise for Word Alignment".
    """
    links: dict[int, tuple[set[Link], set[Link]]] = {}
    for line in _without_surplus(_lines(gold)):
        fields = line.split()
        if not (len(fields) >= 3 and all(field.isdecimal() for field in fields[:3])):
            raise DataError(
                f"A line of {Path(gold).name} has the form '26 2 1 [S|P] [confidence]', not {line[:80]!r}."
            )
        number, i, j = map(int, fields[:3])
        sure, possible = links.setdefault(number, (set(), set()))
        if i and j:
            possible.add((i - 1, j - 1))
            letters = {field.upper() for field in fields[3:] if field.isalpha()}
            if letters - {"S", "P"}:
                raise DataError(f"The link {line[:80]!r} of {Path(gold).name} is neither sure (S) nor possible (P).")
            if "P" not in letters:
                sure.add((i - 1, j - 1))
    sources, targets = _numbered(source), _numbered(target)
    if missing := [number for number in links if number not in sources or number not in targets]:
        raise DataError(
            f"{Path(gold).name} has links of sentences {missing[:5]}, which are missing in one of the texts."
        )
    pairs = {
        number: GoldPair(Words.of(text), Words.of(targets[number]), *map(frozenset, links[number]))
        for number, text in sources.items()
        if number in links
    }
    for number, pair in pairs.items():
        for i, j in _beyond(pair):
            logger.warning("Gold link %d %d %d points beyond the end of a sentence.", number, i + 1, j + 1)
    return list(pairs.values())


def _numbered(path: str | Path) -> dict[int, str]:
    sentences = {}
    for line in _without_surplus(_lines(path)):
        match = _SENTENCE.fullmatch(line)
        if match is None:
            raise DataError(f"A line of {Path(path).name} has the form '<s snum=26> words </s>', not {line[:80]!r}.")
        sentences[int(match[1])] = match[2].strip()
    return sentences


def _lines(path: str | Path) -> list[str]:
    """Lines of a file; those at its end can be empty, because a pair can have no links."""
    with open_text(Path(path), newline=None) as file:
        return file.read().removesuffix("\n").split("\n")


def _without_surplus(lines: list[str], n: int = 0) -> list[str]:
    """Lines without the empty ones at their end, but at least the first ``n``."""
    text = next((at for at in range(len(lines), 0, -1) if lines[at - 1]), 1)
    return lines[: max(n, text)]


def _lines_of_pairs(*paths: str | Path) -> list[tuple[str, ...]]:
    """Lines of files with one line per pair."""
    columns = [_lines(path) for path in paths]
    n = max(len(_without_surplus(column)) for column in columns)
    columns = [_without_surplus(column, n) for column in columns]
    if len(set(map(len, columns))) > 1:
        counts = ", ".join(f"{path} {len(column)}" for path, column in zip(paths, columns, strict=True))
        raise DataError(f"Gold files must have one line per pair, but their numbers of lines differ: {counts}.")
    return list(zip(*columns, strict=True))


_LEVELS: tuple[Level, ...] = ("piece", "word")
#: Rules that `tune_rule` tries, in this order. Of dot products, the thresholds surround awesome-align's 0.001.
RULES = tuple(
    rule
    for level in _LEVELS
    for rule in (
        Rule("argmax", level),
        Rule("itermax", level),
        Rule("csls", level),
        *(Rule("softmax", level, threshold) for threshold in (1e-1, 1e-2, 1e-3, 1e-4)),
        *(
            Rule("softmax", level, threshold, temperature)
            for temperature in (0.03, 0.05, 0.1)
            for threshold in (0.1, 0.15, 0.2, 0.3)
        ),
    )
)


def tune_rule(
    model: SentenceTransformer, pairs: Sequence[GoldPair], *, batch_size: int = 64
) -> tuple[int, Rule, dict[tuple[int, Rule], float]]:
    """Try all layers of a model with all `RULES` on gold pairs.

    Returns the layer and the rule with the lowest error, the first of ties, and the errors (fractions) of all.
    """
    tried = {}
    for layer in range(model[0].auto_model.config.num_hidden_layers + 1):
        aligner = EmbeddingAligner(model, layer=layer, batch_size=batch_size)
        for rule, alignments in zip(RULES, aligner.align_by([one.pair for one in pairs], RULES), strict=True):
            tried[layer, rule] = _scores([alignment.links for alignment in alignments], pairs).aer
    layer, rule = min(tried, key=lambda key: tried[key])
    return layer, rule, tried


@checked
def evaluate_word_alignment(
    model: SentenceTransformer,
    sets: Mapping[str, Sequence[GoldPair]],
    *,
    sha256: Mapping[str, str] | None = None,
    name: str | None = None,
    aligner: EmbeddingAligner | None = None,
    batch_size: Count = 64,
    resamples: Resamples = RESAMPLES,
    seed: Seed = 0,
    show_progress: bool = False,
) -> Result:
    """Measure the alignment error rate of links between a model's token states.

    The digests distinguish results over different data. Without an aligner, it is an `EmbeddingAligner` with its default
    settings. The scores of the result are in percent; lower is better. In JSON, ``counts`` are the numbers of predicted,
    sure, correct sure and correct possible links of each pair.
    """
    start = time.perf_counter()
    aligner = aligner or EmbeddingAligner(model, batch_size=batch_size)
    languages: dict[str, Measurement] = {}
    for key, pairs in sets.items():
        predicted = []
        with progress_bars(show_progress) as begin:
            advance = begin(f"Aligning {key}", len(pairs))
            for first in range(0, len(pairs), _CHUNK):
                aligned = aligner.align([pair.pair for pair in pairs[first : first + _CHUNK]])
                predicted += [alignment.links for alignment in aligned]
                advance(len(aligned))
        scores = {measure: 100 * score for measure, score in _scores(predicted, pairs)._asdict().items()}
        counts_n4 = link_counts(predicted, [pair.sure for pair in pairs], [pair.possible for pair in pairs])
        details = scores | {"counts": counts_n4.tolist()}
        languages[key] = Measurement(len(pairs), scores["aer"], None, (sha256 or {}).get(key), details)
    return Result(
        suite="word-alignment",
        model=name or type(model).__name__,
        measure="AER",
        protocol="AER of links between token states",
        **with_intervals("error_rate", languages, resamples=resamples, seed=seed),
        **conditions(
            start,
            resamples,
            seed,
            layer=aligner.layer,
            method=aligner.method,
            level=aligner.level,
            **({"threshold": aligner.threshold} if aligner.method == "softmax" else {}),
            **({} if aligner.temperature is None else {"temperature": aligner.temperature}),
        ),
    )


@checked
class WordAlignmentEvaluator(RecordedEvaluator):
    """Word alignment by the token states of a model, during training.

    The model is measured as an `EmbeddingAligner`. The primary metric is ``f1``, because trainers assume that higher is
    better; it is 1 − AER if all gold links are sure. Metrics and CSV file are named as by `EmbeddingEvaluator`.

    Args:
        pairs: Pairs with gold links, from `load_wpt` or `load_pharaoh`.
        name: Name of the data set, such as ``"wpt05-en-hi"``.
        layer: See `EmbeddingAligner`.
        method: ``"argmax"``, ``"itermax"``, ``"csls"`` or ``"softmax"``.
        level: ``"piece"`` or ``"word"``.
        threshold: See `EmbeddingAligner`.
        temperature: See `EmbeddingAligner`.
        batch_size: Sentences per forward pass.
        write_csv: Write the CSV file.

    Relations: `RetrievalEvaluator` measures sentence embeddings.
    """

    kind = "word_alignment"
    metric = "f1"

    def __init__(
        self,
        pairs: Sequence[GoldPair],
        *,
        name: str = "",
        layer: CountOr0 | None = None,
        method: Method = "itermax",
        level: Level = "piece",
        threshold: Share | None = None,
        temperature: Positive | None = None,
        batch_size: Count = 64,
        write_csv: bool = True,
    ) -> None:
        super().__init__(name=name, write_csv=write_csv)
        check_softmax(method, threshold, temperature)
        self.pairs = list(pairs)
        self.settings: dict[str, Any] = {"layer": layer, "method": method, "level": level}
        chosen = {"threshold": threshold, "temperature": temperature}
        self.settings |= {setting: value for setting, value in chosen.items() if value is not None}
        self.batch_size = batch_size

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""
        aligner = EmbeddingAligner(model, batch_size=self.batch_size, **self.settings)
        predicted = [alignment.links for alignment in aligner.align([pair.pair for pair in self.pairs])]
        return _scores(predicted, self.pairs)._asdict()

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        return dict(self.settings)
