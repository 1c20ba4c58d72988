"""The page of scripts/evidence.py: differences with intervals over seeds and sentences, their tables and their plot.

A score is stored with its values in a hundred blocks of items: pseudo-values of the jackknife that leaves one block out,
whose mean is the score. All encoders have the same blocks, so that differences are paired, for means of items as well as for
correlations, error rates and F1. Intervals cover the variation between blocks and that between seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
import yaml
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import t as student
from stored_results import fill, machine_words, markdown

from metaphrase.evaluation.measures import Measure
from metaphrase.evaluation.result import Result, complete_groups
from metaphrase.evaluation.retrieval import TATOEBA_GROUPS
from metaphrase.evaluation.sib200 import language_groups
from metaphrase.evaluation.significance import CONFIDENCE, holm, verdict
from metaphrase.io.work_folders import read_part

#: The recipes and the papers' claims.
CONFIG = Path(__file__).parents[1] / "configs" / "evidence.yaml"
#: Maximum number of blocks of items.
BLOCKS = 100
#: Scores in the tables and their headings: what the objectives aim at, and what they may cost.
GAINS = {
    "demo": "demo test",
    "tatoeba": "Tatoeba 36",
    "sib200 xsim++": "xsim++ error ↓",
    "bucc2018-sample sample_oracle": "BUCC sample",
    "xquad-r mAP": "XQuAD-R mAP",
    "xquad-r own-language bias": "own-language bias ↓",
    "alignment-gold enfr": "AER en–fr ↓",
    "alignment-gold roen": "AER ro–en ↓",
    "wpt05-en-hi": "AER en–hi ↓",
}
COSTS = {
    "stsb": "STS-B",
    "stsb cross-lingual": "STS-B across languages",
    "xquad-r MRR in the question's language": "answers in the question's language",
    "sib200": "SIB-200 retrieval",
    "sib200 topics": "SIB-200 topics",
    "xnli probe accuracy": "XNLI",
    "xnli accuracy": "XNLI, fine-tuned",
    "pawsx probe accuracy": "PAWS-X",
    "ud probe f1": "POS F1",
    "xquad f1": "XQuAD F1",
}
HEADINGS = {**GAINS, **COSTS}
#: The encoders of a cell that are measured, and their names in headings.
VARIANTS = {"raw": "As trained", "merged": "Merged", "released": "Merged and debiased"}
#: Groups of the languages of SIB-200 that are stored.
RESOURCES = ("trained", "in XLM-R", "not in XLM-R")
#: Scores on the axes of the plot.
GAIN_AXIS, COST_AXIS = "tatoeba", "stsb"
#: The baselines of the tables: the encoder before training, and a recipe.
STARTER, REFERENCE = "starter", "tr"
#: Prefix of the scores of groups of Tatoeba's languages.
TATOEBA_GROUP = "tatoeba, the "
#: File with the time of a step of each recipe.
STEP_TIMES = "step_times.json"
#: Why differences lack an interval.
UNTESTED = (
    "PAWS-X and the demo test have no intervals and verdicts: their stored results do not tell which items of different "
    "languages are translations of each other."
)
EMPTY = "No results are stored yet: `python scripts/evidence.py --data benchmarks` writes them, and this table."


# ----------------------------------------------------------------------------------------------------------- statistics


def block_values(
    measure: Measure, items: Mapping[str, Any], ids: Mapping[str, Sequence[int]] | None = None
) -> NDArray[np.float64]:
    """Pseudo-values of the mean over languages of a score: one for each block of items, shape ``(blocks,)``.

    Items with the same number, or the same id if there are ``ids``, are in the same block in all languages. The mean of the
    values is the score.
    """

    def mean_score(items_of_languages: Iterable[Any]) -> float:
        return fmean(map(measure.score, items_of_languages))

    sizes = {language: measure.size(items[language]) for language in items}
    blocks = min(BLOCKS, *sizes.values())
    numbers = {language: np.arange(size) for language, size in sizes.items()} if ids is None else ids
    block_of_items = {language: np.asarray(numbers[language]) % blocks for language in items}
    score = mean_score(items.values())
    score_without_b = np.array(
        [
            mean_score(_without(items[language], block, block_of_items[language]) for language in items)
            for block in range(blocks)
        ]
    )
    value_b = blocks * score - (blocks - 1) * score_without_b
    return value_b - value_b.mean() + score


def _without(items: Any, block: int, block_n: NDArray[np.int64]) -> Any:
    """The items of a language outside a block; ``block_n`` has the block of each."""
    if isinstance(items, np.ndarray):
        return items[block_n != block]
    count, outcomes = items  # counts by sentence, of mined pairs
    blocks = block_n.max() + 1
    return count, {name: counts for name, counts in outcomes.items() if crc32(name.encode()) % blocks != block}


@dataclass(frozen=True)
class Difference:
    """A difference between two encoders: mean over the shared seeds in points, with a 95 % interval over seeds and items.

    The p-value is uncorrected; the verdict is set after Holm's correction over a table, by :func:`with_verdicts`. Without
    blocks of items, there is no interval, no p-value and an empty verdict.
    """

    mean: float
    interval: tuple[float, float] | None
    p_value: float | None
    seeds: int
    verdict: str = "tie"

    def __str__(self) -> str:
        return f"{self.words} {self.verdict}".rstrip()

    @property
    def words(self) -> str:
        """The difference with its interval."""
        # Rounding error of equal encoders must not be formatted as -0.0.
        mean, *interval = (round(value, 6) + 0.0 for value in (self.mean, *(self.interval or ())))
        if not interval:
            return f"{mean:+.1f}"
        low, high = interval
        return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def difference(value_sb: NDArray[np.float64]) -> Difference:
    """The difference of two encoders from its values by seed and block.

    The variance of the mean is that of the block means over the number of blocks, plus that of the seed means over the
    number of seeds. Student's t has Satterthwaite's degrees of freedom (1946), so that a few seeds that differ result in a
    wide interval: with three seeds it contains the true difference in at least 91 % of simulated cases, with two in 87 %.
    With one seed, only blocks vary.

    >>> difference(np.array([[1.0, 2.0, 3.0]]))  # as scipy.stats.ttest_1samp([1, 2, 3], 0)
    Difference(mean=2.0, interval=(-0.48..., 4.48...), p_value=0.074..., seeds=1, verdict='tie')
    """
    mean = float(value_sb.mean())
    seeds = len(value_sb)
    variance = weighted = 0.0
    for means in (value_sb.mean(0), value_sb.mean(1)):  # of blocks, and of seeds
        if len(means) > 1:
            variance_of_mean = float(means.var(ddof=1)) / len(means)
            variance += variance_of_mean
            weighted += variance_of_mean**2 / (len(means) - 1)
    if not variance:
        return Difference(mean, (mean, mean), float(mean == 0), seeds)
    degrees_of_freedom = variance**2 / weighted
    error = variance**0.5
    half_width = float(student.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom)) * error
    p_value = 2 * float(student.sf(abs(mean) / error, degrees_of_freedom))
    return Difference(mean, (mean - half_width, mean + half_width), p_value, seeds)


def with_verdicts(differences: Mapping[Any, Difference], lower_is_better: Mapping[Any, bool]) -> dict[Any, Difference]:
    """The differences of a table with their verdicts, after Holm's correction over those that have intervals."""
    p_values = {key: difference.p_value for key, difference in differences.items() if difference.p_value is not None}
    verdicts = {}
    for key, corrected in holm(p_values).items():
        mean = differences[key].mean
        verdicts[key] = verdict(-mean if lower_is_better[key] else mean, corrected)
    return {key: replace(difference, verdict=verdicts.get(key, "")) for key, difference in differences.items()}


