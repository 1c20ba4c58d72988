"""Build an English-centric corpus with a paper's protocol from local OPUS-style files.

    python scripts/build_corpus.py --input_dir opus --output_dir out --tokenizer bert-base-multilingual-cased
    python scripts/build_corpus.py --input_dir opus --output_dir out --protocol ppa --pairs 600k --tokenizer …

The input folder contains one folder per source (Europarl, OpenSubtitles, …), each with ``xx-en.{xx,en}[.gz]`` (Moses),
``xx-en.tsv[.gz]`` or ``xx-en.tmx[.gz]``. The output folder receives ``xx-en.{train,dev}.tsv.gz`` with the
header ``source target``, and ``report.json``. The same input and options produce identical bytes.

- ``dap``: samples at most 1,010,000 clean pairs of each source and merges the sources. 10 % of the pairs, at most 10,000,
  are the dev set, at most a million others the training set (Li et al. 2023). Unlike in the released code, a pair
  contained in two sources counts once, so that no dev pair is in the training set.
- ``ppa``: the first 250k, 600k or 2M pairs that pass the length filters, in the order of the sources, without a dev set
  (Pan et al. 2021). The filters are applied before counting, which matches the paper's 137k steps of 128 pairs in 10
  epochs of 7 × 250k pairs.

Sampling takes one pass. Each pair has a pseudo-random key, and the pairs with the smallest keys form the sample.
Duplicates therefore coincide, and memory is bounded by two samples (about 1 GB at the papers' sizes). Once a sample is
full, pairs with larger keys are not tokenised; the report counts them as "not drawn".
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import io
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from stored_results import reports_errors
from transformers import AutoTokenizer, HfArgumentParser

from metaphrase.corpus import Cleaning
from metaphrase.corpus.files import BitextFile, find_files
from metaphrase.corpus.readers import read_pairs
from metaphrase.corpus.report import CorpusReport
from metaphrase.corpus.text import one_line
from metaphrase.encoders.folders import open_tokenizer
from metaphrase.encoders.loading import find_model
from metaphrase.io.arguments import Count, CountOr0, checked
from metaphrase.io.configuration import option
from metaphrase.io.files import read_json, replacing, write_json
from metaphrase.io.outputs import claimed

Pair = tuple[str, str]


@checked
@dataclass
class Options:
    """Build an English-centric corpus with a paper's protocol from local OPUS-style files."""

    input_dir: str = option(help="Folder with one folder of parallel files per source.")
    output_dir: str = option(help="Folder for xx-en.{train,dev}.tsv.gz and report.json.")
    protocol: Literal["dap", "ppa"] = option("dap", "Protocol: dap or ppa.")
    languages: list[str] = option([], "Languages to build (default: all).")
    sources: list[str] = option([], "Source folders to read, in this order (default: all, by name).")
    tokenizer: str | None = option(
        None, "Tokenizer for the length filters (name or folder); the papers use that of multilingual BERT."
    )
    pairs: str = option("250k", "ppa: pairs per language; 250k, 600k or 2M in the paper.")
    train_cap: Count = option(1_000_000, "dap: maximum training pairs, per source and in total.")
    dev_cap: CountOr0 = option(10_000, "dap: maximum number of dev pairs.")
    max_bad_rate: float = option(0.05, "Maximum share of unreadable lines in a file.")
    seed: int = option(42, "Seed of the sampling.")


class Sample:
    """A uniform random sample of a stream of pairs, without duplicates: the pairs with the smallest keys.

    The keys depend on the seed and on a purpose, which distinguishes those of nested samples: pairs sampled from a large
    source all have small keys.
    """

    def __init__(self, size: int, seed: int, purpose: str) -> None:
        self.size, self.salt = size, f"{seed}/{purpose}".encode()
        self.heap: list[tuple[int, Pair]] = []  # negated keys, so that the largest key is on top
        self.keys: set[int] = set()

    def key(self, pair: Pair) -> int:
        """Return the pseudo-random key of a pair."""
        digest = hashlib.blake2b("\0".join(pair).encode(), digest_size=16, key=self.salt[:64]).digest()
        return int.from_bytes(digest)

    def refusal(self, key: int) -> str | None:
        """Return why a pair with this key is rejected, or None."""
        if key in self.keys:
            return "duplicate"
        return "not drawn" if len(self.heap) == self.size and key > -self.heap[0][0] else None

    def add(self, key: int, pair: Pair) -> bool:
        """Add an accepted pair, and return whether it replaced another one."""
        self.keys.add(key)
        if len(self.heap) < self.size:
            heapq.heappush(self.heap, (-key, pair))
            return False
        gone, _ = heapq.heappushpop(self.heap, (-key, pair))
        self.keys.remove(-gone)
        return True

    def pairs(self) -> list[Pair]:
        """Return the sample in the order of its keys, which is random."""
        return [pair for _, pair in sorted(self.heap, reverse=True)]


