"""Evaluate word aligners on manual word links: AER, precision, recall, F1.

    python scripts/word_alignment.py --gold WPT05 --corpus hi-en.train.tsv.gz [--aligners embedding fast_align hmm]
    python scripts/word_alignment.py --gold WPT05 --aligners span --span_model CHECKPOINT

``WPT05`` contains the English-Hindi data of ACL 2005 (test.eng, test.hin, test.eng.hin.wa). All aligners align Hindi with
English. fast_align and the HMM are trained on the corpus and the test sentences (without their links), with punctuation as
separate tokens. The results replace the aligner's section of ``scripts/results/word_alignment.json``, from which
``scripts/update_tables.py`` writes docs/word_alignment.md. A file with results on other gold links is refused.
"""

from __future__ import annotations

import logging
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from stored_results import reports_errors, write_results
from transformers import HfArgumentParser

from metaphrase.aligners.base import Aligner, Level, Method
from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.aligners.span import SpanAligner
from metaphrase.aligners.statistical import HEURISTICS, MODELS, StatisticalAligner
from metaphrase.corpus.readers import read_parallel
from metaphrase.corpus.words import Link, Words
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import STARTER
from metaphrase.encoders.starter import starter_info
from metaphrase.evaluation.measures import ErrorRate
from metaphrase.evaluation.significance import RESAMPLES, percentile_interval
from metaphrase.evaluation.word_alignment import GoldPair, alignment_scores, link_counts, load_wpt
from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import option
from metaphrase.io.digests import file_sha256
from metaphrase.io.environment import hardware
from metaphrase.io.files import read_json

RESULTS = Path(__file__).parent / "results" / "word_alignment.json"


@dataclass
class Options:
    """Options of the evaluation."""

    gold: str = option(help="Folder with test.eng, test.hin and test.eng.hin.wa.")
    corpus: str | None = option(None, "Training corpus of statistical aligners: a hi-en TSV.")
    aligners: list[str] = option(
        ["embedding", "fast_align", "hmm"], "Aligners: embedding, span, fast_align, hmm, ibm1 … ibm4."
    )
    model: str = option(STARTER, "Encoder of the embedding aligner.")
    span_model: str | None = option(None, "Question answering model of the span aligner.")
    output: str = option(str(RESULTS), "Results file (JSON).")


def command(arguments: Sequence[str]) -> str:
    """Return the command without local paths."""
    return " ".join(["python scripts/word_alignment.py", *(a.rstrip("/").rpartition("/")[2] for a in arguments)])


def apart(text: str) -> str:
    """Put spaces around punctuation and symbols, as in the test data.

    >>> apart("करें, “X”।")
    'करें , “ X ” ।'
    """
    spaced = (f" {c} " if unicodedata.category(c)[0] in "PS" else c for c in text)
    return " ".join("".join(spaced).split())


def error_interval(predicted: Sequence[Iterable[Link]], gold: Sequence[GoldPair]) -> tuple[float, float]:
    """Return a percentile bootstrap interval of the AER over sentence pairs, as fractions."""
    counts_n4 = link_counts(predicted, [pair.sure for pair in gold], [pair.possible for pair in gold])
    (error_r,) = ErrorRate().scores([counts_n4], RESAMPLES, np.random.default_rng(0))
    return percentile_interval(error_r / 100)


def measured(aligner: Aligner, gold: Sequence[GoldPair]) -> dict[str, Any]:
    """Return the scores and the speed of an aligner."""
    start = time.perf_counter()
    alignments = aligner.align([pair.pair for pair in gold])
    seconds = time.perf_counter() - start
    sides = [a.links for a in alignments], [pair.sure for pair in gold], [pair.possible for pair in gold]
    return {
        **{name: round(score, 6) for name, score in alignment_scores(*sides)._asdict().items()},
        "aer_interval": [round(end, 6) for end in error_interval(sides[0], gold)],
        "links": sum(map(len, sides[0])),
        "seconds": round(seconds, 3),
        "pairs_per_second": round(len(gold) / seconds, 1),
    }


def embedding(options: Options, gold: Sequence[GoldPair]) -> dict[str, Any]:
    """Evaluate the embedding aligner for every layer, method and level."""
    model = load_encoder(options.model, device="cpu")
    default = EmbeddingAligner(model)
    default.align([pair.pair for pair in gold])  # the first pass is slow
    rows = []
    for layer in range(model[0].auto_model.config.num_hidden_layers + 1):
        for level in get_args(Level):
            for method in get_args(Method):
                aligner = EmbeddingAligner(model, layer=layer, method=method, level=level)
                rows.append({"layer": layer, "level": level, "method": method, **measured(aligner, gold)})
                print(f"layer {layer} {level} {method}: AER {rows[-1]['aer']:.1%}", flush=True)
    origin = starter_info() if options.model == STARTER else {}
    return {
        "model": options.model,
        "starter": {key: origin[key] for key in ("source", "version", "weights_sha256") if key in origin},
        "default": {"layer": default.layer, "level": default.level, "method": default.method},
        "rows": rows,
    }


