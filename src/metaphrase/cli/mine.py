"""``metaphrase mine SOURCE TARGET -o OUT``: find the translations in two monolingual texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from metaphrase.cli.arguments import leading_values
from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, notes, progress
from metaphrase.cli.tables import text_histogram
from metaphrase.exceptions import UsageError
from metaphrase.mining.options import MiningOptions, SearchOptions
from metaphrase.mining.workflow import MiningResult, mine_files

SUMMARY = "Find the translations in two monolingual texts"
DESCRIPTION = "metaphrase mine SOURCE TARGET -o OUT"
EXAMPLES = (
    "metaphrase mine news.sw.gz news.en.gz -o mined.tsv.gz",
    "metaphrase mine a.txt b.txt --source_lang sw --target_lang en -o mined.parquet --threshold auto --json",
    "metaphrase mine news.sw.gz news.en.gz -o mined.tsv.gz --index ivf --half --keep_work",
)


def run(argv: Sequence[str]) -> int:
    """Mine, write the pairs, and describe them."""
    texts, others = leading_values(argv)
    if len(texts) > 2:
        raise UsageError(f"Expected two texts, SOURCE and TARGET, got {len(texts)}. See `metaphrase mine --help`.")
    flags = [part for pair in zip(("--source", "--target"), texts, strict=False) for part in pair]
    options, search = parse(
        "metaphrase mine",
        [MiningOptions, SearchOptions],
        [*flags, *others],
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    torch.set_flush_denormal(True)
    console = notes()
    with progress(console) as begin:
        result = mine_files(options, search, begin=begin, note=console.print)
    console.print("\n".join(text_histogram(result.facts["histogram"], result.threshold)))
    for line in _describe_thresholds(result):
        console.print(line)
    console.print(f"Wrote {len(result.kept.score_c):,} pairs: {', '.join(map(str, result.files))}")
    if result.work is not None:
        console.print(f"Kept {result.work}")
    emit(result.facts)
    return 0


def _describe_thresholds(result: MiningResult) -> list[str]:
    """The applied and the suggested threshold."""
    score_c, lines = result.pairs.score_c, []
    if result.threshold is not None:
        kept = np.count_nonzero(score_c >= result.threshold)
        lines.append(f"Threshold: {result.threshold:.4f}, kept {kept:,} pairs (marked +).")
    if result.suggestion is None:
        lines.append("No threshold is suggested: second-best neighbours score like the best.")
    elif result.suggestion != result.threshold:
        lines.append(
            f"Suggestion: --threshold {result.suggestion:.4f} keeps {np.count_nonzero(score_c >= result.suggestion):,} "
            "pairs. This is a rough estimate from the scores of second-best neighbours; inspect the sample first."
        )
    return lines
