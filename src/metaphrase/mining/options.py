"""Options of mining and filtering, with the same names in Python, on the command line and in YAML."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from metaphrase.corpus.codes import NO_CODES, language_code
from metaphrase.corpus.kinds import check_regular
from metaphrase.corpus.options import BitextOptions
from metaphrase.corpus.writing import check_format
from metaphrase.exceptions import MissingExtraError, UsageError
from metaphrase.io.arguments import Count, CountOr0, Finite, Length, checked
from metaphrase.io.configuration import ENCODER, option
from metaphrase.io.environment import install_command
from metaphrase.io.outputs import check_files

Margin = Literal["ratio", "distance", "absolute"]
Retrieval = Literal["max", "forward", "backward", "intersection"]
Index = Literal["exact", "ivf", "hnsw"]
Executor = Literal["local", "slurm", "ray"]

_LANGUAGE = re.compile(r"\.([a-z]{2,3})(?:\.(?:txt|tsv))?(?:\.gz)?$")

#: Sentences per shard: about 10 MB of embeddings, and a minute of encoding on a CPU.
SHARD = 8192


@checked
@dataclass
class SearchOptions:
    """The encoder, and how neighbours are searched."""

    model: str = option("starter", f"Encoder: {ENCODER}.")
    prompt: str = option(
        "auto", "Text before each sentence. auto: the query prompt that the model stores; none: no prompt."
    )
    max_length: Length | None = option(None, "Maximum number of tokens of a sentence.")
    batch_size: Count = option(32, "Sentences per forward pass.")
    bf16: bool = option(
        False,
        "Compute embeddings in bfloat16: faster on GPUs, and on CPUs with bfloat16 instructions, such as AMX.",
    )
    half: bool = option(False, "Store embeddings in 16 bits, which halves the disk space.")
    shard_size: Count = option(SHARD, "Sentences that are embedded, searched and stored together.")
    k: Count = option(4, "Number of neighbours of a sentence in the margin.")
    index: Index = option(
        "exact",
        "exact, or an approximate index for large corpora: ivf, hnsw. The results of an "
        "approximate index are ranked by exact similarities, and its recall is measured.",
    )
    probes: Count = option(16, "Cells that an ivf index searches; a larger number improves its recall.")
    search_device: str | None = option(
        None, "Device of an exact search: cuda, cpu. Default: cuda if available, else faiss on the CPU."
    )

    @property
    def prompt_or_none(self) -> str | None:
        """The prompt as `resolve_prompt` takes it: None for no prompt."""
        return None if self.prompt == "none" else self.prompt


@checked
@dataclass
class MiningOptions:
    """The texts to mine, and which pairs to keep."""

    source: str = option(
        help="Text of the source language, one sentence per line, or TSV; also .gz. Can be passed as the first argument.",
        first=True,
    )
    target: str = option(help="Text of the target language. Can be passed as the second argument.", first=True)
    output: str = option(
        help="Output file: .tsv, .jsonl (also .gz) or .parquet, with the columns score, source, target, "
        "source_lang and target_lang. A summary, a histogram and a sample for inspection are written to the same folder.",
        aliases=["-o"],
    )
    source_lang: str | None = option(
        None, "Language of the source. Default: the suffix of the file's name (news.sw.gz, news.sw.txt)."
    )
    target_lang: str | None = option(None, "Language of the target. Default: the suffix of the file's name.")
    source_column: str | None = option(None, "Column of a TSV source: its name in the header, or its number, from 1.")
    target_column: str | None = option(None, "Column of a TSV target.")
    margin: Margin = option(
        "ratio",
        "Score of a pair. ratio: its cosine divided by the mean cosine of both sentences with their --k "
        "neighbours; distance: the cosine minus that mean; absolute: the cosine.",
    )
    retrieval: Retrieval = option(
        "max",
        "forward: each source with its best target; backward: each target with its best source; intersection: "
        "the pairs found in both directions; max: the pairs found in either direction, best first, each sentence once.",
    )
    threshold: Finite | Literal["auto"] | None = option(
        None,
        "Minimum score of a pair. auto: the threshold with the best expected F1, a rough estimate. Default: keep all pairs.",
    )
    top: Count | None = option(None, "Maximum number of pairs; the best are kept.")
    copies: bool = option(False, "Keep pairs whose two sides are the same text.")
    keep_work: bool = option(
        False, "Keep embeddings and neighbours, so that other margins and thresholds take seconds."
    )

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The files that are written: the pairs, a summary, a sample and a histogram."""
        return tuple(Path(f"{self.output}{suffix}") for suffix in ("", ".json", ".sample.txt", ".png"))

    @property
    def languages(self) -> tuple[str, str]:
        """The languages of source and target.

        Raises:
            UsageError: A language is neither given nor in the file's name, or is not one.
        """
        return _language(self.source, self.source_lang, "source"), _language(self.target, self.target_lang, "target")

    def check(self) -> None:
        """Check that the options are consistent.

        Raises:
            ValueError: An option is invalid, or an output is a text to mine.
            FileNotFoundError: A text does not exist.
        """
        source, target = self.languages
        if source == target:
            raise UsageError(
                f"Both texts are in {source}. Name the languages with --source_lang and --target_lang if the names of the "
                "files do not."
            )
        check_format(self.output)
        for text in (self.source, self.target):
            check_regular(Path(text))
        check_files(self.outputs, [self.source, self.target])