# -------------------------------------------------------------------------------------------------------------- storage


def stored_scores(scores: Mapping[str, Any], trained: Sequence[str]) -> dict[str, Any]:
    """The stored part of the results of a benchmark: each score, and those of groups of languages, with their blocks.

    ``scores`` are results by name, as `Result.to_dict` returns them; those without items are omitted. Blocks hold
    translations of the same items; those of Tatoeba hold rows, as few of its sentences are translated into two languages.
    """
    stored: dict[str, Any] = {}
    for name, content in scores.items():
        if content["statistic"] is None:
            continue
        result = Result.from_dict(content)
        items = {language: result.items(language) for language in result.languages}
        ids = None if name.startswith("tatoeba") else result.item_ids()
        if ids and len(set(map(tuple, ids.values()))) == 1:
            ids = None  # rows with the same number are translations of each other
        for title, languages in _groups_of(result, name, items, trained).items():
            items_of_group = {language: items[language] for language in languages}
            measure = result.statistic_measure()
            value_b = block_values(measure, items_of_group, ids)
            stored[title] = {
                "score": round(float(value_b.mean()), 4),
                "lower_is_better": result.lower_is_better,
                "languages": len(languages),
                "items": sum(map(measure.size, items_of_group.values())),
                "blocks": " ".join(f"{value:.2f}" for value in value_b),
            }
    return stored