def statistical(name: str, options: Options, gold: Sequence[GoldPair]) -> dict[str, Any]:
    """Evaluate a statistical aligner for every symmetrisation heuristic."""
    path = Path(str(options.corpus))
    corpus = read_parallel(path)

    def pairs() -> Iterator[tuple[Words, Words]]:
        yield from (pair.pair for pair in gold)
        for source, target in corpus:
            yield Words.of(apart(source)), Words.of(apart(target))

    aligner = StatisticalAligner(name).train(pairs())
    rows = []
    for heuristic in HEURISTICS:
        aligner.heuristic = heuristic
        rows.append({"heuristic": heuristic, **measured(aligner, gold)})
        print(f"{name} {heuristic}: AER {rows[-1]['aer']:.1%}", flush=True)
    return {
        "corpus": {"file": path.name, "pairs": len(corpus), "sha256": file_sha256(path)},
        "trained_pairs": aligner.trained_pairs,
        "skipped_pairs": aligner.skipped_pairs,
        "training_seconds": round(aligner.training_seconds, 1),
        "settings": {key: value for key, value in aligner.settings.items() if key != "heuristic"},
        "default": {"heuristic": StatisticalAligner(name).heuristic},
        "rows": rows,
    }


def span(options: Options, gold: Sequence[GoldPair]) -> dict[str, Any]:
    """Evaluate the span aligner with default settings, with and without requiring both directions."""
    rows = [
        {"force_bidirectional": forced, **measured(SpanAligner(options.span_model, force_bidirectional=forced), gold)}
        for forced in (False, True)
    ]
    return {"model": Path(options.span_model).name, "default": {"force_bidirectional": False}, "rows": rows}


@reports_errors
def main(arguments: list[str]) -> int:
    """Parse the command line, evaluate the aligners and write the results; return the exit status."""
    options = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)[0]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_flush_denormal(True)
    evaluate(options, command(arguments))
    return 0


def check(options: Options) -> None:
    """Refuse unknown aligners, and those without the corpus or model that they require, before the first is evaluated."""
    for name in options.aligners:
        if name not in ("embedding", "span", *MODELS):
            raise UsageError(f"Unknown aligner {name!r}. The aligners are embedding, span, {', '.join(MODELS)}.")
        if name in MODELS and options.corpus is None:
            raise UsageError(f"{name} requires a training corpus: pass --corpus hi-en.train.tsv.gz.")
        if name == "span" and options.span_model is None:
            raise UsageError("The span aligner requires a question answering model: pass --span_model.")


def evaluate(options: Options, called: str) -> None:
    """Evaluate the aligners, and write the results of each with the command.

    Raises:
        UsageError: An option is missing, or the results file has results on other gold links.
    """
    check(options)
    folder = Path(options.gold)
    files = [folder / name for name in ("test.eng", "test.hin", "test.eng.hin.wa")]
    gold = [pair.swapped() for pair in load_wpt(*files)]
    path = Path(options.output)
    content = read_json(path) if path.exists() else {"aligners": {}}
    gold_facts = {
        "name": "WPT-05 English-Hindi, test",
        "pairs": len(gold),
        "links": sum(len(pair.possible) for pair in gold),
        "sha256": {file.name: file_sha256(file) for file in files},
    }
    if content["aligners"] and content["gold"] != gold_facts:
        raise UsageError(f"{path} has results on other gold links. Pass another --output, or delete this file.")
    content["gold"] = gold_facts
    for name in options.aligners:
        start = time.perf_counter()
        if name == "embedding":
            section = embedding(options, gold)
        elif name == "span":
            section = span(options, gold)
        else:
            section = statistical(name, options, gold)
        content["aligners"][name] = {
            "command": called,
            **section,
            "seconds": round(time.perf_counter() - start, 1),
            "hardware": hardware(),
            "versions": {
                package: version(package)
                for package in ("metaphrase", "torch", "transformers", "sentence-transformers", "sil-thot", "numpy")
            },
        }
        write_results(path, content, lambda one: {"aligners": set(one["aligners"])})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
