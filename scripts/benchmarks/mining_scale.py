"""Measure how `metaphrase mine --executor local` grows: time, memory, disk, and what the approximate index misses.

    python scripts/benchmarks/mining_scale.py                              # 10,000 to 1,000,000 lines a side; hours
    python scripts/benchmarks/mining_scale.py --sizes 2000 --results out   # a trial

The texts are simulated: lines of 6 to 12 made-up words, whose frequencies follow Zipf's law. Half of the lines of a side
are translations of lines of the other side, in another order and with some words replaced. The encoder has one random layer
with 384 dimensions, in which a word and its translation are similar: it costs little, so that the search dominates. F1
shows what an approximate index changes, not the quality on real texts.

Each row, a size and an index, is kept in ``results/mining-scale.json`` when it is complete; an interrupted run goes on with
the next one. The table is ``mining-scale.md`` there, and the plot ``docs/scaling/mining.svg``; ``scripts/update_tables.py``
copies the table to docs/scaling.md.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from measuring import facts
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, HfArgumentParser, PreTrainedTokenizerFast

RESULTS = Path(__file__).parent / "results"
PLOT = Path(__file__).parents[2] / "docs" / "scaling" / "mining.svg"
WORDS, HIDDEN = 20_000, 384
#: Share of the words of a translation that are replaced, and length of the difference between a word and its translation.
REPLACED, NOISE = 0.3, 0.7


@dataclass
class Options:
    """Options of the measurement."""

    sizes: list[int] = field(default_factory=lambda: [10_000, 100_000, 1_000_000], metadata={"help": "Lines a side."})
    indexes: list[str] = field(default_factory=lambda: ["exact", "ivf"], metadata={"help": "Kinds of search."})
    most_exact: int = field(default=200_000, metadata={"help": "Largest size that is searched exactly."})
    tasks: int = field(default=8, metadata={"help": "Tasks of each stage."})
    workers: int = field(default=2, metadata={"help": "Tasks at a time."})
    results: str = field(default=str(RESULTS), metadata={"help": "Folder of the results."})
    plot: str | None = field(default=None, metadata={"help": "The plot. Default: docs/scaling/mining.svg."})
    work: str = field(default="out/mining-scale", metadata={"help": "Folder of texts and shards, deleted at the end."})


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
    """Follows the memory of a process and its children, without pages of files, which the system frees on demand."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.ended = process, 0, threading.Event()

    def run(self) -> None:
        """Read /proc until the process has ended."""
        while not self.ended.wait(0.2):
            parents, sizes = {}, {}
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    found = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
                except OSError:  # the process has ended
                    continue
                number = int(status.parent.name)
                parents[number] = int(found["PPid"])
                sizes[number] = 1024 * int(found.get("RssAnon", "0 kB").split()[0])
            tree = {self.process}
            while more := {one for one, parent in parents.items() if parent in tree} - tree:
                tree |= more
            self.peak = max(self.peak, sum(sizes.get(one, 0) for one in tree))


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
    command = subprocess.Popen([sys.executable, "-m", "metaphrase", *map(str, words)])
    memory = PeakMemory(command.pid)
    memory.start()
    if command.wait():
        raise SystemExit(
            f"`metaphrase mine` failed on {size:,} lines with the index {index!r}; see its message above."
        )
    seconds = time.monotonic() - start
    memory.ended.set()
    memory.join()
    with output.open(encoding="utf-8", newline="") as file:
        found = {
            (row["source"], row["target"]) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        }
    summary = json.loads(Path(f"{output}.json").read_text(encoding="utf-8"))
    recalls = [summary["settings"][key] for key in ("source_recall", "target_recall") if key in summary["settings"]]
    stages: dict[str, float] = {}
    for path in storage.glob("logs/*/stats/*.json"):
        stage = path.parents[1].name.split("-")[0]
        total = sum(step["time_stats"]["total"] for step in json.loads(path.read_text(encoding="utf-8")))
        stages[stage] = round(stages.get(stage, 0) + total, 1)
    row = {
        "size": size,
        "index": index,
        "seconds": round(seconds, 1),
        "task_seconds": stages,
        "memory": memory.peak,
        "disk": folder_bytes(storage),
        "index_bytes": folder_bytes(storage, "*.faiss"),
        "recall": round(sum(recalls) / 2, 4) if recalls else None,
        "pairs": len(found),
        "f1": round(2 * len(gold & found) / (len(gold) + len(found)), 4),
    }
    shutil.rmtree(folder)
    return row


# ---------------------------------------------------------------------------------------------------- results


def table(content: dict[str, Any]) -> str:
    """Format the rows as Markdown."""
    about = content["facts"]
    text = [
        f"{about['date']}: {about['device']}, {content['workers']} workers of one thread, torch {about['torch']}; simulated "
        f"texts, {HIDDEN} dimensions in 16 bits. Memory is that of all processes together, without pages of files.",
        "",
        "| lines a side | index | minutes | embed | index | search | memory, GB | of it index | disk, GB | recall | F1 |",
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


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw time, memory and disk over the number of lines."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 3)
    measures = {"minutes": ("seconds", 60), "memory, GB": ("memory", 1e9), "disk, GB": ("disk", 1e9)}
    for axes, (name, (key, unit)) in zip(panels, measures.items(), strict=True):
        for index in dict.fromkeys(row["index"] for row in content["rows"]):
            points = [(row["size"], row[key] / unit) for row in content["rows"] if row["index"] == index]
            axes.plot(*zip(*points, strict=True), marker="o", label=index)
        axes.set(xscale="log", yscale="log", xlabel="lines a side", ylabel=name)
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: list[str]) -> int:
    """Measure the missing rows, and write the table and the plot."""
    options = HfArgumentParser(Options).parse_args_into_dataclasses(argv)[0]
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    results = Path(options.results)
    kept = results / "mining-scale.json"
    content = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"rows": []}
    content |= {"facts": facts("cpu", 1), "tasks": options.tasks, "workers": options.workers}
    encoder = Path(options.work) / "encoder"
    write_encoder(encoder)
    for size in sorted(options.sizes):
        for index in options.indexes:
            is_done = any((row["size"], row["index"]) == (size, index) for row in content["rows"])
            if is_done or (index == "exact" and size > options.most_exact):
                continue
            content["rows"].append(measure(size, index, encoder, options))
            content["rows"].sort(key=lambda row: (row["size"], row["index"]))
            results.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            (results / "mining-scale.md").write_text(table(content), encoding="utf-8")
            draw(content, Path(options.plot) if options.plot else PLOT)
    print(table(content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
