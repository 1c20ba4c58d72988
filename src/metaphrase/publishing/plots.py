"""Charts of a report, drawn by matplotlib: as SVG markup for the page, and as PNG files.

A chart shows the data of ``report.json`` and nothing else. In the markup colours are variables of the page's style sheet,
so that a chart follows the page's light or dark theme. A chart is narrow enough to be read on a phone.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from metaphrase.corpus.identification import language_name
from metaphrase.evaluation.evaluator import is_fraction
from metaphrase.io.files import replacing
from metaphrase.publishing.analysis import SIDES

#: Colours of the light theme by their names in the style sheet. ``m0`` to ``m7`` are Okabe and Ito's, which readers
#: with colour vision deficiency can distinguish; each language of a map has its own marker as well.
COLOURS = {
    "ink": "#1c2430",
    "soft": "#5c6773",
    "line": "#e3e7ec",
    "before": "#76818d",
    "after": "#1860c4",
    "better": "#00639c",
    "worse": "#b0400a",
    "red": "#d1242f",
    "m0": "#3f4853",
    "m1": "#0072b2",
    "m2": "#d55e00",
    "m3": "#009e73",
    "m4": "#b8588f",
    "m5": "#b27a00",
    "m6": "#3a8fc4",
    "m7": "#a05a2c",
}
PALETTE = [colour for name, colour in COLOURS.items() if re.fullmatch(r"m\d", name)]
MARKERS = "os^Dvp*X"
#: Marker and colour of a verdict.
_VERDICTS = {
    "worse": ("v", COLOURS["worse"]),
    "tie": ("o", COLOURS["soft"]),
    "better": ("^", COLOURS["better"]),
}
#: Width of a chart, in inches.
_WIDTH = 5.0
#: Factor by which a page enlarges a chart if it has the space.
_ZOOM = 1.25
#: Longest label of an axis, in characters.
_LABEL_LENGTH = 24
#: Scalars of the training log that are not curves.
_NOT_CURVES = ("epoch", "step", "learning_rate", "grad_norm", "total_flos", "num_input_tokens_seen")
#: Scripts that matplotlib's own font does not cover; Noto's fonts are used if they are installed.
_SCRIPTS = [
    "Devanagari", "Bengali", "Tamil", "Telugu", "Kannada", "Malayalam",
    "Gujarati", "Gurmukhi", "Oriya", "Sinhala", "Thai", "Lao",
    "Khmer", "Myanmar", "Ethiopic", "CJK SC", "CJK KR",
]  # fmt: skip
#: Prefix of the id of an element that shows the rest of the id as a tooltip.
_TOOLTIP = "tooltip:"


@dataclass(frozen=True)
class Chart:
    """A part of a report that can be drawn."""

    label: str
    draw: Callable[[Figure], None]


def charts(report: Mapping[str, Any]) -> dict[str, Chart]:
    """The charts of a report by name."""
    analysis, before = report["analysis"], report["before"] or {}
    by_name = {
        f"accuracy-{name}": Chart(
            f"Accuracy {'before and after' if name in before else 'after'} training on {name}, per language; the table "
            "below has the numbers",
            partial(draw_accuracy, before=before.get(name), after=after, comparison=report["comparisons"].get(name)),
        )
        for name, after in report["after"].items()
    }
    for name, one in analysis.get("retention", {}).items():
        by_name[f"retention-{name}"] = Chart(
            f"Difference in accuracy of {len(one['languages'])} languages without training data on {name}, sorted, with a "
            f"red line at {0 - one['limit']:g} points; mean {one['pooled']['difference']:+.2f}, {one['verdict']}",
            partial(draw_retention, retention=one),
        )
    if "alpha" in analysis:
        by_name["alpha"] = alpha_chart(analysis["alpha"])
    if curves := learning_curves(report["run"].get("log_history", ())):
        by_name["curves"] = Chart(f"{', '.join(curves)} over training steps", partial(draw_curves, curves=curves))
    if tokens := analysis.get("tokens"):
        by_name["tokens"] = Chart(
            f"Maps of {len(tokens['words'])} words in {', '.join(tokens['languages'])}",
            partial(draw_tokens, tokens=tokens),
        )
    if margins := analysis.get("margins"):
        by_name["margins"] = Chart(
            "Histograms of margins; the table below has the medians", partial(draw_margins, margins=margins)
        )
    if answers := analysis.get("answers"):
        by_name["answers"] = Chart(
            f"mAP by the language of the question and of the candidates, {len(answers['languages'])} languages",
            partial(draw_answers, answers=answers),
        )
    return by_name


def svg(name: str, chart: Chart) -> str:
    """A chart as markup for an HTML page, without references to other files.

    The name must be unique on the page.
    """
    stream = io.StringIO()
    with _style({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(layout="constrained")
        chart.draw(figure)
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        width, height = 72 * figure.get_size_inches()
    text = stream.getvalue()
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>|<!--.*?-->", "", text, flags=re.S
    )
    text = re.sub(r"<defs>\s*</defs>\s*", "", text)
    text = re.sub(r' clip-path="[^"]*"', "", text)
    text = re.sub(rf"<g id=([\"']){_TOOLTIP}(.*?)\1>", r"<g><title>\2</title>", text)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font: (?:\d+ )?([\d.]+px) [^;\"]*", r"font-size: \1", text)
    for colour_name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{colour_name})")
    pixels = f'width="{width * 4 / 3 * _ZOOM:.0f}" height="{height * 4 / 3 * _ZOOM:.0f}"'
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" {pixels} role="img" aria-label="{html.escape(chart.label)}">{text}'
    )


def save_pictures(report: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Save the charts of a report as PNG files."""
    return [save_picture(chart, Path(folder) / f"{name}.png") for name, chart in charts(report).items()]