@dataclass
class Source:
    """The file of one source in one language, and the counts of its pairs."""

    name: str
    file: BitextFile
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def facts(self) -> dict[str, Any]:
        """Return the section of the report about this source."""
        return {"source": self.name, "files": [path.name for path in self.file.paths]} | {
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
        }


def clean_pairs(source: Source, cleaning: Cleaning, max_bad_rate: float, progress: Progress) -> Iterator[Pair]:
    """Iterate over the pairs of a source that pass the text filters; the caller applies the piece filters."""
    task = progress.add_task(f"{source.file.language} {source.name}", total=None)
    report = CorpusReport()
    try:
        for i, (_, *sides, _) in enumerate(read_pairs(source.file, max_bad_rate=max_bad_rate, report=report)):
            if i % 1000 == 0:
                progress.update(task, completed=i)
            pair = cleaning.tidy(one_line(sides[0])), cleaning.tidy(one_line(sides[1]))
            if fault := cleaning.text_fault(*pair):
                source.dropped[fault] += 1
            else:
                yield pair
    finally:
        source.read = report.read
        source.dropped += report.dropped
        progress.update(task, completed=source.read, total=source.read)


def build_dap(
    sources: Iterable[Source], cleaning: Cleaning, options: Options, progress: Progress
) -> dict[str, list[Pair]]:
    """Build DAP's corpus of one language: sample every source, merge, sample again, split off a dev set."""
    size = options.train_cap + options.dev_cap
    merged = Sample(size, options.seed, "merged")
    for source in sources:
        sample = Sample(size, options.seed, "source")
        for pair in clean_pairs(source, cleaning, options.max_bad_rate, progress):
            key = sample.key(pair)
            fault = sample.refusal(key) or cleaning.piece_fault(*pair)
            if fault or sample.add(key, pair):
                source.dropped[fault or "not drawn"] += 1
        source.kept = len(sample.heap)
        for _, pair in sample.heap:
            if not merged.refusal(key := merged.key(pair)):
                merged.add(key, pair)
    pairs = merged.pairs()
    dev = min(len(pairs) // 10, options.dev_cap)
    return {"train": pairs[dev : dev + options.train_cap], "dev": pairs[:dev]}


def build_ppa(
    sources: Iterable[Source], cleaning: Cleaning, options: Options, progress: Progress
) -> dict[str, list[Pair]]:
    """Build PPA's corpus of one language: the first pairs that pass the filters."""
    wanted = number(options.pairs)
    pairs: dict[Pair, None] = {}
    for source in sources:
        if len(pairs) == wanted:
            break
        for pair in clean_pairs(source, cleaning, options.max_bad_rate, progress):
            fault = "duplicate" if pair in pairs else cleaning.piece_fault(*pair)
            if fault:
                source.dropped[fault] += 1
                continue
            pairs[pair] = None
            source.kept += 1
            if len(pairs) == wanted:
                break
    return {"train": list(pairs)}


PROTOCOLS = {"dap": (build_dap, Cleaning.dap), "ppa": (build_ppa, Cleaning.ppa)}


def number(text: str) -> int:
    """Parse a number of pairs such as ``250k``, ``2M`` or ``1000``."""
    units = {"k": 1_000, "m": 1_000_000}
    unit = units.get(text[-1:].lower(), 1)
    try:
        count = int(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"--pairs expects a number such as 250k or 2M, but is {text!r}.")
    return count


def find_sources(options: Options) -> dict[str, list[Source]]:
    """Return the sources of each language, in order."""
    folder = Path(options.input_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"The folder {folder} does not exist.")
    names = options.sources or sorted(path.name for path in folder.iterdir() if path.is_dir())
    sources: dict[str, list[Source]] = defaultdict(list)
    for name in names:
        for file in find_files(folder / name):
            if not options.languages or file.language in options.languages:
                sources[str(file.language)].append(Source(name, file))
    missing = sorted(set(options.languages) - set(sources))
    if missing or not sources:
        raise FileNotFoundError(f"{folder} has no file <source>/xx-en.* for {', '.join(missing) or 'any language'}.")
    return dict(sorted(sources.items()))


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer from its own files only."""
    with open_tokenizer(*find_model(name_or_path)) as files:
        return AutoTokenizer.from_pretrained(files)


def make_cleaning(options: Options) -> Cleaning:
    """Return the filters of the protocol; without a tokenizer, DAP's piece filters are skipped."""
    preset = PROTOCOLS[options.protocol][1]
    if options.tokenizer is not None:
        return preset(load_tokenizer(options.tokenizer).tokenize)
    if options.protocol == "ppa":
        raise ValueError("PPA's filters count pieces: pass --tokenizer, for example bert-base-multilingual-cased.")
    print(
        "Without --tokenizer, DAP's length and copy filters are skipped, because they count pieces.", file=sys.stderr
    )
    return preset().without_pieces()


def write_tsv(path: Path, pairs: Iterable[Pair]) -> str:
    """Write a TSV whose bytes depend only on the pairs, and return its SHA-256."""
    with replacing(path) as partial:
        with (
            partial.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file,
        ):
            file.write("source\ttarget\n")
            file.writelines(f"{source}\t{target}\n" for source, target in pairs)
        with partial.open("rb") as written:
            return hashlib.file_digest(written, "sha256").hexdigest()


def build(options: Options) -> dict[str, Any]:
    """Build the corpus, and return the content of ``report.json``."""
    cleaning = make_cleaning(options)
    sources = find_sources(options)
    assemble = PROTOCOLS[options.protocol][0]
    output = Path(options.output_dir)
    sizes = ("train_cap", "dev_cap") if options.protocol == "dap" else ("pairs",)
    settings = ("protocol", "tokenizer", "seed", *sizes)
    report: dict[str, Any] = {name: getattr(options, name) for name in settings}
    with claimed(output):
        report["languages"] = built_before(output / "report.json", report)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True)) as progress:
            for language, its_sources in sources.items():
                facts: dict[str, Any] = {}
                for part, pairs in assemble(its_sources, cleaning, options, progress).items():
                    name = f"{language}-en.{part}.tsv.gz"
                    facts[part] = {"file": name, "pairs": len(pairs), "sha256": write_tsv(output / name, pairs)}
                facts["sources"] = [source.facts() for source in its_sources]
                report["languages"][language] = facts
        report["languages"] = dict(sorted(report["languages"].items()))
        write_json(output / "report.json", report)
    return report


def built_before(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The languages of an earlier report with the same settings; none without a report.

    Raises:
        ValueError: The settings differ. Dev pairs of that corpus might be training pairs of this one.
    """
    before = read_json(path) if path.is_file() else {**settings, "languages": {}}
    if differing := [name for name, value in settings.items() if before.get(name) != value]:
        raise ValueError(
            f"{path.parent} has a corpus that was built with another value of {', '.join(differing)}. Choose another "
            "--output_dir, or delete this one."
        )
    return dict(before["languages"])


@reports_errors
def main(argv: list[str] | None = None) -> int:
    """Parse the options, build the corpus and print its size."""
    logging.basicConfig(format="%(message)s")
    (options,) = HfArgumentParser(Options, description=Options.__doc__).parse_args_into_dataclasses(argv)
    report = build(options)
    for language, facts in report["languages"].items():
        parts = ", ".join(f"{facts[part]['pairs']:,} {part}" for part in ("train", "dev") if part in facts)
        print(f"{language}: {parts} pairs of {sum(s['read'] for s in facts['sources']):,} read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
