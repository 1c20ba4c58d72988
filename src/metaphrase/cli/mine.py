"""``metaphrase mine SOURCE TARGET -o OUT``: find the translations in two monolingual texts."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sentence_transformers import SentenceTransformer

from metaphrase.cli import emit, notes, parse, show_progress
from metaphrase.corpus.text import one_line
from metaphrase.corpus.writing import check_writable, write_corpus
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.retrieval import resolve_prompt
from metaphrase.exceptions import DataError, StorageError, UsageError
from metaphrase.io.digests import file_facts, weights_digest
from metaphrase.io.environment import versions
from metaphrase.io.files import write_json
from metaphrase.mining.search import (
    Approximate,
    Index,
    Margin,
    Neighbours,
    Pairs,
    Retrieval,
    Rows,
    nearest_neighbours,
    recall,
    runners_up,
    search_bytes,
    select_pairs,
    suggest_threshold,
)
from metaphrase.mining.shards import (
    SHARD,
    Sentences,
    clear_work_folder,
    encode_shards,
    neighbour_shards,
    open_work_folder,
    read_sentences,
)
from metaphrase.modeling.packing import packed

logger = logging.getLogger(__name__)

SUMMARY = "Find the translations in two monolingual texts"
DESCRIPTION = "metaphrase mine SOURCE TARGET -o OUT"
EXAMPLES = (
    "metaphrase mine news.sw.gz news.en.gz -o mined.tsv.gz",
    "metaphrase mine a.txt b.txt --source_lang sw --target_lang en -o mined.parquet --threshold auto --json",
    "metaphrase mine news.sw.gz news.en.gz -o mined.tsv.gz --index ivf --half --keep_work",
)

SIDES = ("source", "target")
#: Pairs that are written together.
_CHUNK = 10_000
#: Quantiles of the scores, in percent, around which the sample sheet shows pairs.
_QUANTILES = (99, 95, 90, 75, 50, 25, 10)
_SHOWN = 10
_BINS = 24
_LANGUAGE = re.compile(r"\.([a-z]{2,3})(?:\.gz)?$")
_NO_LANGUAGE = frozenset(["txt", "tsv", "csv", "raw", "tok"])
#: Queries whose exact neighbours tell what an approximate search misses.
_TRIED = 1024


@dataclass
class EncoderOptions:
    """What embeds sentences, and how their neighbours are searched."""

    model: str = field(default="starter", metadata={"help": "Encoder: a folder, a Hub id, or 'starter'."})
    prompt: str = field(
        default="auto",
        metadata={"help": "Text before each sentence. auto: the query prompt that the model stores; none: nothing."},
    )
    max_length: int | None = field(default=None, metadata={"help": "Tokens after which a sentence is cut."})
    batch_size: int = field(default=32, metadata={"help": "Sentences per forward pass."})
    half: bool = field(default=False, metadata={"help": "Keep embeddings in 16 bits: half the disk."})
    shard_size: int = field(
        default=SHARD, metadata={"help": "Sentences that are embedded, searched and kept together."}
    )
    k: int = field(default=4, metadata={"help": "Neighbours that a similarity is compared with."})
    index: Index = field(
        default="exact",
        metadata={
            "help": "exact; or approximate, for some 200,000 sentences and more: ivf, hnsw. What these find is ranked "
            "by exact similarities, and the share that they miss is measured."
        },
    )
    probes: int = field(default=16, metadata={"help": "Cells that an ivf index searches; more find more."})
    search_device: str | None = field(
        default=None,
        metadata={"help": "Where an exact search runs: cuda, cpu. Default: cuda where there is one, else faiss."},
    )


@dataclass
class MineOptions:
    """What is mined, and what is kept."""

    source: str = field(
        metadata={"help": "Text of the source language, one sentence a line, or TSV; also .gz. May stand first."}
    )
    target: str = field(metadata={"help": "Text of the target language. May stand second."})
    output: str = field(
        metadata={
            "aliases": ["-o"],
            "help": "Where the pairs go: .tsv, .jsonl (also .gz) or .parquet, with the columns score, source, target, "
            "source_lang and target_lang. A summary, a histogram and a sample to read are put beside it.",
        }
    )
    source_lang: str | None = field(
        default=None,
        metadata={"help": "Language of the source; default: what the file's name ends with (news.sw.gz)."},
    )
    target_lang: str | None = field(default=None, metadata={"help": "Language of the target; default: likewise."})
    source_column: str | None = field(
        default=None, metadata={"help": "Column of a TSV source: its name in the header, or its number, from 1."}
    )
    target_column: str | None = field(default=None, metadata={"help": "Column of a TSV target."})
    margin: Margin = field(
        default="ratio",
        metadata={
            "help": "Score of a pair. ratio: its cosine over the mean cosine of both sentences with their --k neighbours; "
            "distance: the cosine less that mean; absolute: the cosine."
        },
    )
    retrieval: Retrieval = field(
        default="max",
        metadata={
            "help": "forward: each source with its best target; backward: each target with its best source; intersection: "
            "the pairs that both find; max: the pairs that either finds, best first, each sentence in one pair only."
        },
    )
    threshold: str | None = field(
        default=None,
        metadata={"help": "Least score of a pair. auto: the suggestion, which is a guess. Default: all pairs."},
    )
    top: int | None = field(default=None, metadata={"help": "Keep the best so many pairs."})
    copies: bool = field(default=False, metadata={"help": "Keep pairs whose two sides are the same text."})
    keep_work: bool = field(
        default=False,
        metadata={"help": "Keep embeddings and neighbours: other margins and thresholds then take seconds."},
    )


def run(argv: Sequence[str]) -> int:
    """Mine, write the pairs, and say what they are like."""
    leading = next((at for at, token in enumerate(argv) if token.startswith("-")), len(argv))
    if leading > 2:
        raise UsageError(f"Give two texts, SOURCE and TARGET, not {leading}. See `metaphrase mine --help`.")
    flags = [part for pair in zip(("--source", "--target"), argv[:leading], strict=False) for part in pair]
    options, encoder = parse(
        "metaphrase mine",
        [MineOptions, EncoderOptions],
        [*flags, *argv[leading:]],
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    start = time.perf_counter()
    torch.set_flush_denormal(True)
    console = notes()
    least = check(options, encoder)
    languages = (
        _language(options.source, options.source_lang, "source"),
        _language(options.target, options.target_lang, "target"),
    )
    output = Path(options.output)
    inputs = [(options.source, options.source_column), (options.target, options.target_column)]
    read = [partial(read_sentences, path, column) for path, column in inputs]
    for text in read:
        next(text(), None)
    model = load_encoder(encoder.model, max_length=encoder.max_length)
    facts = [{**file_facts(path), "column": column} for path, column in inputs]
    work = open_work_folder(output.with_name(f"{output.name}.partial"), manifest(model, encoder, {"inputs": facts}))

    sources, targets = (Sentences.write(work / side, text) for side, text in zip(SIDES, read, strict=True))
    console.print(f"source: {_counted(sources.facts)}\ntarget: {_counted(targets.facts)}")
    size = sum((work / side / "sentences.txt").stat().st_size for side in SIDES)
    state_needs(needs(len(sources), len(targets), model, encoder, size), work, console)
    forward, backward, search = search_both(model, sources, targets, work, encoder, console)

    pairs = select_pairs(forward, backward, margin=options.margin, retrieval=options.retrieval)
    candidates = len(pairs.score_c)
    if not options.copies:
        pairs = pairs.take(~_copies(pairs, sources, targets))
    runner_up_n = runners_up(forward, backward, options.margin)
    suggestion = suggest_threshold(pairs, runner_up_n)
    if least == "auto":
        if suggestion is None:
            raise DataError(
                "No threshold can be suggested: second-best neighbours score like the best. Read the scores without "
                "--threshold; the two texts may have no translations in common, or the encoder none of the languages."
            )
        least = suggestion
    kept = pairs if least is None else pairs.take(pairs.score_c >= least)
    kept = kept.take(slice(options.top))
    write_pairs(kept, sources, targets, languages, output, work)
    result: dict[str, Any] = {
        "output": output.name,
        "pairs": len(kept.score_c),
        "candidates": candidates,
        "copies_dropped": candidates - len(pairs.score_c),
        "threshold": least,
        "suggested_threshold": suggestion,
        "quantiles": _quantiles(pairs.score_c),
        "histogram": histogram(pairs.score_c),
        "source": {"lang": languages[0], "file": Path(options.source).name, **facts[0], **sources.facts},
        "target": {"lang": languages[1], "file": Path(options.target).name, **facts[1], **targets.facts},
        "settings": {
            **asdict(encoder),
            "prompt": resolve_prompt(model, None if encoder.prompt == "none" else encoder.prompt),
            "margin": options.margin,
            "retrieval": options.retrieval,
            "top": options.top,
            **search,
        },
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 2),
    }
    console.print("\n".join(text_histogram(result["histogram"], least)))
    say_threshold(least, suggestion, pairs, console)
    written = [output, write_json(output.with_name(f"{output.name}.json"), result)]
    sheet = output.with_name(f"{output.name}.sample.txt")
    written.append(write_sample(pairs, sources, targets, least or suggestion, sheet))
    written += draw_histogram(pairs, runner_up_n, least, suggestion, output.with_name(f"{output.name}.png"))
    console.print(f"Wrote {len(kept.score_c):,} pairs: {', '.join(map(str, written))}")
    if options.keep_work:
        console.print(f"Kept {work}")
    else:
        clear_work_folder(work)
    emit(result)
    return 0


def check(options: MineOptions, encoder: EncoderOptions) -> float | Literal["auto"] | None:
    """The threshold, once the options are known to go together.

    Raises:
        ValueError: They do not.
    """
    check_writable(options.output)
    check_encoder(encoder)
    if options.top is not None and options.top < 1:
        raise UsageError(f"--top {options.top} keeps nothing.")
    if options.threshold in (None, "auto"):
        return options.threshold  # type: ignore[return-value]
    try:
        return float(str(options.threshold))
    except ValueError:
        raise UsageError(f"--threshold is a number or 'auto', not {options.threshold!r}.") from None


def check_encoder(encoder: EncoderOptions) -> None:
    """Refuse numbers below 1, before anything is done.

    Raises:
        ValueError: There is one.
    """
    for name in ("k", "shard_size", "batch_size", "probes"):
        if getattr(encoder, name) < 1:
            raise UsageError(f"--{name} {getattr(encoder, name)} should be at least 1.")


def _language(path: str, given: str | None, side: str) -> str:
    match = _LANGUAGE.search(Path(path).name)
    if given is None and (match is None or match[1] in _NO_LANGUAGE):
        raise UsageError(f"The name {Path(path).name!r} tells no language: give --{side}_lang.")
    return given or str(match and match[1])


def _counted(facts: Mapping[str, int]) -> str:
    left_out = [f"{facts[key]:,} {key}" for key in ("repeated", "empty", "unreadable") if facts[key]]
    return f"{facts['sentences']:,} sentences of {facts['lines']:,} lines" + (
        f" ({', '.join(left_out)} left out)" if left_out else ""
    )


def manifest(model: SentenceTransformer, encoder: EncoderOptions, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides embeddings and neighbours."""
    nowhere = ("batch_size", "search_device")
    settings = {key: value for key, value in asdict(encoder).items() if key not in nowhere}
    return {**inputs, **settings, "weights": weights_digest(model)}