def _groups_of(
    result: Result, name: str, items: Mapping[str, Any], trained: Sequence[str]
) -> dict[str, Sequence[str]]:
    """The languages of a score and of each of its stored groups, by the name of the score or group."""
    resources = language_groups(list(items), trained)
    groups = TATOEBA_GROUPS | {group: resources[group] for group in RESOURCES if group in resources}
    titles: dict[str, Sequence[str]] = {name: list(items)}
    for group, languages in complete_groups(groups, items).items():
        if group in result.groups:
            titles[f"{name}, the {group}" if group.isdigit() else f"{name}, {group}"] = languages
    return titles


@dataclass(frozen=True)
class Stored:
    """The stored results of a setting.

    Attributes:
        folder: Its folder.
        training: Facts of each training run, by recipe and seed.
        alphas: Chosen weights, with the curve that they were chosen by, by recipe and seed.
        scores: Scores by name, then by recipe, variant and seed. The starter has the seed -1, and each of its scores is the
            better one of those with and without its prompt.
        hardware: Descriptions of the machines.
        step_seconds: Time of a step of each recipe, measured alone on one machine, if it was measured.
        timed_on: Description of that machine.
    """

    folder: Path
    training: Mapping[tuple[str, int], Mapping[str, Any]]
    alphas: Mapping[tuple[str, int], Mapping[str, Any]]
    scores: Mapping[str, Mapping[tuple[str, str, int], Mapping[str, Any]]]
    hardware: Sequence[str]
    step_seconds: Mapping[str, float]
    timed_on: str

    @classmethod
    def read(cls, folder: Path) -> Stored:
        """Read a folder. Results of other weights than those of the last training run, or of another alpha, are skipped."""
        training, alphas = _read_training(folder)
        scores: dict[str, dict[tuple[str, str, int], Mapping[str, Any]]] = {}
        machines = {machine_words(facts["hardware"]) for facts in training.values()}
        for (recipe, variant, seed), content in _read_results(folder, training, alphas):
            machines.add(machine_words(content["hardware"]))
            data = [content["settings"].get(key) for key in ("benchmark", "data", "revision")]
            for name, score in content["scores"].items():
                scores_of_name = scores.setdefault(name, {})
                best = scores_of_name.get((recipe, variant, seed))
                sign = -1 if score["lower_is_better"] else 1
                if best is None or sign * score["score"] > sign * best["score"]:
                    scores_of_name[recipe, variant, seed] = {**score, "data": data}
        times = read_part(folder / STEP_TIMES)
        step_seconds = times["seconds"] if times else {}
        timed_on = machine_words(times["hardware"]) if times and step_seconds else ""
        return cls(folder, training, alphas, scores, sorted(machines), step_seconds, timed_on)

    def seeds(self, recipe: str) -> list[int]:
        """Seeds with which a recipe was trained."""
        return sorted(seed for name, seed in self.training if name == recipe)

    def chosen_alphas(self, recipe: str) -> str:
        """The weights that were chosen for a recipe, separated by commas: one for each seed."""
        return ", ".join(f"{curve['alpha']:g}" for (name, _), curve in self.alphas.items() if name == recipe)

    def values(self, score: str, recipe: str, variant: str) -> list[float]:
        """The values of a score of an encoder, one for each seed that was measured."""
        return [
            stored["score"]
            for (measured_recipe, measured_variant, _), stored in self.scores[score].items()
            if (measured_recipe, measured_variant) == (recipe, variant)
        ]

    def shown_scores(self) -> list[str]:
        """Names of the stored scores that the tables show, in the order of the columns."""
        return [score for score in HEADINGS if score in self.scores]

    def compare(self, score: str, recipe: str, variant: str, baseline: str) -> Difference | None:
        """The difference between a recipe and another one in the same variant, or the starter; None if not measured."""
        scores = self.scores.get(score, {})
        pairs = []
        for seed in self.seeds(recipe):
            before = scores.get((STARTER, "", -1) if baseline == STARTER else (baseline, variant, seed))
            after = scores.get((recipe, variant, seed))
            if before and after and before["data"] == after["data"]:
                pairs.append((before, after))
        if not pairs:
            return None
        if any("blocks" not in stored for pair in pairs for stored in pair):
            mean = fmean(after["score"] - before["score"] for before, after in pairs)
            return Difference(mean, None, None, len(pairs), verdict="")
        return difference(np.array([_blocks(after) - _blocks(before) for before, after in pairs]))

    def compare_all(self, recipes: Iterable[str], variant: str, baseline: str) -> dict[tuple[str, str], Difference]:
        """All differences of a table, by recipe and score, with their verdicts."""
        differences = {}
        for recipe in recipes:
            for score in self.shown_scores():
                if recipe != baseline and (compared := self.compare(score, recipe, variant, baseline)):
                    differences[recipe, score] = compared
        return with_verdicts(differences, {key: self.lower_is_better(key[1]) for key in differences})

    @property
    def has_untested(self) -> bool:
        """Whether the differences of a score in the tables have no intervals."""
        return any("blocks" not in stored for name in self.shown_scores() for stored in self.scores[name].values())

    def lower_is_better(self, score: str) -> bool:
        """Whether a score is an error."""
        return bool(next(iter(self.scores[score].values()))["lower_is_better"])


