"""Classes that all suites share: the settings, the measured model, and a benchmark, the unit of caching."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.evaluation.bucc import Duplicates, ThresholdComparison
from metaphrase.evaluation.encoding import Encode
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.io.digests import model_hash
from metaphrase.mining.margins import Margin, Retrieval


@dataclass(frozen=True)
class Settings:
    """How suites measure. A cached result depends on these settings, the model and the data.

    Attributes:
        prompt: Text before each sentence: ``"auto"`` is the query prompt that the model stores, None is no prompt.
        languages: Languages to measure; None measures all.
        split: Split of parallel test sets to read; None reads files without a split, see `parallel_folders`.
        text_equality: In retrieval, another copy of the translation's text is a hit.
        margin_k: In retrieval, the accuracy is by ratio margin over this number of neighbours instead of cosine.
        strip_quotes: Remove each ``"`` from the texts of parallel test sets, as DAP does.
        protocols: BUCC protocols to mine under; None uses all whose splits are available.
        margin: In mining, the score of a pair; see `metaphrase.mining.margins.margin_score`.
        k: In mining, the number of neighbours in the margin.
        retrieval: In mining, which pairs are candidates; see `metaphrase.mining.margins.select_pairs`.
        duplicates: In mining, the treatment of repeated lines; None uses that of each protocol.
        comparison: In mining, the comparison of scores with the threshold; None uses that of each protocol.
        tasks: Tasks for the suite ``mteb``: folders of the data, and names of MTEB's own tasks; None uses the folders.
        resamples: Number of bootstrap samples; Spearman's correlation uses at most `STS_RESAMPLES`.
        seed: Seed of the bootstrap.
        finetuning: Options of the fine-tuned suites that override `SMALL_SCALE`.
    """

    prompt: str | None = "auto"
    languages: tuple[str, ...] | None = None
    split: str | None = None
    text_equality: bool = False
    margin_k: int | None = None
    strip_quotes: bool = False
    protocols: tuple[str, ...] | None = None
    margin: Margin = "ratio"
    k: int = 4
    retrieval: Retrieval = "max"
    duplicates: Duplicates | None = None
    comparison: ThresholdComparison | None = None
    tasks: tuple[str, ...] | None = None
    resamples: int = RESAMPLES
    seed: int = 0
    finetuning: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """The model that is measured.

    Attributes:
        name: ``"starter"``, a folder or a Hub id; fine-tuned suites load the model by this name.
        model: The loaded model.
        sha: Its `model_hash`; None if it is not a SentenceTransformer.
        encode: Replaces ``model.encode``; embeds each text once.
        folder: Folder of the cached results; None caches nothing.
        settings: How it is measured.
        batch_size: Sentences per forward pass.
        show_progress: Show progress bars.
    """

    name: str
    model: SentenceTransformer
    sha: str | None
    encode: Encode
    folder: Path | None
    settings: Settings
    batch_size: int = 32
    show_progress: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        model: SentenceTransformer,
        output: str | Path | None,
        settings: Settings,
        *,
        batch_size: int = 32,
        show_progress: bool = False,
    ) -> Subject:
        """Make a subject whose results are cached in a subfolder of ``output`` that is named after the model's digest.

        Without ``output``, or if the model has no digest, results are not cached.
        """
        sha = model_hash(model) if isinstance(model, SentenceTransformer) else None
        folder = Path(output) / sha[:12] if output is not None and sha is not None else None
        return cls(name, model, sha, CachedEncoder(model), folder, settings, batch_size, show_progress)

    def options(self) -> dict[str, Any]:
        """Options that all evaluations of sentence embeddings take."""
        return {
            "name": self.name,
            "prompt": self.settings.prompt,
            "batch_size": self.batch_size,
            "seed": self.settings.seed,
            "show_progress": self.show_progress,
            "encode": self.encode,
        }


class CachedEncoder:
    """A model's ``encode`` that embeds each text once.

    Args:
        model: The model.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
        self.rows: dict[tuple[str, str], NDArray[np.float32]] = {}

    def __call__(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        **_: Any,
    ) -> NDArray[np.float32]:
        """Embeddings, shape ``(texts, hidden)``."""
        new = list(dict.fromkeys(text for text in texts if (prompt, text) not in self.rows))
        if new:
            rows_nh = self.model.encode(
                new, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar, convert_to_numpy=True
            )
            self.rows.update(((prompt, text), row_h) for text, row_h in zip(new, rows_nh, strict=True))
        return np.stack([self.rows[prompt, text] for text in texts])


class DataUnavailable(Exception):
    """The data of a benchmark are missing; detected when they are loaded."""


@dataclass(frozen=True)
class Benchmark:
    """One data set under one protocol.

    Attributes:
        name: Unique name, such as ``"tatoeba"``.
        suite: Name of its suite.
        protocol: Short description of the protocol.
        files: Files that it reads.
        work: Bytes of text to encode, a rough measure of its duration.
        measure: Measures a model and returns results by name.
        fixed: Further values that its results depend on, in addition to the settings that its suite reads.
    """

    name: str
    suite: str
    protocol: str
    files: tuple[Path, ...]
    work: float
    measure: Callable[[Subject], dict[str, Result]]
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A kind of benchmark.

    Attributes:
        name: Name on the command line.
        needs: Description of the data that it looks for.
        find: Finds the benchmarks of a folder; without a folder, those whose data are on the Hub.
        reads: Names of the `Settings` that its results depend on.
    """

    name: str
    needs: str
    find: Callable[[Path | None, Settings], Iterable[Benchmark]]
    reads: tuple[str, ...]


def folders(data: Path | None) -> list[Path]:
    """A folder and its subfolders."""
    return [] if data is None else [data, *sorted(path for path in data.iterdir() if path.is_dir())]


def text_size(files: Iterable[Path]) -> int:
    """Bytes of text in files, after decompression."""
    return sum(
        len(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path.stat().st_size for path in files
    )


def wanted_languages(languages: Iterable[str], settings: Settings) -> list[str]:
    """The available languages that the settings ask for, in the order of the settings."""
    available = list(languages)
    return [language for language in settings.languages or available if language in available]
