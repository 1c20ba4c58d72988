"""Output of mining: the pairs, a sample for inspection, and the distribution of the scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from metaphrase.corpus.text import one_line
from metaphrase.corpus.writing import is_tsv, write_corpus
from metaphrase.io.counts import counted
from metaphrase.mining.margins import Pairs

#: Pairs that are written together.
_CHUNK = 10_000
#: Decimals of the scores in files, with which they are compared with a given threshold.
DECIMALS = 6
#: Quantiles of the scores, in percent, around which the sample shows pairs.
_QUANTILES = (99, 95, 90, 75, 50, 25, 10)
#: Pairs that are shown around each of them.
_SHOWN = 10
#: Bins of the histogram in the summary.
_BINS = 24


def write_scored_pairs(
    pairs: Pairs,
    sources: Sequence[str],
    targets: Sequence[str],
    languages: tuple[str, str],
    output: Path,
    work: Path,
) -> None:
    """Write pairs in their order and in bounded memory, through a file in the work folder."""
    as_text = is_tsv(output)
    names = ("source", "target", "source_lang", "target_lang")
    schema = pa.schema([("score", pa.string() if as_text else pa.float64()), *((name, pa.string()) for name in names)])
    path = work / "pairs.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for first in range(0, len(pairs.score_c), _CHUNK):
            chunk = pairs.take(slice(first, first + _CHUNK))
            scores = [round(float(score), DECIMALS) for score in chunk.score_c]
            columns = [
                [f"{score:.{DECIMALS}f}" for score in scores] if as_text else scores,
                [sources[at] for at in chunk.source_c.tolist()],
                [targets[at] for at in chunk.target_c.tolist()],
                *([language] * len(scores) for language in languages),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    write_corpus(Dataset.from_file(str(path)), output)


def none_reaches(threshold: float, score_c: NDArray[np.floating]) -> str:
    """The warning that all scores are below a threshold."""
    return (
        f"No pair was kept: the best of {counted(len(score_c), 'pair')} scores {score_c.max():.{DECIMALS}f}, below "
        f"--threshold {threshold:.10g}. Lower it."
    )


def quantiles(score_c: NDArray[np.floating]) -> dict[str, float]:
    """Quantiles of scores, by their percentage; empty if there are no scores."""
    if not len(score_c):
        return {}
    return {str(q): round(float(np.quantile(score_c, q / 100)), 6) for q in (100, *_QUANTILES, 5, 0)}


def histogram(score_c: NDArray[np.floating]) -> dict[str, list[float]]:
    """Count scores in equal bins between the 0.1 % and 99.9 % quantiles; the outermost bins also hold the outliers.

    Returns:
        ``edges`` of the bins and their ``counts``.
    """
    if not len(score_c):
        return {"edges": [0.0, 1.0], "counts": [0]}
    low, high = np.quantile(score_c, [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + 1e-6, _BINS + 1)
    counts = np.histogram(np.clip(score_c, edges[0], edges[-1]), edges)[0]
    return {"edges": [round(float(edge), 6) for edge in edges], "counts": counts.tolist()}


def write_sample(
    pairs: Pairs, sources: Sequence[str], targets: Sequence[str], threshold: float | None, path: Path
) -> Path:
    """Write a TSV file for inspection: the pairs around some quantiles of the scores, and around a threshold."""
    lines = ["around\tscore\tsource\ttarget"]
    marks = [(f"best {100 - q} %", int((100 - q) / 100 * len(pairs.score_c))) for q in _QUANTILES]
    if threshold is not None:
        marks.insert(0, (f"threshold {threshold:.4f}", int(np.count_nonzero(pairs.score_c >= threshold))))
    for label, at in [("best", 0), *marks] if len(pairs.score_c) else []:
        first = min(max(0, at - _SHOWN // 2), max(0, len(pairs.score_c) - _SHOWN))
        for score, source, target in zip(
            *(column.tolist() for column in pairs.take(slice(first, first + _SHOWN))), strict=True
        ):
            texts = (one_line(text) for text in (sources[source], targets[target]))
            lines.append("\t".join([label, f"{score:.4f}", *texts]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def draw_histogram(
    pairs: Pairs, wrong_d: NDArray[np.floating], threshold: float | None, suggestion: float | None, path: Path
) -> list[Path]:
    """Draw the distribution of the scores, and of the scores of wrong pairs. Without pairs, an earlier picture is deleted."""
    from matplotlib.figure import Figure  # slow to import

    if not len(pairs.score_c):
        path.unlink(missing_ok=True)
        return []
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    both = np.concatenate([pairs.score_c, wrong_d])
    low, high = np.quantile(both, [0.001, 0.999])
    edges = np.linspace(float(low), float(high), 81).tolist()
    axes.hist(pairs.score_c, bins=edges, color="#4c78a8", label="pairs")
    axes.hist(wrong_d, bins=edges, color="#e45756", histtype="step", label="wrong pairs (see suggest_threshold)")
    if threshold is not None:
        axes.axvline(threshold, color="black", label=f"threshold {threshold:.4f}")
    if suggestion is not None and suggestion != threshold:
        axes.axvline(suggestion, color="black", linestyle=":", label=f"suggestion {suggestion:.4f} (estimate)")
    axes.set(xlabel="margin", ylabel="pairs", yscale="log")
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=150)
    return [path]