@checked
@dataclass
class EngineOptions:
    """Where embedding and searching run: in this process, or as tasks of datatrove."""

    executor: Executor | None = option(
        None,
        "Divide the work into tasks, which datatrove runs in processes of this machine (local), as Slurm jobs (slurm) or on "
        "a Ray cluster (ray). The results are the same if all tasks use the same number of threads. Default: one process "
        "without tasks.",
    )
    tasks: Count = option(1, "Number of tasks of each stage. A task that is killed is repeated.")
    workers: Count | None = option(
        None,
        "Maximum number of tasks at a time. Default with local: the number of GPUs, or without a GPU, of the CPU cores "
        "that this process may use. Default with slurm and ray: no maximum.",
    )
    storage: str | None = option(
        None,
        "Folder or fsspec URL (s3://bucket/folder) of embeddings and neighbours, which every worker can read and write. A "
        "folder or URL that you name is kept; the default, OUTPUT.partial, is deleted at the end.",
    )
    executor_args: list[str] = option(
        [],
        "Further arguments of datatrove's executor as KEY=VALUE, such as partition=cpu time=04:00:00 cpus_per_task=4. "
        "slurm requires partition and time.",
    )
    is_last: bool = field(default=False, metadata={"internal": True})

    @property
    def arguments(self) -> dict[str, Any]:
        """The further arguments; a value in JSON is a number, a truth value or a dictionary.

        Raises:
            UsageError: An argument is not KEY=VALUE.
        """
        found: dict[str, Any] = {}
        for word in self.executor_args:
            key, equals, value = word.partition("=")
            if not key.isidentifier() or not equals:
                raise UsageError(f"--executor_args must be KEY=VALUE, such as partition=cpu, but is {word!r}.")
            found[key] = value
            with suppress(ValueError):
                found[key] = json.loads(value)
        return found

    def check(self) -> None:
        """Check that the options are consistent.

        Raises:
            UsageError: An option requires another one, or is invalid.
            ImportError: The executor is not installed.
        """
        given = [name for name in ("storage", "workers", "executor_args") if getattr(self, name) not in (None, [])]
        if self.executor is None and (self.tasks > 1 or given):
            raise UsageError(f"--{given[0] if given else 'tasks'} requires --executor local, slurm or ray.")
        if (self.workers or 0) > self.tasks:
            raise UsageError(
                f"--workers {self.workers} needs as many tasks, but --tasks is {self.tasks}. Pass --tasks {self.workers} or "
                "more."
            )
        if self.storage == "":
            raise UsageError("--storage is empty. Name a folder or a URL, or omit the option.")
        extras = {"scale": "datatrove"} | ({"ray": "ray"} if self.executor == "ray" else {})
        for extra, module in extras.items() if self.executor else ():
            if find_spec(module) is None:
                raise MissingExtraError(f"--executor {self.executor} requires {module}: {install_command(extra)}.")
        if self.executor == "slurm" and self.storage is None:
            raise UsageError(
                "--executor slurm requires --storage, a folder or URL that every node can read and write."
            )
        _ = self.arguments


@checked
@dataclass
class FilterOptions(BitextOptions):
    """The pairs to score, and which to keep."""

    corpus: list[str] = option(
        help="Bitext: TSV, CSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name. Can be passed as the first "
        "argument.",
        first=True,
    )
    output: str = option(
        help="Output file, with the column score: .tsv, .jsonl (.gz) or .parquet. Columns of the bitext other than texts, "
        "languages, links, back-translations and negatives are not written.",
        aliases=["-o"],
    )
    score: Literal["margin", "cosine"] = option(
        "margin",
        "margin: the cosine of a pair relative to those of both sentences with their neighbours in the corpus; "
        "cosine: the cosine alone, which needs no search, but is not comparable between sentences and languages.",
    )
    margin: Margin = option("ratio", "Kind of margin: ratio, distance or absolute, as in `metaphrase mine`.")
    threshold: Finite | None = option(None, "Minimum score of a pair. Default: keep all pairs, with their scores.")
    top: Count | None = option(None, "Maximum number of pairs; the best are kept.")
    negatives: CountOr0 = option(
        0,
        "Add the column negatives, which tr reads: up to this number of targets of other pairs that are most similar to the "
        "source, but at most 0.95 times as similar as its own.",
    )

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The files that are written: the pairs and a summary."""
        return Path(self.output), Path(f"{self.output}.json")

    def check(self) -> None:
        """Check that the options are consistent."""
        if self.score == "cosine" and self.margin != "ratio":
            raise UsageError(f"--margin {self.margin} is not used with --score cosine. Omit one of them.")
        check_format(self.output)
        check_files(self.outputs, self.input_files(self.corpus))


def _language(path: str, given: str | None, side: str) -> str:
    match = _LANGUAGE.search(Path(path).name)
    if given is None and (match is None or match[1] in {*NO_CODES, "tok"}):
        raise UsageError(f"Cannot infer the language from the file name {Path(path).name!r}: pass --{side}_lang.")
    return language_code(given or str(match and match[1]))
