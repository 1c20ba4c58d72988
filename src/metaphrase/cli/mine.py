"""``metaphrase mine SOURCE TARGET -o OUT``: find the translations in two monolingual texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, emit_submitted, notes, progress
from metaphrase.cli.push_options import PushPairsOptions
from metaphrase.io.counts import counted
from metaphrase.io.environment import flush_denormals
from metaphrase.mining.options import EngineOptions, MiningOptions, SearchOptions

if TYPE_CHECKING:
    from metaphrase.mining.workflow import MiningResult

DESCRIPTION = "Find the translations in two monolingual texts."
EXAMPLES = (
    "metaphrase mine news.sw.gz news.en.gz -o mined.tsv.gz",
    "metaphrase mine a.txt b.txt --source_lang sw --target_lang en -o mined.parquet --threshold auto --json",
    "metaphrase mine news.sw.gz news.en.gz -o mined.tsv.gz --index ivf --half --keep_work",
    "metaphrase mine news.sw.gz news.en.gz -o mined.parquet --push_to_hub me/swahili-english --private",
    "metaphrase mine news.sw.gz news.en.gz -o mined.tsv.gz --executor local --tasks 64 --workers 8",
)


def run(argv: Sequence[str]) -> int:
    """Mine, write the pairs, and describe them."""
    options, search, engine, hub = parse(
        "metaphrase mine",
        [MiningOptions, SearchOptions, EngineOptions, PushPairsOptions],
        argv,
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    options.check()  # before slow imports
    engine.check()
    hub.check(options.output, engine)
    from metaphrase.cli.tables import text_histogram
    from metaphrase.mining.workflow import mine_files

    flush_denormals()
    console = notes()
    hub.create(options.output, console.print)
    with progress(console) as begin:
        result = mine_files(options, search, engine, begin=begin, note=console.print)
    if result is None:
        return emit_submitted(options.output)
    console.print("\n".join(text_histogram(result.facts["histogram"], result.threshold)))
    for line in _describe_thresholds(result):
        console.print(line)
    console.print(f"Wrote {counted(len(result.kept.score_c), 'pair')}: {', '.join(map(str, result.files))}")
    if result.work is not None:
        console.print(f"Kept {result.work}")
    emit(result.facts | hub.push(options.output, console.print))
    return 0


def _describe_thresholds(result: MiningResult) -> list[str]:
    """The applied and the suggested threshold."""
    from metaphrase.mining.workflow import why_no_threshold

    score_c, threshold, best = result.pairs.score_c, result.threshold, result.suggestion
    lines = []
    if threshold is not None:
        kept = int((score_c >= threshold).sum())
        lines.append(f"Threshold: {threshold:.4f}, kept {counted(kept, 'pair')} (marked +).")
    if best is None:
        reason, _ = why_no_threshold(len(score_c), result.facts["copies_dropped"])
        return [*lines, f"No threshold is suggested: {reason}."]
    shares = {"precision": best.precision, "recall": best.recall, "F1": best.f1}
    expected = (
        f"{', '.join(f'{name} {100 * share:.0f} %' for name, share in shares.items())}. This is a rough estimate. It "
        "is too optimistic if few sentences have a translation: inspect the sample."
    )
    if best.threshold == threshold:
        return [*lines, f"Expected among the pairs: {expected}"]
    suggested = f"{best.threshold:.4f}"
    kept = int((score_c >= float(suggested)).sum())  # what the option keeps, as it is printed
    return [*lines, f"Suggestion: --threshold {suggested} keeps {counted(kept, 'pair')}. Expected: {expected}"]
