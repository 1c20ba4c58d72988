"""The suite ``word-alignment``: gold word links."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.evaluation import word_alignment
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.suites.benchmarks import Benchmark, Results, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, in_each_folder, text_size
from metaphrase.exceptions import DataError
from metaphrase.io.digests import files_sha256

logger = logging.getLogger(__name__)


@in_each_folder
def find_word_alignment(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    """The gold links of a folder, in the layouts of `load_wpt` and `load_gold_lines`."""
    for gold in sorted((*folder.glob("test.*.*.wa"), *folder.glob("*.gold"))):
        yield from _find_gold(gold, settings.first)


def _find_gold(gold: Path, first: int | None) -> Iterator[Benchmark]:
    """Gold links: measured with the default settings, and with the best settings of the first fifth on the other pairs.

    The settings are not tuned on a sample, and peers are not scored on it.
    """
    name, peers = folder_name(gold.parent), []
    read: Callable[..., list[word_alignment.GoldPair]] = word_alignment.load_wpt
    if gold.suffix == ".gold":
        name, read, files = f"{name} {gold.stem}", word_alignment.load_gold_lines, [gold.with_suffix(".src-tgt"), gold]
        peers = sorted(gold.parent.glob(f"{gold.stem}.*.out"))
    else:
        _, *sides, _ = gold.name.split(".")
        files = [*(gold.with_name(f"test.{side}") for side in sides), gold]

    def measure(subject: Subject) -> Results:
        pairs = read(*files)[:first]

        def measured_from(start: int, aligner: EmbeddingAligner | None = None, **facts: Any) -> Result:
            others = _peer_errors(pairs, peers if first is None else [], start)
            result = word_alignment.evaluate_word_alignment(
                subject.model,
                {name: pairs[start:]},
                sha256={name: files_sha256(files)},
                name=subject.name,
                aligner=aligner,
                batch_size=subject.batch_size,
                resamples=subject.settings.resamples,
                seed=subject.settings.seed,
                show_progress=subject.show_progress,
            )
            return replace(result, facts=facts | ({"peers": others} if others else {}))

        results = {name: measured_from(0)}
        if first is None and (fifth := len(pairs) // 5):
            layer, rule, tried = word_alignment.tune_rule(subject.model, pairs[:fifth], batch_size=subject.batch_size)
            aligner = EmbeddingAligner(subject.model, layer=layer, batch_size=subject.batch_size, **rule._asdict())
            rows = [{"layer": at, **one._asdict(), "aer": 100 * aer} for (at, one), aer in tried.items()]
            results[f"{name} tuned"] = measured_from(fifth, aligner, tried=rows)
        return results

    if all(file.exists() for file in files):
        protocol = (
            "AER of links between token states; tuned: layer, method, level and threshold from the first fifth of the pairs, "
            "measured on the others"
        )
        used = (*files, *peers)
        yield Benchmark(
            name, "word-alignment", protocol, used, 5 * text_size(files), measure, {"rules": word_alignment.RULES}
        )


def _peer_errors(pairs: Sequence[word_alignment.GoldPair], peers: Iterable[Path], start: int) -> dict[str, float]:
    """AER in percent of the links in the files of other programs; a file without usable links is skipped with a warning."""
    errors = {}
    for path in peers:
        try:
            errors[path.name] = 100 * word_alignment.peer_scores(pairs, path, first=start).aer
        except DataError as error:
            logger.warning("Skipped the links of %s. %s", path.name, error)
    return errors