# ------------------------------------------------------------------------------------------------------------ resources


def needs(
    sources: int, targets: int, model: SentenceTransformer, encoder: EncoderOptions, text_bytes: int
) -> dict[str, int]:
    """Bytes of disk and memory that the work takes, but for the activations of a forward pass.

    Returns:
        ``disk`` (texts, embeddings, neighbours, indexes, pairs), ``memory`` (the model, shards, neighbours, the search,
        scores). Pages of the embeddings' files that the system keeps in its cache are not counted: it takes them back
        where memory is short.
    """
    n, hidden = sources + targets, int(model.get_embedding_dimension() or 0)
    larger = max(sources, targets)
    per_row = {"exact": 0, "ivf": hidden + 8, "hnsw": hidden + 4 * 66}[encoder.index]
    neighbours = 8 * n * encoder.k
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    shards = (3 if encoder.half else 2) * min(encoder.shard_size, larger) * hidden * 4
    search = search_bytes(larger, hidden, k=encoder.k, index=encoder.index)
    return {
        "disk": 2 * text_bytes + n * hidden * (2 if encoder.half else 4) + neighbours + n * per_row + 32 * n,
        "memory": weights + shards + 2 * neighbours + search + 64 * n,
    }


def state_needs(needed: Mapping[str, int], work: Path, console: Console) -> None:
    """Say what the work takes, and refuse to begin where the disk is too small.

    Raises:
        StorageError: It is.
    """
    free = shutil.disk_usage(work).free + sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    console.print(
        f"This takes {_megabytes(needed['disk'])} of disk in {work} ({_megabytes(free)} free), and "
        f"{_megabytes(needed['memory'])} of memory besides Python and a forward pass."
    )
    if needed["disk"] > free:
        raise StorageError(
            f"There is too little disk for {work}: {_megabytes(free)} of {_megabytes(needed['disk'])}. Put the output "
            "on another disk, or give --half."
        )


