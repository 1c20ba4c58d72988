"""``metaphrase filter CORPUS -o OUT``: score the pairs of a bitext, and keep those above a threshold."""

from __future__ import annotations

from collections.abc import Sequence

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, emit_submitted, notes, progress
from metaphrase.cli.push_options import PushPairsOptions
from metaphrase.cli.tables import text_histogram
from metaphrase.corpus.codes import split_languages
from metaphrase.mining.filtering import filter_corpus
from metaphrase.mining.options import EngineOptions, FilterOptions, SearchOptions

DESCRIPTION = "Score the pairs of a bitext, and keep those above a threshold."
EXAMPLES = (
    "metaphrase filter pairs.tsv --source_lang sw -o scored.tsv",
    "metaphrase filter data/ --languages sw -o good.parquet --threshold 1.06 --json",
    "metaphrase filter web.tsv.gz --source_lang sw -o scored.tsv.gz --executor local --tasks 64 --workers 8",
)


def run(argv: Sequence[str]) -> int:
    """Score, filter, write."""
    options, search, engine, hub = parse(
        "metaphrase filter",
        [FilterOptions, SearchOptions, EngineOptions, PushPairsOptions],
        argv,
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    options.languages = split_languages(options.languages, keep_scripts=True)
    options.check()
    engine.check()
    hub.check(options.output, engine)
    console = notes()
    hub.create(options.output, console.print)
    with progress(console) as begin:
        result = filter_corpus(options, search, engine, begin=begin, note=console.print)
    if result is None:
        return emit_submitted(options.output)
    console.print("\n".join(text_histogram(result.facts["histogram"], options.threshold)))
    files = ", ".join(map(str, result.files))
    console.print(f"Kept {len(result.kept_n):,} of {len(result.score_n):,} pairs: {files}")
    emit(result.facts | hub.push(options.output, console.print))
    return 0
