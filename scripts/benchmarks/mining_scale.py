"""Measure how `metaphrase mine --executor local` grows: time, memory, disk, and what the approximate index misses.

    python scripts/benchmarks/mining_scale.py                              # 10,000 to 1,000,000 lines a side; hours
    python scripts/benchmarks/mining_scale.py --data bucc2018-sample       # also BUCC's sample, embedded by the starter
    python scripts/benchmarks/mining_scale.py --sizes 2000 --results out   # a trial

The texts are simulated: lines of 6 to 12 made-up words, whose frequencies follow Zipf's law. Half of the lines of a side
are translations of lines of the other side, in another order and with some words replaced. The encoder has one random layer
with 384 dimensions, in which a word and its translation are similar: it costs little, so that the search dominates. F1
shows what an approximate index changes, not the quality on real texts.

From the same texts, the search alone is compared with other programs (`mining_peers.py`): each mines the same
embeddings in a process of its own, with as many threads as the command has workers. F1 is that of the best threshold.

Each row, a size and an index or program, is kept in ``results/mining-scale.json`` when it is complete; an interrupted run
resumes with the next one. Rows of another machine, or with other workers, tasks or versions, are refused. An estimate is
printed before each size, and rows of more than ``--most_hours`` are skipped. The tables are ``mining-scale.md`` and
``mining-peers.md`` there, and ``scripts/update_tables.py`` copies them to docs/scaling.md. The plots are
``docs/scaling/*.svg``, or in the folder of ``--results``.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from measuring import facts
from mining_peers import ENGINES, STOPES
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, HfArgumentParser, PreTrainedTokenizerFast

from metaphrase import load_encoder
from metaphrase.evaluation.bucc import MiningSet, load_bucc_folder
from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import option
from metaphrase.io.files import read_json, write_json
from metaphrase.mining.margins import best_threshold
from metaphrase.modeling.bulk import encode

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parents[2] / "docs" / "scaling"
WORDS, HIDDEN = 20_000, 384
#: Share of the words of a translation that are replaced, and length of the difference between a word and its translation.
REPLACED, NOISE = 0.3, 0.7
#: Assumed speed of a core, for the first estimate of a duration.
FLOPS = 5e10
#: What is mined.
SIMULATED, BUCC = "simulated", "BUCC 2018 sample"


@dataclass
class Options:
    """Options of the measurement."""

    sizes: list[int] = option([10_000, 100_000, 1_000_000], "Lines per side.")
    indexes: list[str] = option(["exact", "ivf"], "Kinds of search.")
    peers: list[str] = option(list(ENGINES), f"Programs: {', '.join(ENGINES)}.")
    data: str | None = option(None, "Folder of BUCC 2018's sample, to mine with all programs.")
    most_hours: float = option(1.0, "Skip rows that are estimated to take longer.")
    tasks: int = option(8, "Tasks of each stage.")
    workers: int = option(2, "Tasks at a time.")
    results: str = option(str(RESULTS), "Folder of the results.")
    plots: str | None = option(None, "Folder of the plots (default: docs/scaling, or that of --results).")
    work: str = option("out/mining-scale", "Folder of texts and shards, deleted at the end.")


# ---------------------------------------------------------------------------------------------------- simulation


def write_encoder(folder: Path) -> None:
    """Write an encoder that knows the words a0, a1, … and their translations b0, b1, …"""
    torch.manual_seed(0)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"{side}{at}" for side in "ab" for at in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    config = BertConfig(
        vocab_size=len(names),
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=6,
        intermediate_size=HIDDEN,
        max_position_embeddings=32,
    )
    bert = BertModel(config, add_pooling_layer=False)
    rows = bert.embeddings.word_embeddings.weight.data
    rows[4 : 4 + WORDS].normal_()
    rows[4 + WORDS :] = rows[4 : 4 + WORDS] + NOISE * torch.randn(WORDS, HIDDEN)
    bert.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special).save_pretrained(folder)
    modules = [
        Transformer(str(folder), model_kwargs={"add_pooling_layer": False}, max_seq_length=32),
        Pooling(HIDDEN, pooling_mode="mean"),
    ]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))


def lines(size: int) -> Iterator[tuple[str, str]]:
    """Simulate the lines of both sides; the first half of them are translations."""
    rng = np.random.default_rng(size)
    share = 1 / np.arange(10, WORDS + 10)
    upto = np.cumsum(share / share.sum())
    for at in range(size):
        source, other = (np.searchsorted(upto, rng.random(rng.integers(6, 13))) for _ in "ab")
        if at < size // 2:
            kept = rng.random(len(source)) >= REPLACED
            drawn = np.searchsorted(upto, rng.random(len(source)))
            other = rng.permutation(np.where(kept, source, drawn))
        yield " ".join(f"a{word}" for word in source), " ".join(f"b{word}" for word in other)


def write_texts(size: int, folder: Path) -> set[tuple[str, str]]:
    """Write both sides, the second in another order. Returns the translations."""
    both = list(lines(size))
    order = np.random.default_rng(0).permutation(size)
    (folder / "news.sw").write_text("".join(f"{source}\n" for source, _ in both), encoding="utf-8")
    (folder / "news.en").write_text("".join(f"{both[at][1]}\n" for at in order), encoding="utf-8")
    return set(both[: size // 2])


# ---------------------------------------------------------------------------------------------------- measuring


class PeakMemory(threading.Thread):
    """Follows the memory of a process and its children, without pages of files, which the system frees on demand.

    Workers share pages with the process that they are forked from; a page counts once.
    """

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.ended = process, 0, threading.Event()

    def run(self) -> None:
        """Read /proc until the process has ended."""
        while not self.ended.wait(0.5):
            parents = {}
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    parents[int(folder.name)] = int(_fields(folder / "status")["PPid"])
                except OSError:  # the process has ended
                    continue
            tree = {self.process}
            while more := {one for one, parent in parents.items() if parent in tree} - tree:
                tree |= more
            self.peak = max(self.peak, sum(map(_own_memory, tree)))


def _own_memory(process: int) -> int:
    """Bytes of a process that are not pages of files; a page that several processes share is divided among them."""
    try:
        return 1024 * int(_fields(Path(f"/proc/{process}/smaps_rollup"))["Pss_Anon"].split()[0])
    except (OSError, KeyError):  # the process has ended
        return 0


def _fields(path: Path) -> dict[str, str]:
    return dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines() if ":" in line)


def measured(command: Sequence[str], threads: int = 1) -> tuple[str, int]:
    """Run a program. Returns what it prints, and its peak memory.

    Raises:
        SystemExit: It failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    memory = PeakMemory(program.pid)
    memory.start()
    printed, _ = program.communicate()
    memory.ended.set()
    memory.join()
    if program.returncode:
        raise SystemExit(f"A program failed, see its message above: {' '.join(command)}")
    return printed, memory.peak


