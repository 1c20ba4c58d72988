"""What a report shows of an encoder beyond accuracies: maps of words, alignment matrices, margins, errors to read.

Each part is computed as data for JSON first; the page and the PNG files of :func:`draw` show that data and nothing else.

Shapes: ``n`` sentences or words, ``s`` and ``t`` words of a source and a target, ``k`` neighbours, ``h`` hidden.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F

from metaphrase.aligners.embedding import EmbeddingAligner, _up_to
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.corpus.words import UNSPACED, Words, piece_spans
from metaphrase.exceptions import UsageError
from metaphrase.mining.margins import margin_score, neighbour_scores
from metaphrase.mining.search import nearest_neighbours, unit_rows
from metaphrase.modeling.packing import packed

logger = logging.getLogger(__name__)

#: Models of a report, in their order.
SIDES = ("before", "after")
#: Neighbours of a margin, as in mining.
MARGIN_NEIGHBOURS = 4
#: Neighbours of a word whose languages are counted.
WORD_NEIGHBOURS = 10
#: Colours of Okabe and Ito, which colour-blind readers can tell apart; a map gives each language its own marker, too.
PALETTE = ("#5c6773", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#a05a2c")
MARKERS = "os^Dvp*X"
_BEFORE, _AFTER, _WORSE, _RED = "#8b96a3", "#1860c4", "#b8400b", "#d1242f"
#: Marker and colour of a verdict.
_VERDICTS = {"worse": ("v", _WORSE), "tie": ("o", "#6b7480"), "better": ("^", "#0072b2")}
#: Words that a matrix has on a side, at least and at most.
_MATRIX_WORDS = (4, 9)
_BINS = 40
#: Scalars of the training log that are no objective's curve.
_NOT_CURVES = ("epoch", "step", "learning_rate", "grad_norm", "total_flos", "num_input_tokens_seen")
#: Scripts that matplotlib's own font lacks; Noto's fonts are taken where they are installed.
_SCRIPTS = [
    "Devanagari", "Bengali", "Tamil", "Telugu", "Kannada", "Malayalam",
    "Gujarati", "Gurmukhi", "Oriya", "Sinhala", "Thai", "Lao",
    "Khmer", "Myanmar", "Ethiopic", "CJK SC", "CJK KR",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- retention


def retention(comparison: Mapping[str, Any], limit: float = 1.0) -> dict[str, Any]:
    """Whether languages that were not trained on kept their accuracy.

    A test of non-inferiority on the mean over the languages: it is ``"kept"`` where the whole interval of the difference
    lies above the red line ``-limit``, ``"lost"`` where the whole interval lies below it, else ``"uncertain"``.

    Args:
        comparison: `compare` over the untrained languages of a test set.
        limit: Loss in percentage points that a run may have.

    Returns:
        ``{"limit", "verdict", "pooled", "languages": [{"language", "below", …}], "worst": [codes], "settings"}``; the
        languages from the largest loss to the largest gain, ``below`` where a language's difference is below the line,
        ``worst`` those that are significantly worse and up to five with the largest losses.
    """
    rows = [
        {"language": language, **row, "below": row["difference"] < -limit}
        for language, row in sorted(comparison["languages"].items(), key=lambda item: item[1]["difference"])
    ]
    low, high = comparison["pooled"]["interval"]
    verdict = "kept" if low >= -limit else "lost" if high < -limit else "uncertain"
    losses = [row["language"] for row in rows if row["difference"] < 0][:5]
    worst = [row["language"] for row in rows if row["verdict"] == "worse" or row["language"] in losses]
    return {
        "limit": limit,
        "verdict": verdict,
        "pooled": comparison["pooled"],
        "languages": rows,
        "worst": worst,
        "settings": comparison["settings"],
    }


# -------------------------------------------------------------------------------------------------------------- curves


def learning_curves(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The loss, each objective and each accuracy measured during training, as far as it has two finite points.

    Args:
        history: The trainer's ``log_history``.

    Returns:
        ``(step, value)`` by the name of the scalar.

    >>> learning_curves([{"step": 5, "tr": 2.0, "epoch": 0.1}, {"step": 10, "tr": 1.5, "epoch": 0.2}])
    {'tr': [(5, 2.0), (10, 1.5)]}
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for key, value in entry.items():
            if "step" in entry and _is_curve(key) and isinstance(value, int | float) and math.isfinite(value):
                series.setdefault(key, []).append((entry["step"], value))
    return {name: points for name, points in series.items() if len(points) > 1}


def _is_curve(key: str) -> bool:
    if key.startswith("eval_"):
        return key.endswith(("mean_accuracy", "eval_loss"))
    return key not in _NOT_CURVES and not key.startswith("train_")


# --------------------------------------------------------------------------------------------------------------- words


@torch.inference_mode()
def word_states(
    model: SentenceTransformer, sentences: Sequence[Words], layer: int | None = None
) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """The words of sentences as an encoder sees them: each the mean over the states of its pieces.

    Args:
        model: The encoder.
        sentences: The words of each sentence.
        layer: 0 for the embeddings up to the number of layers; None is the last one.

    Returns:
        For each sentence the words that have states (truncation may have cut some), shape ``(n,)``, and their states,
        shape ``(n, hidden)``.
    """
    model.eval()
    layers = model[0].auto_model.config.num_hidden_layers
    aligner = EmbeddingAligner(model, layer=layers if layer is None else layer, level="word")
    with packed(model), _up_to(model[0].auto_model, aligner.layer):
        states, encodings = aligner._encode(list(dict.fromkeys(words.text for words in sentences)))
    found = []
    for words in sentences:
        states_nh, owners = aligner._units(states[words.text], piece_spans(encodings[words.text], words))
        found.append((np.array([word for (word,) in owners], dtype=np.int64), states_nh.float().cpu().numpy()))
    return found


def segmented(text: str, language: str) -> Words | None:
    """The words of a text; None where the language is written without spaces and ICU is not installed."""
    try:
        return Words.of(text, language, "icu" if language in UNSPACED else "whitespace")
    except ImportError:
        logger.info("No words of %s without ICU: pip install 'metaphrase[align]'.", language)
        return None


def sample_words(sets: Mapping[str, ParallelSet], limit: int = 100) -> list[tuple[str, Words, list[int]]]:
    """Words for a map: those of the first translation pairs of each language, English ones from all of them.

    Args:
        sets: Parallel sentences per language.
        limit: Words of a language.

    Returns:
        ``(language, sentence, which words)``; words without a letter are left out, and each spelling is taken once.
    """
    sample: list[tuple[str, Words, list[int]]] = []
    for side in ("sources", "targets"):
        seen: set[str] = set()
        for language, data in sets.items():
            spoken = TARGET_LANGUAGE if side == "targets" else language
            room = limit if side == "sources" else -(-limit // len(sets))
            seen = seen if side == "targets" else set()
            for text in getattr(data, side):
                words = segmented(text, spoken)
                if room <= 0 or words is None:
                    break
                chosen: list[int] = []
                for at, word in enumerate(words):
                    if any(map(str.isalpha, word)) and word.casefold() not in seen and len(chosen) < room:
                        seen.add(word.casefold())
                        chosen.append(at)
                if chosen:
                    room -= len(chosen)
                    sample.append((spoken, words, chosen))
    return sample


def token_map(states_nh: NDArray[Any], languages: Sequence[str]) -> dict[str, Any]:
    """Two projections of word states onto a plane, and how much languages keep to themselves.

    Args:
        states_nh: States of words, shape ``(n, hidden)``; only their directions count.
        languages: The language of each.

    Returns:
        ``pca`` and ``tsne`` (None without scikit-learn): a point for each word; ``explained``: share of the variance on
        each axis of the former; ``own_language``: share of the nearest words by cosine that are of a word's own
        language, in percent.

    Reference: Li et al. 2023 (DAP), figure 1 (PCA); Miao et al. 2024 (WACSE), figure 1 (t-SNE).
    """
    unit_nh = unit_rows(states_nh)
    pca_n2, explained = principal_components(unit_nh)
    tsne_n2 = neighbour_embedding(unit_nh)
    return {
        "pca": _rounded(pca_n2),
        "explained": explained,
        "tsne": None if tsne_n2 is None else _rounded(tsne_n2),
        "own_language": own_language_share(unit_nh, languages),
    }


def principal_components(rows_nh: NDArray[Any], components: int = 2) -> tuple[NDArray[np.float64], list[float]]:
    """Coordinates along the directions of largest variance, and each direction's share of it.

    The sign of a direction is that of its largest component.

    >>> points, shares = principal_components(np.array([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    >>> np.abs(points).round(6).tolist()[0], [round(share, 3) for share in shares]
    ([3.0, 0.0], [0.9, 0.1])
    """
    centred_nh = np.asarray(rows_nh, dtype=np.float64) - np.mean(rows_nh, axis=0, dtype=np.float64)
    left_nc, size_c, right_ch = np.linalg.svd(centred_nh, full_matrices=False)
    largest_c = np.take_along_axis(right_ch, np.abs(right_ch).argmax(axis=1)[:, None], axis=1)[:, 0]
    points_nc = left_nc * size_c * np.where(largest_c < 0, -1, 1)
    share_c = size_c**2 / max(float((size_c**2).sum()), np.finfo(np.float64).tiny)
    return points_nc[:, :components], share_c[:components].tolist()


def neighbour_embedding(rows_nh: NDArray[Any], seed: int = 0) -> NDArray[np.float64] | None:
    """t-SNE in the plane, started from the principal components; None where scikit-learn is not installed.

    Reference: van der Maaten and Hinton 2008, "Visualizing Data using t-SNE".
    """
    try:
        from sklearn.manifold import TSNE  # type: ignore[import-untyped]
    except ImportError:
        logger.warning("No t-SNE without scikit-learn: pip install 'metaphrase[report]'.")
        return None
    perplexity = min(30.0, (len(rows_nh) - 1) / 3)
    start_n2 = principal_components(rows_nh)[0]
    start_n2 = (1e-4 * start_n2 / max(float(start_n2[:, 0].std()), 1e-12)).astype(np.float32)
    return TSNE(perplexity=perplexity, init=start_n2, random_state=seed).fit_transform(rows_nh)


def own_language_share(unit_nh: NDArray[np.float32], languages: Sequence[str], k: int = WORD_NEIGHBOURS) -> float:
    """Share of the ``k`` nearest words, in percent, that are of a word's own language; the word itself is left out.

    >>> own_language_share(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), ["sw", "sw", "en", "en"], k=1)
    100.0
    """
    similarity_nn = unit_nh @ unit_nh.T
    np.fill_diagonal(similarity_nn, -np.inf)
    nearest_nk = np.argsort(-similarity_nn, axis=1, kind="stable")[:, : min(k, len(unit_nh) - 1)]
    language_n = np.asarray(languages)
    return 100 * float(np.mean(language_n[nearest_nk] == language_n[:, None]))


def expected_share(languages: Sequence[str]) -> float:
    """`own_language_share` where words lie without regard to language."""
    counts_l = np.unique(languages, return_counts=True)[1]
    return 100 * float(np.sum(counts_l * (counts_l - 1)) / (len(languages) * (len(languages) - 1)))


def choose_pairs(
    sets: Mapping[str, ParallelSet], chosen: Sequence[str] = ()
) -> list[tuple[str, int, tuple[Words, Words]]]:
    """Pairs whose alignment is drawn.

    Args:
        sets: Parallel sentences per language.
        chosen: Pairs as ``language:number``, counted from 1; without any, the first of each language whose sides have
            four to nine words, numbers and symbols left aside.

    Returns:
        ``(language, number from 1, (source, target))``.

    Raises:
        ValueError: There is no such pair.
    """
    pairs = []
    for name in chosen:
        language, _, number = name.partition(":")
        if language not in sets or not number.isdecimal() or not 1 <= int(number) <= len(sets[language].sources):
            raise UsageError(
                f"A pair is language:number, such as {next(iter(sets))}:1, with a language of {', '.join(sets)} and a "
                f"number that its test set has, not {name!r}."
            )
        pairs.append((language, int(number)))
    if not chosen:
        pairs = [(language, at) for language, data in sets.items() if (at := _first_short_pair(data)) is not None]
    found = []
    for language, at in pairs:
        source = segmented(sets[language].sources[at - 1], language)
        target = segmented(sets[language].targets[at - 1], TARGET_LANGUAGE)
        if source is not None and target is not None:
            found.append((language, at, (source, target)))
    return found


def _first_short_pair(data: ParallelSet) -> int | None:
    low, high = _MATRIX_WORDS
    for at, (source, target) in enumerate(zip(data.sources, data.targets, strict=True), 1):
        if low <= len(target.split()) <= high and source != target:
            words = segmented(source, data.language)
            if words is None:
                return None
            if low <= len(words) <= high and all(any(map(str.isalpha, word)) for word in words):
                return at
    return None


def alignment_matrix(
    source_model: SentenceTransformer, target_model: SentenceTransformer, pair: tuple[Words, Words]
) -> dict[str, Any]:
    """Cosines between the words of a pair, and the links of `EmbeddingAligner` over words.

    States are of the aligner's layer, two thirds of the way up.

    Returns:
        ``source``, ``target`` (words), ``cosine`` (a row for each source word) and ``links`` (``[source, target]``).
    """
    aligner = EmbeddingAligner(source_model, level="word")
    states, texts = [], []
    for model, words in zip((source_model, target_model), pair, strict=True):
        ((at_n, states_nh),) = word_states(model, [words], aligner.layer)
        spelled = list(words)
        states.append(F.normalize(torch.from_numpy(states_nh), dim=-1))
        texts.append([spelled[at] for at in at_n])
    (found,) = aligner._compare([states[0]], [states[1]])
    return {
        "source": texts[0],
        "target": texts[1],
        "layer": aligner.layer,
        "cosine": [[round(value, 4) for value in row] for row in (states[0] @ states[1].T).tolist()],
        "links": sorted([s, t] for s, t in found),
    }


# ----------------------------------------------------------------------------------------------------------- sentences


def margins(source_nh: NDArray[Any], target_nh: NDArray[Any], data: ParallelSet) -> tuple[NDArray, NDArray]:
    """Ratio margin of each translation pair, and of each source with the best target that does not translate it.

    Copies of the source or of its translation are no wrong targets. Sources that have none are left out.

    Args:
        source_nh: Embeddings of the sources, shape ``(n, hidden)``.
        target_nh: Embeddings of the targets, shape ``(n, hidden)``.
        data: Their texts.

    Returns:
        Margins of the pairs and of the best others, shape ``(n,)`` each.

    Reference: Artetxe and Schwenk 2019, section 3.1.
    """
    source_nh, target_nh = unit_rows(source_nh), unit_rows(target_nh)
    forward = nearest_neighbours(source_nh, target_nh, MARGIN_NEIGHBOURS)
    backward = nearest_neighbours(target_nh, source_nh, MARGIN_NEIGHBOURS)
    pair_n = margin_score(np.einsum("nh,nh->n", source_nh, target_nh), forward.mean_q, backward.mean_q)
    other_nk = neighbour_scores(forward, backward)
    sources, targets = (np.array(side, dtype=object) for side in (data.sources, data.targets))
    same_nk = (targets[forward.row_qk] == targets[:, None]) | (sources[forward.row_qk] == sources[:, None])
    best_n = np.where(same_nk, -np.inf, other_nk).max(axis=1)
    there_n = np.isfinite(best_n)
    return pair_n[there_n].astype(np.float64), best_n[there_n].astype(np.float64)


def margin_histogram(margins_of: Mapping[str, tuple[NDArray, NDArray]]) -> dict[str, Any]:
    """Histograms of margins: those of translations and of others over the same bins, each side over bins of its own.

    Training can spread margins tenfold, so that bins for both sides would show one of them as a few bars.

    Args:
        margins_of: What `margins` returns, per side (``"before"``, ``"after"``).

    Returns:
        Per side the ``edges`` of the bins, the counts ``translations`` and ``others``, the medians of both, and
        ``overlap``: the share of sources, in percent, whose best other target has at least the margin of the translation.
    """
    sides: dict[str, Any] = {}
    for side, (pair_n, other_n) in margins_of.items():
        low, high = np.quantile(np.concatenate([pair_n, other_n]), [0.001, 0.999])
        edges = np.linspace(low, max(high, low + 1e-6), _BINS + 1)
        sides[side] = {
            "edges": edges.tolist(),
            "translations": np.histogram(np.clip(pair_n, edges[0], edges[-1]), edges)[0].tolist(),
            "others": np.histogram(np.clip(other_n, edges[0], edges[-1]), edges)[0].tolist(),
            "translation_median": float(np.median(pair_n)),
            "other_median": float(np.median(other_n)),
            "overlap": 100 * float(np.mean(other_n >= pair_n)),
        }
    return {"neighbours": MARGIN_NEIGHBOURS, "n": len(pair_n), **sides}


def nearest_found(source_nh: NDArray[Any], target_nh: NDArray[Any]) -> dict[str, NDArray]:
    """The nearest target of each source by cosine, its cosine, and that of the translation, shape ``(n,)`` each."""
    source_nh, target_nh = unit_rows(source_nh), unit_rows(target_nh)
    found = nearest_neighbours(source_nh, target_nh, 1)
    right_n = np.einsum("nh,nh->n", source_nh, target_nh)
    return {"row": found.row_qk[:, 0], "cosine": found.similarity_qk[:, 0], "right": right_n}


def nearest_errors(
    sets: Mapping[str, ParallelSet], found: Mapping[str, Mapping[str, Mapping[str, NDArray]]], *, limit: int = 12
) -> dict[str, Any]:
    """Errors to read: sentences whose nearest English sentence is not their translation.

    Args:
        sets: Parallel sentences per language.
        found: `nearest_found` per language, per side.
        limit: Most rows of each list.

    Returns:
        Three lists by language, the widest gaps between both cosines first: ``wrong`` after training, and with a baseline
        ``fixed`` (wrong before, right after) and ``broken`` (right before, wrong after); ``counts`` of each. Languages
        take turns, so that what one leaves of its share goes to the others.
    """
    lists: dict[str, dict[str, list[dict[str, Any]]]] = {"wrong": {}, "fixed": {}, "broken": {}}
    for language, data in sets.items():
        sides = found[language]
        wrong_n = {
            side: np.array([data.targets[row] != right for row, right in zip(one["row"], data.targets, strict=True)])
            for side, one in sides.items()
        }
        groups = {"wrong": wrong_n["after"]}
        if "before" in sides:
            groups["fixed"] = wrong_n["before"] & ~wrong_n["after"]
            groups["broken"] = ~wrong_n["before"] & wrong_n["after"]
        for kind, chosen_n in groups.items():
            judged = sides["before" if kind == "fixed" else "after"]
            gap_n = judged["cosine"] - judged["right"]
            rows = sorted(np.flatnonzero(chosen_n).tolist(), key=lambda at: -gap_n[at])
            lists[kind][language] = [_error(data, at, sides) for at in rows]
    errors: dict[str, Any] = {
        "counts": {kind: sum(map(len, by_language.values())) for kind, by_language in lists.items() if by_language},
        "pairs": sum(len(data.sources) for data in sets.values()),
    }
    for kind, by_language in lists.items():
        if by_language:
            ranked = list(by_language.values())
            turns = sorted((rank, at) for at, rows in enumerate(ranked) for rank in range(len(rows)))[:limit]
            errors[kind] = [ranked[at][rank] for at, rank in sorted((at, rank) for rank, at in turns)]
    return errors


def _error(data: ParallelSet, at: int, sides: Mapping[str, Mapping[str, NDArray]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "language": data.language,
        "number": at + 1,
        "source": data.sources[at],
        "right": data.targets[at],
    }
    for side, one in sides.items():
        row[side] = {
            "found": data.targets[one["row"][at]],
            "found_cosine": round(float(one["cosine"][at]), 4),
            "right_cosine": round(float(one["right"][at]), 4),
        }
    return row


def _rounded(points_n2: NDArray[Any]) -> list[list[float]]:
    return [[float(f"{value:.5g}") for value in point] for point in points_n2.tolist()]


# ------------------------------------------------------------------------------------------------------------ pictures


def draw(report: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """The pictures of a report as PNG files, from the content of its JSON.

    Args:
        report: What ``report.json`` holds.
        folder: Where they go.

    Returns:
        The files; none where matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError:
        logger.info("No PNG files without matplotlib: pip install 'metaphrase[report]'.")
        return []
    installed = {font.name for font in fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for script in _SCRIPTS if (name := f"Noto Sans {script}") in installed)]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    analysis = report["analysis"]
    pictures: list[tuple[str, Callable[[Any, Any], None], Any]] = []
    pictures += [(f"accuracy-{name}", _draw_accuracy, one) for name, one in report["comparisons"].items()]
    pictures += [(f"retention-{name}", _draw_retention, one) for name, one in analysis.get("retention", {}).items()]
    if curves := learning_curves(report["run"].get("log_history", ())):
        pictures.append(("curves", _draw_curves, curves))
    others: dict[str, Callable[[Any, Any], None]] = {
        "tokens": _draw_tokens,
        "margins": _draw_margins,
        "alignments": _draw_alignments,
    }
    pictures += [(key, drawer, analysis[key]) for key, drawer in others.items() if analysis.get(key)]
    paths = []
    with rc_context({"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph|Font family|findfont|.* does not support")  # of a rare script
        for name, drawer, content in pictures:
            figure = Figure(layout="constrained", dpi=150)
            drawer(figure, content)
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1])
    return paths


