"""The suite ``word-alignment``: error rates against gold links."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from metaphrase.evaluation.result import Result
from metaphrase.evaluation.suites.benchmarks import Benchmark, Settings, Subject, folders, text_size
from metaphrase.evaluation.word_alignment import evaluate_word_alignment, load_wpt
from metaphrase.io.digests import files_sha256


def find_word_alignment(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The gold links in a folder and its subfolders."""
    for gold in chain.from_iterable(sorted(folder.glob("test.*.*.wa")) for folder in folders(data)):
        _, one, other, _ = gold.name.split(".")
        files = (gold.with_name(f"test.{one}"), gold.with_name(f"test.{other}"), gold)
        yield Benchmark(
            gold.parent.name,
            "word-alignment",
            "AER of links between token states",
            files,
            text_size(files),
            partial(_measure, gold.parent.name, files),
        )


def _measure(name: str, files: tuple[Path, Path, Path], subject: Subject) -> dict[str, Result]:
    result = evaluate_word_alignment(
        subject.model,
        {name: load_wpt(*files)},
        sha256={name: files_sha256(files)},
        name=subject.name,
        batch_size=subject.batch_size,
        resamples=subject.settings.resamples,
        seed=subject.settings.seed,
        show_progress=subject.show_progress,
    )
    return {name: result}