def _blocks(score: Mapping[str, Any]) -> NDArray[np.float64]:
    """The values of a stored score in its blocks of items."""
    return np.array(score["blocks"].split(), float)


_ByCell = dict[tuple[str, int], Mapping[str, Any]]


def _read_training(folder: Path) -> tuple[_ByCell, _ByCell]:
    """Facts of the training runs, and the curves of the chosen weights, by recipe and seed."""
    training: _ByCell = {}
    alphas: _ByCell = {}
    for path in sorted(folder.glob("*/seed*/train.json")):
        if (facts := read_part(path)) is None:
            continue
        cell = path.parent.parent.name, int(path.parent.name.removeprefix("seed"))
        training[cell] = facts
        chosen = read_part(path.with_name("alpha.json"))
        if chosen is not None and chosen["settings"]["vector"] == facts["vector"]:
            alphas[cell] = chosen["curve"]
    return training, alphas


def _read_results(
    folder: Path, training: _ByCell, alphas: _ByCell
) -> Iterator[tuple[tuple[str, str, int], Mapping[str, Any]]]:
    """Files with results of these weights, or of the starter: recipe, variant and seed, and the content."""
    for path in sorted(folder.glob("*/seed*/*/*.json")):
        if (content := read_part(path)) is None:
            continue
        recipe, seed, variant, _ = path.relative_to(folder).parts
        cell = recipe, int(seed.removeprefix("seed"))
        settings = content["settings"]
        if settings["vector"] != training.get(cell, {}).get("vector"):
            continue
        if variant == "merged" and settings.get("alpha") != alphas.get(cell, {}).get("alpha"):
            continue
        yield (recipe, variant, cell[1]), content
    for path in sorted(folder.glob(f"{STARTER}/*/*.json")):
        if (content := read_part(path)) is not None:
            yield (STARTER, "", -1), content


