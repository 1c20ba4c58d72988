"""A training step of the demo, packed against padded, on the same batches.

    python scripts/benchmarks/packing.py [--model starter] [--rounds 5]

One process, interleaved, fixed threads, minimum of the rounds; writes ``results/packing.json`` beside this file.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser

from metaphrase import AlignmentLoss, ParallelCollator, Recipe, load_corpus, load_encoder, packed
from metaphrase.cli.demo import DATA
from metaphrase.encoders import english_piece_ids, freeze_word_embeddings


@dataclass
class Options:
    """What is measured."""

    model: str = field(default="starter", metadata={"help": "Encoder."})
    batch_size: int = field(default=64, metadata={"help": "Pairs."})
    rounds: int = field(default=5, metadata={"help": "Rounds; the minimum counts."})
    threads: int = field(default=2, metadata={"help": "Threads."})


def step(loss: AlignmentLoss, batch: Any, *, packing: bool) -> float:
    """Seconds of one forward and backward pass."""
    with packed(loss.model, enabled=packing):
        start = time.perf_counter()
        sum(loss(batch).values()).backward()
        seconds = time.perf_counter() - start
    loss.zero_grad()
    return seconds


def main() -> None:
    """Measure, print and write the ratios."""
    options = HfArgumentParser(Options).parse_args_into_dataclasses(sys.argv[1:])[0]
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    model = load_encoder(options.model, device="cpu")
    freeze_word_embeddings(model)
    dataset = load_corpus(DATA / "demo").dataset.shuffle(seed=0)
    english_ids = english_piece_ids(dataset["target"], model.tokenizer)
    results: dict[str, Any] = {}
    for name in ("tr", "dap"):
        recipe = Recipe.load(name).to_dict()
        for term in recipe["terms"]:
            if term["objective"] == "rtl":
                term["args"]["vocabulary"] = "english"
        loss = AlignmentLoss(model, Recipe.from_dict(recipe), english_ids=english_ids).train()
        batch = ParallelCollator(model.tokenizer, loss.views)(dataset.select(range(options.batch_size)).to_list())
        step(loss, batch, packing=True)
        seconds: dict[str, float] = {"packed": float("inf"), "padded": float("inf")}
        for _ in range(options.rounds):
            for kind in seconds:
                seconds[kind] = min(seconds[kind], step(loss, batch, packing=kind == "packed"))
        results[name] = seconds | {"padded / packed": seconds["padded"] / seconds["packed"]}
        print(f"{name}: {results[name]['padded / packed']:.2f}x faster packed")
    facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__, **vars(options)}
    path = Path(__file__).parent / "results" / "packing.json"
    path.write_text(json.dumps({"facts": facts, "seconds": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
