"""Bitexts derived from another one: with hard negatives, with mined pairs, or with pairs of a second one added."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable
from pathlib import Path

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.mining.filtering import filter_corpus
from metaphrase.mining.options import FilterOptions, MiningOptions, SearchOptions
from metaphrase.mining.workflow import mine_files

#: Hard negatives of each pair.
NEGATIVES = 3


def with_hard_negatives(corpus: Path, folder: Path) -> Path:
    """Add the column ``negatives``, mined by the starter."""
    output = folder / "pairs.parquet"
    filter_corpus(FilterOptions(corpus=[str(corpus)], output=str(output), negatives=NEGATIVES), SearchOptions())
    return output


def mined(corpus: Path, folder: Path) -> Path:
    """Find the pairs again: each language's sentences are searched among the English ones of all languages.

    The starter finds the pairs, with the margin that is chosen automatically.
    """
    sets = load_parallel_folder(corpus, split="train")
    english = write_lines(folder / "all.en.txt", {text for pairs in sets.values() for text in pairs.targets})
    for language, pairs in sets.items():
        sources = write_lines(folder / f"all.{language}.txt", set(pairs.sources))
        output = folder / "mined" / f"{language}-en.train.tsv.gz"
        mine_files(MiningOptions(source=str(sources), target=str(english), output=str(output), threshold="auto"))
    return folder / "mined"


def with_added(corpus: Path, folder: Path, added: Path) -> Path:
    """Add pairs of another folder: of each language, a random sample of at most as many as the bitext has."""
    added_sets = load_parallel_folder(added)
    for language, parallel in load_parallel_folder(corpus, split="train").items():
        pairs = list(zip(parallel.sources, parallel.targets, strict=True))
        if language in added_sets:
            candidates = list(zip(added_sets[language].sources, added_sets[language].targets, strict=True))
            pairs += random.Random(0).sample(candidates, min(len(candidates), len(pairs)))
        text = "".join("\t".join(pair) + "\n" for pair in [("source", "target"), *pairs])
        (folder / f"{language}-en.train.tsv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return folder


def write_lines(path: Path, texts: Iterable[str]) -> Path:
    """Write sentences in a reproducible random order, one per line."""
    lines = sorted(texts)
    random.Random(0).shuffle(lines)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