def _megabytes(n: int) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


# --------------------------------------------------------------------------------------------------------------- search


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Progress bars; gives what begins one: its text and total, and back comes what advances it.

    Where bars are not drawn, a line says what begins.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not show_progress()) as bars:

        def begin(description: str, total: int) -> Callable[[int], None]:
            if not show_progress():
                console.print(f"{description}: {total:,} …")
            task = bars.add_task(description, total=total)
            return lambda n: bars.advance(task, n)

        yield begin


def embed(
    model: SentenceTransformer,
    texts: Sequence[str],
    folder: Path,
    encoder: EncoderOptions,
    advance: Callable[[int], None],
) -> Rows:
    """Embeddings of texts, in shards in a folder."""
    prompt = resolve_prompt(model, None if encoder.prompt == "none" else encoder.prompt)

    def encode(chunk: list[str]) -> NDArray[Any]:
        return model.encode(
            chunk, prompt=prompt, batch_size=encoder.batch_size, show_progress_bar=False, convert_to_numpy=True
        )

    with packed(model):
        return encode_shards(texts, folder, encode, size=encoder.shard_size, half=encoder.half, advance=advance)


def search_both(
    model: SentenceTransformer,
    sources: Sequence[str],
    targets: Sequence[str],
    work: Path,
    encoder: EncoderOptions,
    console: Console,
) -> tuple[Neighbours, Neighbours, dict[str, Any]]:
    """Embed both sides and find their neighbours, in shards in a folder.

    Returns:
        Neighbours of the sources and of the targets, and facts of the search: the recall of an approximate one.
    """
    with progress(console) as begin:
        rows = [
            embed(model, texts, work / side / "embeddings", encoder, begin(f"Embedding {side}s", len(texts)))
            for side, texts in (("source", sources), ("target", targets))
        ]
        found, facts = [], {}
        for side, queries, pool in (("source", rows[0], rows[1]), ("target", rows[1], rows[0])):
            if encoder.index != "exact" and not _index(work / side).exists():
                other = "target" if side == "source" else "source"
                build_index(pool, work / side, encoder, begin(f"Index of {other}s", len(pool)))
            advance = begin(f"Neighbours of {side}s", len(queries))
            neighbours, share = search_shards(queries, pool, work / side, encoder, advance)
            found.append(neighbours)
            if share is not None:
                facts[f"{side}_recall"] = round(share, 4)
                console.print(f"The {encoder.index} index finds {share:.1%} of the {side}s' {encoder.k} neighbours.")
    return found[0], found[1], facts