def save_picture(chart: Chart, path: str | Path) -> Path:
    """Save a chart as a file; the suffix decides the format."""
    with _style({}):
        figure = Figure(layout="constrained", dpi=200)
        chart.draw(figure)
        with replacing(path) as file:
            figure.savefig(file, format=Path(path).suffix.removeprefix("."))
    return Path(path)


def alpha_chart(curve: Mapping[str, Any]) -> Chart:
    """The chart of gain and cost by the weight of a task vector (`metaphrase.evaluation.guards.AlphaCurve`)."""
    label = f"Gain on {curve['gain']} and differences of the guards for each alpha; {curve['alpha']:g} is chosen"
    return Chart(label, partial(draw_alpha, curve=curve))


def learning_curves(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The loss, each objective, mean accuracies and guards during training, if they have two finite values.

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
        return key.startswith("eval_guard_") or key.endswith(("mean_accuracy", "eval_loss"))
    return key not in _NOT_CURVES and not key.startswith("train_")


# ------------------------------------------------------------------------------------------------------------- drawing


def draw_accuracy(
    figure: Figure, *, before: Mapping[str, Any] | None, after: Mapping[str, Any], comparison: Mapping[str, Any] | None
) -> None:
    """Accuracy per language with its interval, before and after, and the difference; the largest gain is on top."""
    tests = comparison["languages"] if comparison else {}
    means = {
        side: {language: row["mean"] for language, row in results["languages"].items()}
        for side, results in (("before", before), ("after", after))
        if results is not None
    }
    gain = {
        language: tests[language]["difference"] if tests else row["accuracy"]
        for language, row in means["after"].items()
    }
    languages = sorted(means["after"], key=gain.__getitem__)
    figure.set_size_inches(_WIDTH, 1.2 + 0.3 * len(languages))
    axes, *others = figure.subplots(
        1, 1 + bool(tests), sharey=True, width_ratios=[3, 2][: 1 + bool(tests)], squeeze=False
    )[0]
    shift = {side: 0.13 * (at - (len(means) - 1) / 2) * -2 for at, side in enumerate(means)}
    for y, language in enumerate(languages):
        values = {side: of_side[language] for side, of_side in means.items()}
        words = " and ".join(f"{value['accuracy']:.1f} {side}" for side, value in values.items())
        if tests:
            words += f" ({tests[language]['difference']:+.1f}, {tests[language]['verdict']})"
            places = [y + shift[side] for side in values]
            axes.plot([value["accuracy"] for value in values.values()], places, color=COLOURS["soft"], lw=1)
        for side, value in values.items():
            bar = axes.plot(value["interval"], [y + shift[side]] * 2, color=COLOURS[side], lw=4, alpha=0.35)
            marker = "s" if side == "before" else "o"
            label = side if y == 0 else None
            point = axes.plot(
                value["accuracy"], y + shift[side], ls="", marker=marker, ms=6, color=COLOURS[side], label=label
            )
            for artist in (*bar, *point):
                artist.set_gid(f"{_TOOLTIP}{language}: {words}")
    axes.set(xlabel="accuracy in percent", ylim=(-0.6, len(languages) - 0.4))
    axes.set_yticks(range(len(languages)), [_shortened(language_name(language)) for language in languages])
    axes.grid(axis="x")
    for moved in others:
        draw_differences(moved, [{"language": language, **tests[language]} for language in languages])
        moved.axvline(0, color=COLOURS["soft"], lw=0.8, zorder=0)
        moved.set(xlabel="difference in points")
        moved.grid(axis="x")
    figure.supxlabel("with 95 % intervals", fontsize=8)
    figure.legend(loc="outside upper center", ncols=3 if tests else 1)


def draw_differences(axes: Any, rows: Sequence[Mapping[str, Any]], *, size: float = 6) -> None:
    """Differences with their intervals, a line of the chart per row, marked by verdict."""
    labelled: set[str] = set()
    for verdict, (marker, colour) in _VERDICTS.items():
        for place, row in enumerate(rows):
            if row["verdict"] != verdict:
                continue
            ends = [
                [max(0.0, row["difference"] - row["interval"][0])],
                [max(0.0, row["interval"][1] - row["difference"])],
            ]
            label = "_nolegend_" if verdict in labelled else verdict
            labelled.add(verdict)
            style: dict[str, Any] = {"fmt": marker, "color": colour, "label": label, "ms": size, "lw": size / 5}
            drawn = axes.errorbar([row["difference"]], [place], xerr=ends, **style)
            text = f"{row['before']:.1f} before and {row['after']:.1f} after ({row['difference']:+.1f}, {verdict})"
            drawn.lines[0].set_gid(f"{_TOOLTIP}{row['language']}: {text}")


def draw_retention(figure: Figure, *, retention: Mapping[str, Any]) -> None:
    """Difference of each language that was not trained on, from the largest loss to the largest gain, and their mean."""
    rows, pooled, limit = retention["languages"], retention["pooled"], retention["limit"]
    figure.set_size_inches(_WIDTH, 1.5 + 0.17 * len(rows))
    axes = figure.subplots()
    draw_differences(axes, rows, size=4)
    axes.plot(pooled["interval"], [-2, -2], color=COLOURS["ink"], lw=3, alpha=0.4)
    (mean,) = axes.plot(pooled["difference"], -2, ls="", marker="D", color=COLOURS["ink"], label="mean")
    mean.set_gid(f"{_TOOLTIP}mean: {pooled['difference']:+.2f}, {retention['verdict']}")
    axes.axvline(0, color=COLOURS["soft"], lw=0.8)
    axes.axvspan(-limit, 0, color=COLOURS["red"], alpha=0.15, lw=0)
    axes.axvline(-limit, color=COLOURS["red"], ls="--", lw=1, label=f"red line, {0 - limit:g}")
    axes.set(xlabel="difference in points, with 95 % intervals", ylim=(len(rows), -3))
    names = [_shortened(language_name(row["language"])) for row in rows]
    axes.set_yticks([-2, *range(len(rows))], ["mean", *names], fontsize=8)
    axes.grid(axis="x")
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, columnspacing=1)