def folder_bytes(folder: Path, pattern: str = "*") -> int:
    """Add up the sizes of files."""
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def measure(size: int, index: str, encoder: Path, options: Options) -> dict[str, Any]:
    """Mine simulated texts, and measure a row."""
    folder = Path(options.work) / f"{size}-{index}"
    shutil.rmtree(folder, ignore_errors=True)  # a resumed row would not be timed as a whole
    folder.mkdir(parents=True)
    gold = write_texts(size, folder)
    output, storage = folder / "mined.tsv", folder / "storage"
    words = ["mine", folder / "news.sw", folder / "news.en", "-o", output, "--model", encoder, "--half"]
    words += ["--index", index, "--threshold", "auto", "--executor", "local", "--storage", storage]
    words += ["--tasks", options.tasks, "--workers", options.workers]
    start = time.monotonic()
    _, memory = measured([sys.executable, "-m", "metaphrase", *map(str, words)])
    seconds = time.monotonic() - start
    with output.open(encoding="utf-8", newline="") as file:
        found = {
            (row["source"], row["target"]) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        }
    summary = read_json(f"{output}.json")
    recalls = [summary["settings"][key] for key in ("source_recall", "target_recall") if key in summary["settings"]]
    stages: dict[str, float] = {}
    for path in storage.glob("logs/*/stats/*.json"):
        stage = path.parents[1].name.split("-")[0]
        steps = [step["time_stats"] for step in read_json(path)]
        total = sum(step["total"] for step in steps if step)  # 0 instead, for a task without shards
        stages[stage] = round(stages.get(stage, 0) + total, 1)
    row = {
        "size": size,
        "index": index,
        "seconds": round(seconds, 1),
        "task_seconds": stages,
        "memory": memory,
        "disk": folder_bytes(storage),
        "index_bytes": folder_bytes(storage, "*.faiss"),
        "recall": round(sum(recalls) / 2, 4) if recalls else None,
        "pairs": len(found),
        "f1": round(2 * len(gold & found) / (len(gold) + len(found)), 4),
    }
    shutil.rmtree(folder)
    return row


