"""The suite ``mining``: BUCC, under each of its protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch

from metaphrase.evaluation.bucc import (
    PROTOCOLS,
    Protocol,
    bucc_files,
    bucc_languages,
    bucc_protocol,
    evaluate_mining,
    load_bucc_folder,
)
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    Settings,
    Subject,
    folders,
    text_size,
    wanted_languages,
)


def find_mining(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """A benchmark for each folder and each protocol whose splits are available."""
    taken: set[tuple[str, Path]] = set()
    for folder in folders(data):
        for protocol in settings.protocols or PROTOCOLS:
            tuned, scored, *defaults = bucc_protocol(protocol)
            languages = wanted_languages(bucc_languages(folder, cast("Protocol", protocol)), settings)
            files = bucc_files(folder)
            parts = [files[language][split] for language in languages for split in dict.fromkeys((tuned, scored))]
            used = tuple(chain.from_iterable(part.values() for part in parts))
            if not used or taken.issuperset((protocol, path) for path in used):
                continue
            taken |= {(protocol, path) for path in used}
            fixed = {
                "duplicates": settings.duplicates or defaults[0],
                "comparison": settings.comparison or defaults[1],
            }
            repeated = {"keep": "repeated lines kept", "unify": "repeated lines unified and excluded"}
            yield Benchmark(
                f"{folder.name} {protocol}",
                "mining",
                f"{protocol}: threshold from {tuned}, scored on {scored}; {settings.margin} margin, k={settings.k}, "
                f"{settings.retrieval} retrieval, {repeated[fixed['duplicates']]}, score {fixed['comparison']} threshold",
                used,
                text_size(path for path in used if ".gold" not in path.name),
                partial(_measure, folder, protocol, languages, fixed),
                fixed,
            )


def _measure(
    folder: Path, protocol: Any, languages: Sequence[str], fixed: Mapping[str, Any], subject: Subject
) -> dict[str, Result]:
    result = evaluate_mining(
        subject.model,
        load_bucc_folder(folder, protocol, languages),
        protocol=protocol,
        k=subject.settings.k,
        margin=subject.settings.margin,
        retrieval=subject.settings.retrieval,
        device="cuda" if torch.cuda.is_available() else None,
        resamples=subject.settings.resamples,
        **fixed,
        **subject.options(),
    )
    return {f"{folder.name} {protocol}": result}
