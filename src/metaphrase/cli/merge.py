"""``metaphrase merge BASE TUNED --alpha 0.5 -o DIR``: an encoder between a base and models tuned from it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, notes, progress
from metaphrase.postprocessing.merging import MergeOptions, describe, merge

DESCRIPTION = (
    "Merge tuned models into their base: base + alpha · (tuned − base). The result is a plain SentenceTransformer folder "
    "(--output_dir), or a small file with the difference from the base, a task vector (--vector)."
)
EXAMPLES = (
    "metaphrase merge starter runs/sw --alpha 0.5 --output_dir runs/sw-merged",
    "metaphrase merge starter runs/sw --alpha auto --dev my-dev-sets --guard stsb --output_dir runs/sw-merged",
    "metaphrase merge starter runs/sw runs/te --alpha 0.5 --debias 20 --output_dir runs/both",
    "metaphrase merge starter runs/sw --vector sw.safetensors --bits 4",
    "metaphrase merge starter sw.safetensors --output_dir runs/sw-merged",
)


def run(argv: Sequence[str]) -> int:
    """Merge, write, and say how to load the result.

    The exit status is 1 if no alpha gains anything without a loss, and nothing is written.
    """
    (options,) = parse("metaphrase merge", [MergeOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    command = shlex.join(["metaphrase", "merge", *argv])
    console = notes()
    with progress(console) as begin:
        result = merge(options, command=command, note=console.print, begin=begin)
    emit(asdict(result), *describe(result))
    return 0 if result.output_dir or result.vector else 1