Embedded = tuple[Path, set[tuple[int, int]]]


def embedded(name: str, folder: Path, model: SentenceTransformer, sides: Any, gold: set[tuple[int, int]]) -> Embedded:
    """Embed both sides, unless an earlier run has. Returns the folder of the embeddings, and the gold pairs' rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for side, texts in zip(("source", "target"), sides, strict=True):
        path = folder / f"{side}.npy"
        if not path.exists():
            print(f"Embedding {len(texts):,} lines of {name} …", flush=True)
            np.save(folder / "partial.npy", encode(model, texts, normalize_embeddings=True))
            (folder / "partial.npy").replace(path)
    return folder, gold


def simulated(size: int, options: Options) -> Embedded:
    """Embed simulated texts. Line ``at`` of the second side is the translation of line ``order[at]`` of the first."""
    both = list(lines(size))
    order = np.random.default_rng(0).permutation(size)
    sides = [source for source, _ in both], [both[at][1] for at in order]
    model = SentenceTransformer(str(Path(options.work) / "encoder"), device="cpu")
    gold = {(int(row), at) for at, row in enumerate(order) if row < size // 2}
    return embedded("simulated texts", Path(options.work) / f"{size}-embedded", model, sides, gold)


def bucc(one: MiningSet, options: Options) -> Embedded:
    """Embed a sample of BUCC with the starter."""
    rows = [{name: at for at, name in enumerate(ids)} for ids in (one.source_ids, one.target_ids)]
    gold = {(rows[0][source], rows[1][target]) for source, target in one.gold}
    model = load_encoder("starter", device="cpu")
    return embedded(BUCC, Path(options.work) / one.sha256[:12], model, (one.sources, one.targets), gold)


def measure_peer(size: int, texts: str, engine: str, given: Embedded, options: Options) -> dict[str, Any]:
    """Mine embeddings with a program, and measure a row."""
    folder, gold = given
    command = [sys.executable, str(Path(__file__).with_name("mining_peers.py")), engine, str(folder)]
    printed, memory = measured(command, options.workers)
    found = np.load(folder / "pairs.npz")
    correct = [pair in gold for pair in zip(found["source"].tolist(), found["target"].tolist(), strict=True)]
    best = best_threshold(found["score"], correct, len(gold))
    row = {"size": size, "texts": texts, "engine": engine, "seconds": json.loads(printed)["seconds"]}
    return row | {"memory": memory, "f1": round(best.f1, 4)}


# ---------------------------------------------------------------------------------------------------- duration


def estimate(rows: Sequence[dict[str, Any]], size: int, workers: int) -> float:
    """Estimate the seconds of a row from the largest one of its index or program; without one, from the operations.

    Exact search grows with the square of the size, an approximate one with its power 1.5, everything else linearly.
    """
    if not rows:
        return 30 + size / 200 + 4 * size**2 * HIDDEN / (workers * FLOPS)
    last = max(rows, key=lambda row: row["size"])
    factor = size / last["size"]
    stages = last.get("task_seconds")
    search = last["seconds"] if stages is None else min(stages.get("search", 0) / workers, last["seconds"])
    power = 2 if "exact" in last.get("index", last.get("engine")) else 1.5
    return (last["seconds"] - search) * factor + search * factor**power


# ---------------------------------------------------------------------------------------------------- results


def table(content: dict[str, Any]) -> str:
    """Format the rows as Markdown."""
    about = content["facts"]
    text = [
        f"{about['date']}: {about['device']}, {content['workers']} workers of one thread, torch {about['torch']}; simulated "
        f"texts, {HIDDEN} dimensions in 16 bits. Memory is that of all processes together, without pages of files.",
        "",
        "| lines a side | index | minutes | embed | index | search | memory, GB | index, GB | disk, GB | recall | F1 |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in content["rows"]:
        stages = [f"{row['task_seconds'].get(name, 0) / 60:.1f}" for name in ("embed", "index", "search")]
        sizes = [row["memory"], row["index_bytes"] / 2 * content["workers"], row["disk"]]
        recall = "" if row["recall"] is None else f"{row['recall']:.3f}"
        cells = [f"{row['size']:,}", row["index"], f"{row['seconds'] / 60:.1f}", *stages]
        cells += [*(f"{size / 1e9:.2f}" for size in sizes), recall, f"{row['f1']:.3f}"]
        text.append(f"| {' | '.join(cells)} |")
    text += ["", "Minutes of the stages are sums over tasks, which several workers share."]
    text += ["", "![Time, memory and disk space by the number of lines](scaling/mining.svg)"]
    return "\n".join(text) + "\n"


def peers_table(content: dict[str, Any]) -> str:
    """Format the comparison with other programs as Markdown."""
    about = content["facts"]
    text = [
        f"{about['date']}: {about['device']}, {content['workers']} threads; from embeddings of {HIDDEN} dimensions to pairs, "
        "without embedding the texts. Memory is without pages of files. F1 is that of the best threshold.",
        "",
        "| texts | lines a side | program | seconds | time ÷ metaphrase | memory, GB | F1 |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for row in content["peers"]:
        ours = f"metaphrase, {'exact' if 'exact' in row['engine'] else 'ivf'}"
        same = {"size": row["size"], "texts": row["texts"], "engine": ours}.items()
        seconds = next((one["seconds"] for one in content["peers"] if same <= one.items()), None)
        share = "" if seconds is None or row["engine"] == ours else f"{row['seconds'] / seconds:.2f}"
        cells = [row["texts"], f"{row['size']:,}", row["engine"], f"{row['seconds']:,.1f}", share]
        text.append(f"| {' | '.join(cells)} | {row['memory'] / 1e9:.2f} | {row['f1']:.3f} |")
    text += ["", "![Time and memory of the search by the number of lines](scaling/mining-peers.svg)"]
    return "\n".join(text) + "\n"


MEASURES = {"minutes": ("seconds", 60), "memory, GB": ("memory", 1e9), "disk, GB": ("disk", 1e9)}


def draw(rows: Sequence[dict[str, Any]], kind: str, path: Path) -> None:
    """Draw time, memory and, if measured, disk over the number of lines, a line for each index or program."""
    measures = {name: (key, unit) for name, (key, unit) in MEASURES.items() if all(key in row for row in rows)}
    figure = Figure(figsize=(3 * len(measures), 3.2), layout="constrained")
    panels = figure.subplots(1, len(measures))
    for axes, (name, (key, unit)) in zip(panels, measures.items(), strict=True):
        for index in dict.fromkeys(row[kind] for row in rows):
            points = [(row["size"], row[key] / unit) for row in rows if row[kind] == index]
            axes.plot(*zip(*points, strict=True), marker="o", label=index)
        axes.set(xscale="log", yscale="log", xlabel="lines a side", ylabel=name)
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def keep(content: dict[str, Any], options: Options) -> None:
    """Write the results, the tables and the plots."""
    results = Path(options.results)
    plots = Path(options.plots) if options.plots else PLOTS if results == RESULTS else results
    results.mkdir(parents=True, exist_ok=True)
    content["rows"].sort(key=lambda row: (row["size"], row["index"]))
    content["peers"].sort(key=lambda row: (row["texts"] == SIMULATED, row["size"], list(ENGINES).index(row["engine"])))
    write_json(results / "mining-scale.json", content)
    if content["rows"]:
        (results / "mining-scale.md").write_text(table(content), encoding="utf-8")
        draw(content["rows"], "index", plots / "mining.svg")
    if content["peers"]:
        (results / "mining-peers.md").write_text(peers_table(content), encoding="utf-8")
    if rows := [row for row in content["peers"] if row["texts"] == SIMULATED]:
        draw(rows, "engine", plots / "mining-peers.svg")


def check_comparable(kept: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """Refuse stored rows that were measured on another machine, or with other settings or versions."""
    flat = [{**one["facts"], "tasks": one["tasks"], "workers": one["workers"], "date": ""} for one in (kept, own)]
    if differing := [f"{key} {flat[0].get(key)}" for key, value in flat[1].items() if flat[0].get(key) != value]:
        raise UsageError(
            f"{path} has rows that were measured with {', '.join(differing)}, which differs here. Pass another folder as "
            "--results, or delete the file to measure all rows again."
        )


class Program:
    """The rows of the measurement, of which the missing ones are measured."""

    def __init__(self, options: Options) -> None:
        self.options = options
        kept = Path(options.results) / "mining-scale.json"
        self.content = read_json(kept) if kept.exists() else {"rows": [], "peers": []}
        own = {"facts": facts("cpu", 1), "tasks": options.tasks, "workers": options.workers}
        if self.content["rows"] or self.content["peers"]:
            check_comparable(self.content, own, kept)
        self.content |= own

    def missing(self, size: int, texts: str) -> list[tuple[str, str, float]]:
        """Return the missing rows of a size: the list they belong to, index or program, and estimated seconds."""
        rows, peers = self.content["rows"], self.content["peers"]
        todo = []
        for index in self.options.indexes if texts == SIMULATED else ():
            own = [row for row in rows if row["index"] == index]
            if all(row["size"] != size for row in own):
                todo.append(("rows", index, estimate(own, size, self.options.workers)))
        for engine in self.options.peers:
            own = [row for row in peers if row["engine"] == engine]
            is_done = any((row["size"], row["texts"]) == (size, texts) for row in own)
            if not is_done and not (engine.startswith("faiss, stopes") and size <= min(STOPES)):
                todo.append(("peers", engine, estimate(own, size, self.options.workers)))
        return todo

    def run(self, size: int, texts: str, load: Callable[[], Embedded]) -> None:
        """Measure the missing rows of a size, and keep each. ``load`` embeds the texts, for the other programs."""
        todo, most = self.missing(size, texts), 3600 * self.options.most_hours
        for _, name, seconds in (row for row in todo if row[2] > most):
            print(f"{size:,} lines, {name}: skipped, about {seconds / 3600:.1f} hours (--most_hours)")
        todo = [row for row in todo if row[2] <= most]
        print(
            f"{size:,} lines, {texts}: {len(todo)} rows, about {sum(row[2] for row in todo) / 60:.0f} minutes",
            flush=True,
        )
        given = None
        for kind, name, seconds in todo:
            print(f"{time.strftime('%H:%M:%S')} {name}: about {seconds / 60:.1f} minutes …", flush=True)
            if kind == "rows":
                row = measure(size, name, Path(self.options.work) / "encoder", self.options)
            else:
                given = given or load()
                row = measure_peer(size, texts, name, given, self.options)
            self.content[kind].append(row)
            keep(self.content, self.options)
            print(f"  {row['seconds']:,.1f} seconds, F1 {row['f1']:.3f}", flush=True)
        if given:
            shutil.rmtree(given[0])


def main(argv: list[str]) -> int:
    """Measure the missing rows, and write the tables and the plots."""
    options = HfArgumentParser(Options).parse_args_into_dataclasses(argv)[0]
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(options.workers)
    torch.set_flush_denormal(True)
    try:
        program = Program(options)
    except UsageError as error:
        print(f"mining_scale: {error}", file=sys.stderr)
        return 2
    write_encoder(Path(options.work) / "encoder")
    if options.data:
        for language, sets in load_bucc_folder(options.data, "sample_oracle").items():
            one = sets["sample"]
            size = max(len(one.sources), len(one.targets))
            program.run(size, f"{BUCC}, {language}–en", lambda one=one: bucc(one, options))
    for size in sorted(options.sizes):
        program.run(size, SIMULATED, lambda size=size: simulated(size, options))
    for name in ("mining-scale.md", "mining-peers.md"):
        if (path := Path(options.results) / name).exists():
            print(path.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