def _draw_accuracy(figure: Any, comparison: Mapping[str, Any]) -> None:
    rows = sorted(comparison["languages"].items(), key=lambda item: item[1]["difference"])
    figure.set_size_inches(9, 1.5 + 0.3 * len(rows))
    axes, moved = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    for y, (_, row) in enumerate(rows):
        axes.plot([row["before"], row["after"]], [y, y], color="#5c6773", zorder=1)
    axes.scatter([row["before"] for _, row in rows], range(len(rows)), color=_BEFORE, marker="s", label="before")
    axes.scatter([row["after"] for _, row in rows], range(len(rows)), color=_AFTER, marker="o", label="after")
    axes.set(xlabel="accuracy in percent", yticks=range(len(rows)), yticklabels=[language for language, _ in rows])
    _differences(moved, [row for _, row in rows], across=True)
    moved.axvline(0, color="#5c6773", lw=0.8, zorder=0)
    moved.set(xlabel="difference in points, 95 % interval")
    figure.legend(loc="outside upper center", frameon=False, ncols=5)


def _differences(axes: Any, rows: Sequence[Mapping[str, Any]], *, across: bool = False) -> None:
    """A row's difference with its interval, marked by its verdict."""
    for verdict, (marker, colour) in _VERDICTS.items():
        at = [place for place, row in enumerate(rows) if row["verdict"] == verdict]
        differences = [rows[place]["difference"] for place in at]
        ends = [
            [max(0.0, sign * (rows[place]["difference"] - rows[place]["interval"][end])) for place in at]
            for sign, end in ((1, 0), (-1, 1))
        ]
        style: dict[str, Any] = {"fmt": marker, "color": colour, "label": verdict}
        if across:
            axes.errorbar(differences, at, xerr=ends, ms=6, lw=1.2, **style)
        else:
            axes.errorbar(at, differences, yerr=ends, ms=4, lw=0.8, **style)


