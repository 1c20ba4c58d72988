"""The suite ``mining``: BUCC, under its protocols."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from metaphrase.corpus.parallel import TARGET_LANGUAGE
from metaphrase.corpus.text import MAX_CHARS, read_lines
from metaphrase.evaluation import bucc
from metaphrase.evaluation.suites.benchmarks import Benchmark, Results, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, folders, text_size, wanted_languages

_REPEATED = {"keep": "repeated lines kept", "unify": "repeated lines unified and excluded"}


def find_mining(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """A benchmark for each folder and each protocol whose splits are available."""
    for folder in folders(data):
        nested = any(folder.glob(f"*-{TARGET_LANGUAGE}/*"))
        if folder != data and folder.name.endswith(f"-{TARGET_LANGUAGE}") and not nested:
            continue  # its files are found in the folder around it
        for protocol in settings.protocols or bucc.PROTOCOLS:
            yield from _find_protocol(folder, cast("bucc.Protocol", protocol), settings)


def _find_protocol(folder: Path, protocol: bucc.Protocol, settings: Settings) -> Iterator[Benchmark]:
    named = bucc.bucc_protocol(protocol)
    name = f"{folder_name(folder)} {protocol}"
    fixed: dict[str, Any] = {
        "duplicates": settings.duplicates or named.duplicates,
        "comparison": settings.comparison or named.comparison,
    }
    files = bucc.bucc_files(folder)
    languages = wanted_languages(bucc.bucc_languages(folder, protocol), settings, folder)
    used = tuple(path for code in languages for split in named.splits for path in files[code][split].values())
    work = float(text_size(path for path in used if ".gold" not in path.name))
    if settings.first is not None:
        gold = (sum(1 for _ in read_lines(path, MAX_CHARS)) for path in used if ".gold" in path.name)
        work *= min(1, settings.first / max([1, *gold]))

    def measure(subject: Subject) -> Results:
        whole = bucc.load_bucc_folder(folder, protocol, languages)
        first = settings.first
        result = bucc.evaluate_mining(
            subject.model,
            {code: {name: one.first_pairs(first) for name, one in splits.items()} for code, splits in whole.items()},
            protocol=protocol,
            k=subject.settings.k,
            margin=subject.settings.margin,
            retrieval=subject.settings.retrieval,
            device="cuda" if subject.model.device.type == "cuda" else None,
            **fixed,
            **subject.options(),
        )
        return {name: result}

    if used:
        yield Benchmark(
            name,
            "mining",
            f"{protocol}: threshold from {named.tuned}, scored on {named.scored}; {settings.margin} margin, k={settings.k}, "
            f"{settings.retrieval} retrieval, {_REPEATED[fixed['duplicates']]}, score {fixed['comparison']} threshold",
            used,
            work,
            measure,
            fixed,
        )