# ----------------------------------------------------------------------------------------------------------------- page


def main_tables(stored: Stored, recipes: Sequence[str], plot: str | None) -> str:
    """The differences from the starter in a setting, as Markdown."""
    trained = [recipe for recipe in recipes if stored.seeds(recipe)]
    if not trained or not stored.scores:
        return EMPTY
    facts = max(stored.training.values(), key=lambda facts: facts["steps"])
    caption = (
        f"{facts['steps']} steps of {facts['batch_size']} pairs; {'; '.join(stored.hardware)}. Differences in points with "
        "95 % intervals over seeds and items together. A verdict is *better* or *worse* after Holm's correction over the "
        "table, and *tie* otherwise. ↓: lower is better."
    )
    if stored.has_untested:
        caption += f" {UNTESTED}"
    lines = [caption]
    if plot:
        lines += ["", f"![Gain and cost of each recipe]({plot})"]
    lines += _baseline_tables(stored, trained, STARTER, "the starter, with or without its prompt")
    return "\n".join(lines)


def further_tables(stored: Stored, recipes: Sequence[str], claims: Sequence[Mapping[str, str]]) -> str:
    """The other results of a setting, as Markdown. ``claims`` are orders that papers report."""
    trained = [recipe for recipe in recipes if stored.seeds(recipe)]
    if not trained or not stored.scores:
        return EMPTY
    lines = _baseline_tables(stored, trained, REFERENCE, f"`{REFERENCE}`")
    if stored.alphas:
        lines += ["", "### Choice of alpha on dev data", "", *_alpha_table(stored, trained)]
    variants = {variant for scores in stored.scores.values() for _, variant, _ in scores}
    if "raw" in variants and claims:
        lines += ["", "### Orders that papers report", "", *_claim_table(stored, claims)]
    if any(name.startswith(TATOEBA_GROUP) for name in stored.scores):
        lines += ["", "### Groups of languages of Tatoeba", "", *_group_table(stored, trained)]
    return "\n".join([*lines, "", "### Computation", "", *_cost_table(stored, trained)]).strip()


def _baseline_tables(stored: Stored, recipes: Sequence[str], baseline: str, baseline_words: str) -> list[str]:
    """The differences of each variant from a baseline: gains, then costs, with a row for each recipe."""
    lines = []
    for variant, words in VARIANTS.items():
        differences = stored.compare_all(recipes, variant, baseline)
        if differences:
            lines += ["", f"### {words}, against {baseline_words}"]
            lines += _difference_table(recipes, differences, GAINS) + _difference_table(recipes, differences, COSTS)
    return lines


def _difference_table(
    recipes: Sequence[str], differences: Mapping[tuple[str, str], Difference], headings: Mapping[str, str]
) -> list[str]:
    """The differences in some scores, with a column for each score that was measured; empty if none was."""
    measured = {score for _, score in differences}
    columns = [score for score in headings if score in measured]
    if not columns:
        return []
    rows = []
    for recipe in recipes:
        cells = {score: differences[recipe, score] for score in columns if (recipe, score) in differences}
        if cells:
            seeds = [difference.seeds for difference in cells.values()]
            fewest, most = min(seeds), max(seeds)
            seed_range = str(most) if fewest == most else f"{fewest}–{most}"
            rows.append([f"`{recipe}`", seed_range, *(cells.get(score, "") for score in columns)])
    return ["", *markdown(["recipe", "seeds", *(headings[score] for score in columns)], "lrl", rows)]