class _Counted(Rows):
    """Rows that tell how many of them have been read, block by block."""

    def __init__(self, rows: Rows, advance: Callable[[int], None]) -> None:
        super().__init__(rows.blocks)
        self.advance = advance

    def block(self, at: int) -> NDArray[np.float32]:
        """A block as float32; the one before it is done with."""
        if at:
            self.advance(self.size)
        return super().block(at)


def _index(folder: Path) -> Path:
    return folder / "pool.faiss"


def build_index(pool: Rows, folder: Path, encoder: EncoderOptions, advance: Callable[[int], None]) -> None:
    """Put the approximate index of some rows into a folder."""
    Approximate.build(_Counted(pool, advance), encoder.index, probes=encoder.probes).save(_index(folder))
    advance(len(pool.blocks[-1]))


def search_shards(
    queries: Rows, pool: Rows, folder: Path, encoder: EncoderOptions, advance: Callable[[int], None]
) -> tuple[Neighbours, float | None]:
    """Neighbours of rows in a pool, and the recall of an approximate search, whose index is built if it is not there."""
    device = encoder.search_device or ("cuda" if torch.cuda.is_available() else None)

    def exactly(query_qh: NDArray[np.float32]) -> Neighbours:
        return nearest_neighbours(query_qh, pool, encoder.k, device=device)

    if encoder.index == "exact":
        return neighbour_shards(queries, folder / "neighbours", exactly, advance=advance), None

    if not _index(folder).exists():
        build_index(pool, folder, encoder, lambda n: None)
    index = Approximate.load(_index(folder))

    def approximately(query_qh: NDArray[np.float32]) -> Neighbours:
        return index.search(query_qh, pool, encoder.k)

    found = neighbour_shards(queries, folder / "neighbours", approximately, advance=advance)
    tried_qh = queries.block(0)[:_TRIED]
    return found, recall(found.take(slice(len(tried_qh))), exactly(tried_qh))