def draw_alpha(figure: Figure, *, curve: Mapping[str, Any]) -> None:
    """Differences to the base by alpha, with their intervals: the gain, and the guards. A cross marks a guard that fails."""
    points = curve["points"]
    series = {curve["gain"]: [point["gain"] for point in points]}
    series |= {name: [point["guards"][name] for point in points] for name in points[0]["guards"]}
    figure.set_size_inches(6.5, 3.8)
    axes = figure.subplots()
    for number, (name, rows) in enumerate(series.items()):
        colour = COLOURS["after"] if number == 0 else PALETTE[number % len(PALETTE)]
        alphas = [point["alpha"] for point in points]
        low, high = zip(*(row["interval"] for row in rows), strict=True)
        axes.fill_between(alphas, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(alphas, [row["difference"] for row in rows], color=colour, lw=2 if number == 0 else 1.2, label=name)
        for alpha, row in zip(alphas, rows, strict=True):
            marker = "o" if row["holds"] or number == 0 else "x"
            (drawn,) = axes.plot(alpha, row["difference"], ls="", marker=marker, ms=5, color=colour)
            drawn.set_gid(f"{_TOOLTIP}{name}, alpha {alpha:g}: {row['difference']:+.2f}, {row['verdict']}")
    axes.axhline(0, color=COLOURS["soft"], lw=0.8)
    axes.axvline(curve["alpha"], color=COLOURS["ink"], ls="--", lw=1, label=f"chosen, {curve['alpha']:g}")
    axes.set(xlabel="alpha", ylabel="difference from the base in points")
    axes.grid(axis="y")
    figure.legend(loc="outside upper left", ncols=3, fontsize=8)


def draw_curves(figure: Figure, *, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """A panel for each scalar of the training log; accuracies and guards, logged as fractions, are drawn in percent."""
    columns = min(2, len(curves))
    lines = -(-len(curves) // columns)
    figure.set_size_inches(_WIDTH / 2 * columns, 1.8 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for (name, points), axes in zip(curves.items(), panels, strict=False):
        scale, unit = (100, " %") if is_fraction(name) else (1, "")
        steps, values = zip(*((step, scale * value) for step, value in points), strict=True)
        axes.plot(steps, values, color=COLOURS["after"])
        axes.set_title(f"{_shortened(name)}, last {values[-1]:.3g}{unit}", fontsize=8)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y")
    for axes in list(panels):
        axes.remove()


def draw_tokens(figure: Figure, *, tokens: Mapping[str, Any]) -> None:
    """Maps of words, coloured by language: both projections, before and after."""
    sides = [side for side in SIDES if side in tokens]
    kinds = {"pca": "PCA", "tsne": "t-SNE"}
    figure.set_size_inches(_WIDTH / 2 * len(sides), 2.5 * len(kinds) + 0.5)
    grid = figure.subplots(len(kinds), len(sides), squeeze=False)
    numbers = {language: number for number, language in enumerate(tokens["languages"])}
    styles = {
        language: {"marker": MARKERS[number % len(MARKERS)], "color": PALETTE[number % len(PALETTE)]}
        for language, number in numbers.items()
    }
    for (kind, title), row in zip(kinds.items(), grid, strict=True):
        for side, axes in zip(sides, row, strict=True):
            for (x, y), language, word in zip(tokens[side][kind], tokens["language_of"], tokens["words"], strict=True):
                (point,) = axes.plot(x, y, ls="", ms=3, mew=0, alpha=0.8, **styles[language])
                point.set_gid(f"{_TOOLTIP}{word} ({language})")
            axes.set(title=f"{title}, {side}", xticks=[], yticks=[], aspect="equal", adjustable="datalim")
    for language, style in styles.items():
        grid[0][0].plot([], [], ls="", label=language_name(language), **style)
    figure.legend(loc="outside upper center", ncols=3)


def draw_margins(figure: Figure, *, margins: Mapping[str, Any]) -> None:
    """Histograms of the margins of translations and of the best wrong targets."""
    sides = [side for side in SIDES if side in margins]
    figure.set_size_inches(_WIDTH / 2 * len(sides), 2.3)
    for side, axes in zip(sides, figure.subplots(1, len(sides), squeeze=False)[0], strict=True):
        one = margins[side]
        parts = [("translations", COLOURS["after"]), ("others", COLOURS["worse"])]
        for (key, colour), label in zip(parts, ("translations", "best wrong targets"), strict=True):
            style: dict[str, Any] = {"fill": True, "alpha": 0.5} if key == "translations" else {"ls": "--", "lw": 1.5}
            axes.stairs(one[key], one["edges"], color=colour, label=label if side == "after" else None, **style)
        axes.set(title=side, xlabel="ratio margin")
    figure.supylabel("pairs", fontsize=9)
    figure.legend(loc="outside upper center", ncols=2)


def draw_answers(figure: Figure, *, answers: Mapping[str, Any]) -> None:
    """Mean average precision of the questions of each language among the candidates of each language, before and after."""
    sides, languages = [side for side in SIDES if side in answers], answers["languages"]
    figure.set_size_inches(0.6 + 0.38 * len(languages) * len(sides), 0.9 + 0.34 * len(languages))
    values = np.array([answers[side] for side in sides])
    for table, side, axes in zip(values, sides, figure.subplots(1, len(sides), squeeze=False)[0], strict=True):
        axes.imshow(table, cmap="Blues", vmin=values.min(), vmax=values.max(), aspect="auto")
        for (asked, answer), value in np.ndenumerate(table):  # the same colours in a dark page, as for the cells
            colour = "white" if value > (values.min() + values.max()) / 2 else "black"
            text = axes.text(answer, asked, f"{value:.0f}", ha="center", va="center", fontsize=6, color=colour)
            text.set_gid(f"{_TOOLTIP}{languages[asked]} questions, {languages[answer]} candidates: {value:.1f}")
        axes.set(title=side, xlabel="candidates")
        axes.set_xticks(range(len(languages)), languages, fontsize=7)
        axes.set_yticks(range(len(languages)), languages, fontsize=7)
    figure.supylabel("questions", fontsize=9)


# --------------------------------------------------------------------------------------------------------------- style


@contextmanager
def _style(settings: Mapping[str, Any]) -> Iterator[None]:
    """Matplotlib's settings while a chart is drawn and saved."""
    colours = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), COLOURS["soft"])
    common = {
        "font.family": list(_fonts()),
        "font.size": 9,
        "axes.titlesize": 10,
        "text.parse_math": False,
        "text.color": COLOURS["ink"],
        "xtick.labelcolor": COLOURS["ink"],
        "ytick.labelcolor": COLOURS["ink"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": COLOURS["line"],
        "legend.frameon": False,
    }
    with rc_context({**common, **colours, **settings}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph|Font family|findfont|.* does not support")  # of a rare script
        yield


@cache
def _fonts() -> tuple[str, ...]:
    installed = {font.name for font in fontManager.ttflist}
    return ("DejaVu Sans", *(name for script in _SCRIPTS if (name := f"Noto Sans {script}") in installed))


def _shortened(label: str) -> str:
    return label if len(label) <= _LABEL_LENGTH else f"{label[: _LABEL_LENGTH - 1]}…"