def _alpha_table(stored: Stored, recipes: Sequence[str]) -> list[str]:
    """Gain and guards at the smallest alpha above 0 that was tried, means over the seeds, and the chosen alphas."""
    smallest = min(point["alpha"] for curve in stored.alphas.values() for point in curve["points"] if point["alpha"])
    rows, guards = [], []
    for recipe in recipes:
        curves = [curve for (name, _), curve in stored.alphas.items() if name == recipe]
        points = [point for curve in curves for point in curve["points"] if point["alpha"] == smallest]
        if points:
            guards = list(points[0]["guards"])
            gain = _mean_difference([point["gain"] for point in points])
            losses = [_mean_difference([point["guards"][guard] for point in points]) for guard in guards]
            rows.append([f"`{recipe}`", stored.chosen_alphas(recipe), gain, *losses])
    return [
        f"Differences from the starter at alpha {smallest:g}, the smallest one above 0 that was tried: means over seeds, "
        "with the interval over items if there is one seed.",
        "",
        *markdown(["recipe", "chosen alpha", "translations", *guards], "lr", rows),
    ]


def _mean_difference(differences: Sequence[Mapping[str, Any]]) -> str:
    """The mean of differences over seeds, or a single one with its interval."""
    text = f"{fmean(difference['difference'] for difference in differences):+z.1f}"
    if len(differences) == 1:
        low, high = differences[0]["interval"]
        text += f" [{low:+z.1f}, {high:+z.1f}]"
    return text


def _cost_table(stored: Stored, recipes: Sequence[str]) -> list[str]:
    """What the training of each recipe costs; columns without values are omitted."""
    rows = []
    for recipe in recipes:
        training = [stored.training[recipe, seed] for seed in stored.seeds(recipe)]
        seconds, reference = (stored.step_seconds.get(name) for name in (recipe, REFERENCE))
        rows.append(
            {
                "recipe": f"`{recipe}`",
                "seeds": str(len(training)),
                "seconds per step": f"{seconds:.2f}" if seconds else "",
                f"time ÷ `{REFERENCE}`": f"{seconds / reference:.1f} ×" if seconds and reference else "",
                "encoder calls per step": f"{fmean(facts['encoder_calls'] for facts in training):.1f}",
                "tokens per step": f"{fmean(facts['tokens'] for facts in training):,.0f}",
                "alpha": stored.chosen_alphas(recipe),
            }
        )
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    lines = [f"Step times: {stored.timed_on}, nothing else running.", ""] if stored.timed_on else []
    return lines + markdown(columns, "lr", [[row[column] for column in columns] for row in rows])


def _group_table(stored: Stored, recipes: Sequence[str]) -> list[str]:
    """Accuracies of the groups of languages of Tatoeba, means over the seeds."""
    groups = [name.removeprefix(TATOEBA_GROUP) for name in stored.scores if name.startswith(TATOEBA_GROUP)]
    groups.sort(key=int, reverse=True)
    rows = []
    for recipe in (STARTER, *recipes):
        for variant in ("", *VARIANTS):
            accuracies = [stored.values(TATOEBA_GROUP + group, recipe, variant) for group in groups]
            if any(accuracies):
                cells = [f"{fmean(values):.1f}" if values else "" for values in accuracies]
                rows.append([f"`{recipe}`", VARIANTS.get(variant, "").lower(), *cells])
    return markdown(["recipe", "", *(f"the {group}" for group in groups)], "llr", rows)