# --------------------------------------------------------------------------------------------------------------- output


def _copies(pairs: Pairs, sources: Sequence[str], targets: Sequence[str]) -> NDArray[np.bool_]:
    """Which pairs have the same text on both sides, whatever its case."""
    return np.fromiter(
        (
            sources[s].casefold() == targets[t].casefold()
            for s, t in zip(pairs.source_c.tolist(), pairs.target_c.tolist(), strict=True)
        ),
        dtype=bool,
        count=len(pairs.score_c),
    )


def write_pairs(
    pairs: Pairs,
    sources: Sequence[str],
    targets: Sequence[str],
    languages: tuple[str, str],
    output: Path,
    work: Path,
) -> None:
    """Write pairs in their order, by way of a file in the work folder, in bounded memory."""
    as_text = ".tsv" in output.suffixes[-2:]
    names = ("source", "target", "source_lang", "target_lang")
    schema = pa.schema([("score", pa.string() if as_text else pa.float64()), *((name, pa.string()) for name in names)])
    path = work / "pairs.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for first in range(0, len(pairs.score_c), _CHUNK):
            chunk = pairs.take(slice(first, first + _CHUNK))
            scores = [round(float(score), 6) for score in chunk.score_c]
            columns = [
                [f"{score:.6f}" for score in scores] if as_text else scores,
                [sources[at] for at in chunk.source_c.tolist()],
                [targets[at] for at in chunk.target_c.tolist()],
                *([language] * len(scores) for language in languages),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    write_corpus(Dataset.from_file(str(path)), output)


def _quantiles(score_c: NDArray[np.floating]) -> dict[str, float]:
    if not len(score_c):
        return {}
    return {str(q): round(float(np.quantile(score_c, q / 100)), 6) for q in (100, *_QUANTILES, 5, 0)}


def histogram(score_c: NDArray[np.floating]) -> dict[str, list[float]]:
    """Counts of scores in equal bins; the outermost also hold what lies beyond the 0.1 % and 99.9 % quantiles.

    Returns:
        ``edges`` of the bins and their ``counts``.
    """
    if not len(score_c):
        return {"edges": [0.0, 1.0], "counts": [0]}
    low, high = np.quantile(score_c, [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + 1e-6, _BINS + 1)
    counts = np.histogram(np.clip(score_c, edges[0], edges[-1]), edges)[0]
    return {"edges": [round(float(edge), 6) for edge in edges], "counts": counts.tolist()}


def text_histogram(bins: Mapping[str, Sequence[float]], threshold: float | None = None, width: int = 50) -> list[str]:
    r"""A histogram as lines of text, a mark at the bins that a threshold keeps.

    >>> print(*text_histogram({"edges": [0.8, 1.0, 1.2], "counts": [4, 2]}, 1.0, width=4), sep="\n")
      0.800 ████ 4
    + 1.000 ██ 2
    """
    edges, counts = bins["edges"], bins["counts"]
    most = max(*counts, 1)
    return [
        f"{'+' if threshold is not None and edge >= threshold else ' '}{edge:6.3f} "
        f"{'█' * round(width * count / most) or ('▏' if count else '')} {count:,}"
        for edge, count in zip(edges, counts, strict=False)
    ]


def say_threshold(least: float | None, suggestion: float | None, pairs: Pairs, console: Console) -> None:
    """The threshold that was applied, and the one that is suggested."""
    if least is not None:
        console.print(f"Threshold: {least:.4f}, kept {np.count_nonzero(pairs.score_c >= least):,} pairs (marked +).")
    if suggestion is None:
        console.print("No threshold is suggested: second-best neighbours score like the best.")
    elif suggestion != least:
        console.print(
            f"Suggestion: --threshold {suggestion:.4f} keeps {np.count_nonzero(pairs.score_c >= suggestion):,} pairs. It "
            "is a guess from the scores of second-best neighbours; read the sample before you trust it."
        )


def write_sample(
    pairs: Pairs, sources: Sequence[str], targets: Sequence[str], threshold: float | None, path: Path
) -> Path:
    """A sheet to read, tabs between its columns: the pairs next to some quantiles of the scores, and to a threshold."""
    lines = ["around\tscore\tsource\ttarget"]
    marks = [(f"best {100 - q} %", int((100 - q) / 100 * len(pairs.score_c))) for q in _QUANTILES]
    if threshold is not None:
        marks.insert(0, (f"threshold {threshold:.4f}", int(np.count_nonzero(pairs.score_c >= threshold))))
    for label, at in [("best", 0), *marks] if len(pairs.score_c) else []:
        first = min(max(0, at - _SHOWN // 2), max(0, len(pairs.score_c) - _SHOWN))
        for score, source, target in zip(
            *(column.tolist() for column in pairs.take(slice(first, first + _SHOWN))), strict=True
        ):
            texts = (one_line(text) for text in (sources[source], targets[target]))
            lines.append("\t".join([label, f"{score:.4f}", *texts]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def draw_histogram(
    pairs: Pairs, runner_up_n: NDArray[np.floating], least: float | None, suggestion: float | None, path: Path
) -> list[Path]:
    """The histogram as a picture, with the scores of second-best neighbours; nothing where matplotlib is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("No picture of the scores: pip install 'metaphrase[report]'.")
        return []
    if not len(pairs.score_c):
        return []
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    both = np.concatenate([pairs.score_c, runner_up_n])
    low, high = np.quantile(both, [0.001, 0.999])
    edges = np.linspace(float(low), float(high), 81).tolist()
    axes.hist(pairs.score_c, bins=edges, color="#4c78a8", label="pairs")
    axes.hist(runner_up_n, bins=edges, color="#e45756", histtype="step", label="second-best neighbours")
    if least is not None:
        axes.axvline(least, color="black", label=f"threshold {least:.4f}")
    if suggestion is not None and suggestion != least:
        axes.axvline(suggestion, color="black", linestyle=":", label=f"suggestion {suggestion:.4f} (a guess)")
    axes.set(xlabel="margin", ylabel="pairs", yscale="log")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return [path]
