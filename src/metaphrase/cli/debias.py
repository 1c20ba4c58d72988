"""``metaphrase debias MODEL -o DIR``: remove language identity from the embeddings of an encoder, without training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, notes, show_progress
from metaphrase.postprocessing.debiasing import DebiasOptions, describe, write_debiased

DESCRIPTION = (
    "Project out the directions in which the mean embeddings of languages differ most, so that a search in many languages "
    "ranks answers by meaning rather than by language. The result is a plain SentenceTransformer folder with one more "
    "linear layer."
)
EXAMPLES = (
    "metaphrase debias starter --output_dir runs/starter-debiased",
    "metaphrase debias runs/sw --directions 6 --output_dir runs/sw-debiased",
    "metaphrase debias starter --directions auto --dev my-dev-sets --guard stsb --output_dir runs/starter-debiased",
    "metaphrase debias runs/sw --data my-texts --split train --output_dir runs/sw-debiased",
)


def run(argv: Sequence[str]) -> int:
    """Debias, write, and say how to load the result.

    The exit status is 1 if no number of directions gains anything without a loss, and nothing is written.
    """
    (options,) = parse("metaphrase debias", [DebiasOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    result = write_debiased(
        options,
        command=shlex.join(["metaphrase", "debias", *argv]),
        note=notes().print,
        show_progress=show_progress(),
    )
    emit(asdict(result), describe(result))
    return 0 if result.output_dir else 1