def _claim_table(stored: Stored, claims: Sequence[Mapping[str, str]]) -> list[str]:
    """Compare the order of two encoders with that in a paper; Holm's correction is over the claims."""
    differences = {}
    for number, claim in enumerate(claims):
        if compared := stored.compare(claim["score"], claim["better"], "raw", claim["than"]):
            differences[number] = compared
    lower_is_better = {number: stored.lower_is_better(claims[number]["score"]) for number in differences}
    outcomes = {"better": "confirmed", "worse": "reversed", "tie": "a tie", "": "no interval"}
    rows = []
    for number, difference in with_verdicts(differences, lower_is_better).items():
        claim = claims[number]
        order = f"`{claim['better']}` above `{claim['than']}`"
        outcome = outcomes[difference.verdict]
        rows.append([claim["paper"], claim["score"], order, difference.words, difference.seeds, outcome])
    lines = []
    if rows:
        lines += markdown(["paper", "score", "order in the paper", "here, as trained", "seeds", ""], "llllrl", rows)
    unmeasured = [claim for number, claim in enumerate(claims) if number not in differences]
    if unmeasured:
        claimed = (
            f"{claim['paper']} ({claim['score']}: `{claim['better']}` above `{claim['than']}`)" for claim in unmeasured
        )
        lines += ["", f"Not measured: {'; '.join(claimed)}."]
    return lines


def draw(stored: Stored, recipes: Sequence[str], path: Path) -> Path | None:
    """Plot gain against cost, a point for each recipe and variant; None if nothing has both."""
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.axvline(0, color="0.7", linewidth=0.8)
    drawn = False
    for number, recipe in enumerate(recipes):
        colour = matplotlib.colormaps["tab20"](number % 20)
        points = []
        for variant in VARIANTS:
            gain = stored.compare(GAIN_AXIS, recipe, variant, STARTER)
            cost = stored.compare(COST_AXIS, recipe, variant, STARTER)
            if gain is None or cost is None:
                continue
            points.append((cost.mean, gain.mean))
            axes.errorbar(
                cost.mean,
                gain.mean,
                xerr=_error_bar(cost),
                yerr=_error_bar(gain),
                fmt={"raw": "o", "merged": "s", "released": "*"}[variant],
                color=colour,
                mfc="white" if variant == "raw" else colour,
                linewidth=0.7,
            )
        if points:
            drawn = True
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, label=recipe)
            axes.annotate(recipe, points[0], textcoords="offset points", xytext=(5, 4), fontsize=7, color="0.2")
    if not drawn:
        return None
    axes.set(
        xlabel=f"{HEADINGS[COST_AXIS]}, difference to the starter",
        ylabel=f"{HEADINGS[GAIN_AXIS]}, difference to the starter",
    )
    axes.set_title("Circles: as trained; squares: merged; star: merged and debiased", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _error_bar(difference: Difference) -> list[list[float]]:
    """Lengths of the interval below and above the mean, as `Axes.errorbar` takes them."""
    low, high = difference.interval or (difference.mean, difference.mean)
    return [[difference.mean - low], [high - difference.mean]]


def write_page(results: Path, page: Path, config: Path = CONFIG) -> None:
    """Write the tables and the plot of every setting between the markers of a page, each under its own heading.

    If there is a page with the same name and ``-tables``, it receives all tables except the differences from the starter. It
    also receives the latter for the settings in ``replications`` of the configuration.
    """
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    further_page = page.with_stem(f"{page.stem}-tables")
    recipes = list(content["recipes"])
    sections: dict[Path, list[str]] = {page: [], further_page: []}
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        stored = Stored.read(folder)
        plot = draw(stored, recipes, page.parent / page.stem / f"{folder.name}.svg")
        main = main_tables(stored, recipes, plot and f"{page.stem}/{plot.name}")
        further = further_tables(stored, recipes, content.get("claims", ()))
        if not further_page.exists():
            sections[page].append(f"## {folder.name}\n\n{main}\n\n{further}")
        elif folder.name in content.get("replications", ()):
            sections[further_page].append(f"## {folder.name}\n\n{main}\n\n{further}")
        else:
            sections[page].append(f"## {folder.name}\n\n{main}")
            sections[further_page].append(f"## {folder.name}\n\n{further}")
    for path, sections_of_page in sections.items():
        if path.exists():
            fill(path, {"evidence": "\n\n".join(sections_of_page) or EMPTY})