def _draw_retention(figure: Any, one: Mapping[str, Any]) -> None:
    rows = one["languages"]
    figure.set_size_inches(max(5, 1.5 + 0.13 * len(rows)), 3.6)
    axes = figure.subplots()
    _differences(axes, rows)
    axes.axhline(0, color="#5c6773", lw=0.8)
    axes.axhspan(-one["limit"], 0, color=_RED, alpha=0.15, lw=0)
    axes.axhline(-one["limit"], color=_RED, ls="--", lw=1, label=f"red line, {-one['limit']:g}")
    axes.set(ylabel="points", xlim=(-1, len(rows)), xticks=range(len(rows)))
    axes.set_xticklabels([row["language"] for row in rows], rotation=90, fontsize=6)
    figure.legend(loc="outside upper right", frameon=False, ncols=4, fontsize=8)


def _draw_curves(figure: Any, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    columns = min(3, len(curves))
    lines = -(-len(curves) // columns)
    figure.set_size_inches(3.4 * columns, 2.4 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for (name, points), axes in zip(curves.items(), panels, strict=False):
        axes.plot(*zip(*points, strict=True), color=_AFTER)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
    for axes in list(panels):
        axes.remove()


def _draw_tokens(figure: Any, tokens: Mapping[str, Any]) -> None:
    sides = [side for side in SIDES if side in tokens]
    kinds = [kind for kind in ("pca", "tsne") if tokens["after"][kind]]
    figure.set_size_inches(4 * len(sides), 3.8 * len(kinds))
    grid = figure.subplots(len(kinds), len(sides), squeeze=False)
    language_n = np.array(tokens["language_of"])
    for kind, row in zip(kinds, grid, strict=True):
        for side, axes in zip(sides, row, strict=True):
            points_n2 = np.array(tokens[side][kind])
            for at, language in enumerate(tokens["languages"]):
                x_n, y_n = points_n2[language_n == language].T
                style = {"marker": MARKERS[at % len(MARKERS)], "color": PALETTE[at % len(PALETTE)]}
                axes.scatter(x_n, y_n, s=14, alpha=0.8, linewidths=0, label=language, **style)
            axes.set(title=f"{ {'pca': 'PCA', 'tsne': 't-SNE'}[kind] }, {side}", xticks=[], yticks=[])
    grid[0][0].legend(frameon=False, fontsize=8)


def _draw_margins(figure: Any, margins: Mapping[str, Any]) -> None:
    sides = [side for side in SIDES if side in margins]
    figure.set_size_inches(4 * len(sides), 3)
    for side, axes in zip(sides, figure.subplots(1, len(sides), squeeze=False)[0], strict=True):
        one = margins[side]
        axes.stairs(one["translations"], one["edges"], fill=True, color=_AFTER, alpha=0.5, label="translations")
        axes.stairs(one["others"], one["edges"], color=_WORSE, ls="--", lw=1.5, label="nearest others")
        axes.set(title=f"{side} (a scale of its own)" if len(sides) > 1 else side, xlabel="ratio margin")
        axes.legend(frameon=False, fontsize=8)


def _draw_alignments(figure: Any, alignments: Sequence[Mapping[str, Any]]) -> None:
    sides = [side for side in SIDES if side in alignments[0]]
    figure.set_size_inches(4.5 * len(sides), 3.2 * len(alignments))
    grid = figure.subplots(len(alignments), len(sides), squeeze=False)
    for one, row in zip(alignments, grid, strict=True):
        values = [value for side in sides for line in one[side]["cosine"] for value in line]
        for side, axes in zip(sides, row, strict=True):
            axes.imshow(one[side]["cosine"], cmap="Blues", vmin=min(values), vmax=max(values), aspect="auto")
            for s, t in one[side]["links"]:
                axes.plot(t, s, marker="o", ms=9, mfc="none", mec=_WORSE, mew=1.5)
            axes.set(title=f"{one['language']} {one['number']}, {side}")
            axes.set_xticks(range(len(one[side]["target"])), one[side]["target"], rotation=45, ha="right", fontsize=7)
            axes.set_yticks(range(len(one[side]["source"])), one[side]["source"], fontsize=7)
