"""The page of scripts/evidence.py: differences with intervals over seeds and sentences, their tables and their plot.

A score is stored with its values in a hundred blocks of items: pseudo-values of the jackknife that leaves one block out,
whose mean is the score. All encoders have the same blocks, so that differences are paired, for means of items as well as for
correlations, error rates and F1. Intervals cover the variation between blocks and that between seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
from stored_results import fill, markdown
from update_tables import hardware_words

from metaphrase.evaluation.measures import Measure
from metaphrase.evaluation.result import Result, complete_groups
from metaphrase.evaluation.retrieval import TATOEBA_GROUPS
from metaphrase.evaluation.sib200 import language_groups
from metaphrase.evaluation.significance import CONFIDENCE, holm, verdict
from metaphrase.io.work_folders import read_part

#: The recipes and the papers' claims.
CONFIG = Path(__file__).parents[1] / "configs" / "evidence.yaml"
#: Most blocks of items.
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
#: Names of the encoders of a cell, in words.
VARIANTS = {"raw": "As trained", "merged": "Merged", "released": "Merged and debiased"}
#: Groups of the languages of SIB-200 that are kept.
RESOURCES = ("trained", "in XLM-R", "not in XLM-R")
#: Axes of the plot: gain and cost.
AXES = ("tatoeba", "stsb")
STARTER, REFERENCE = "starter", "tr"
#: Start of the names of scores of a group of languages of Tatoeba.
GROUP = "tatoeba, the "
#: File of the time of a step of each recipe.
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

    def mean(chosen: Iterable[Any]) -> float:
        return fmean(measure.score(one) for one in chosen)

    blocks = min([BLOCKS, *map(_size, items.values())])
    numbers = {
        language: np.arange(_size(one)) if ids is None else np.array(ids[language]) for language, one in items.items()
    }
    score = mean(items.values())
    left_b = np.array([mean(_without(items[one], b, numbers[one] % blocks) for one in items) for b in range(blocks)])
    value_b = blocks * score - (blocks - 1) * left_b
    return value_b - value_b.mean() + score


def _size(items: Any) -> int:
    """Number of items of a language, as `Measure.items` returns them."""
    if isinstance(items, np.ndarray):
        return len(items)
    first, _ = items
    return first if isinstance(first, int) else len(first)


def _without(items: Any, block: int, block_n: NDArray[np.int64]) -> Any:
    """The items of a language outside a block; ``block_n`` has the block of each."""
    if not isinstance(items, np.ndarray) and isinstance(items[1], Mapping):  # counts by sentence, of mined pairs
        count, outcomes = items
        blocks = block_n.max() + 1
        return count, {name: one for name, one in outcomes.items() if crc32(name.encode()) % blocks != block}
    kept = block_n != block
    return items[kept] if isinstance(items, np.ndarray) else tuple(np.asarray(side)[kept] for side in items)


@dataclass(frozen=True)
class Difference:
    """A difference between two encoders: mean over the shared seeds in points, with a 95 % interval over seeds and items.

    The verdict is that after Holm's correction over a table, the p-value that before it. A score without blocks of items has
    neither.
    """

    mean: float
    interval: tuple[float, float] | None
    p_value: float | None
    seeds: int
    verdict: str = "tie"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.words, self.verdict)))

    @property
    def words(self) -> str:
        """The difference with its interval."""
        mean, *ends = (round(value, 6) + 0.0 for value in (self.mean, *(self.interval or ())))  # -0.0 is below zero
        return f"{mean:+.1f}" + (f" [{ends[0]:+.1f}, {ends[1]:+.1f}]" if ends else "")


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
    means = [means for means in (value_sb.mean(0), value_sb.mean(1)) if len(means) > 1]
    parts = [(float(each.var(ddof=1)) / len(each), len(each) - 1) for each in means]
    if not (variance := sum(part for part, _ in parts)):
        return Difference(mean, (mean, mean), float(mean == 0), len(value_sb))
    freedom = variance**2 / sum(part**2 / own for part, own in parts)
    error = variance**0.5
    half = float(student.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p_value = 2 * float(student.sf(abs(mean) / error, freedom))
    return Difference(mean, (mean - half, mean + half), p_value, len(value_sb))


def judged(found: Mapping[Any, Difference], lower_is_better: Mapping[Any, bool]) -> dict[Any, Difference]:
    """Verdicts after Holm's correction over all differences of a table that have intervals."""
    adjusted = holm({key: one.p_value for key, one in found.items() if one.p_value is not None})
    signs = {key: -1 if lower_is_better[key] else 1 for key in found}
    verdicts = {key: verdict(signs[key] * found[key].mean, adjusted[key]) for key in adjusted}
    return {key: replace(one, verdict=verdicts.get(key, "")) for key, one in found.items()}


# -------------------------------------------------------------------------------------------------------------- storage


def stored_scores(scores: Mapping[str, Any], trained: Sequence[str]) -> dict[str, Any]:
    """The stored part of the results of a benchmark: each score, and those of groups of languages, with their blocks.

    ``scores`` are results by name, as `Result.to_dict` returns them; those without items are omitted. Blocks hold
    translations of the same items; those of Tatoeba hold rows, as few of its sentences are translated into two languages.
    """
    kept: dict[str, Any] = {}
    for name, content in scores.items():
        if content["statistic"] is None:
            continue
        result = Result.from_dict(content)
        measure = result.statistic_measure()
        items = {language: result.items(language) for language in result.languages}
        ids = None if name.startswith(AXES[0]) else result.item_ids()
        if ids and len(set(map(tuple, ids.values()))) == 1:
            ids = None  # rows with the same number are translations of each other
        resources = language_groups(list(items), trained)
        groups = TATOEBA_GROUPS | {group: resources[group] for group in RESOURCES if group in resources}
        members = {name: list(items)} | {
            f"{name}, {'the ' * group.isdigit()}{group}": members
            for group, members in complete_groups(groups, items).items()
            if group in result.groups
        }
        for title, languages in members.items():
            value_b = block_values(measure, {language: items[language] for language in languages}, ids)
            kept[title] = {
                "score": round(float(value_b.mean()), 4),
                "lower_is_better": result.lower_is_better,
                "languages": len(languages),
                "items": sum(_size(items[language]) for language in languages),
                "blocks": " ".join(f"{value:.2f}" for value in value_b),
            }
    return kept


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
        training, alphas, scores, machines = {}, {}, {}, set()
        for path in sorted(folder.glob("*/seed*/train.json")):
            cell = path.parent.parent.name, int(path.parent.name.removeprefix("seed"))
            if (content := read_part(path)) is None:
                continue
            training[cell] = content
            machines.add(machine(content))
            chosen = read_part(path.with_name("alpha.json"))
            if chosen is not None and chosen["settings"]["vector"] == content["vector"]:
                alphas[cell] = chosen["curve"]
        for path in sorted((*folder.glob("*/seed*/*/*.json"), *folder.glob(f"{STARTER}/*/*.json"))):
            if (content := read_part(path)) is None:
                continue
            recipe, *seed = path.parent.parent.relative_to(folder).parts
            cell = recipe, int(seed[0].removeprefix("seed")) if seed else -1
            if seed and content["settings"]["vector"] != training.get(cell, {}).get("vector"):
                continue
            if path.parent.name == "merged" and content["settings"].get("alpha") != alphas.get(cell, {}).get("alpha"):
                continue
            machines.add(machine(content))
            where = [content["settings"].get(key) for key in ("benchmark", "data", "revision")]
            for name, score in content["scores"].items():
                score["where"] = where
                own = scores.setdefault(name, {})
                key = recipe, path.parent.name if seed else "", cell[1]
                sign = -1 if score["lower_is_better"] else 1
                if key not in own or sign * score["score"] > sign * own[key]["score"]:
                    own[key] = score
        timed = read_part(folder / STEP_TIMES) or {"seconds": {}}
        timed_on = machine(timed) if timed["seconds"] else ""
        return cls(folder, training, alphas, scores, sorted(machines), timed["seconds"], timed_on)

    def seeds(self, recipe: str) -> list[int]:
        """Seeds with which a recipe was trained."""
        return sorted(seed for name, seed in self.training if name == recipe)

    def compared(self, score: str, recipe: str, variant: str, other: str) -> Difference | None:
        """The difference between a recipe and another one, or the starter, in the same variant; None if not measured."""
        own = self.scores.get(score, {})
        pairs = []
        for seed in self.seeds(recipe):
            sides = (own.get((recipe, variant, seed)), own.get((other, variant, seed)))
            after, before = sides if other != STARTER else (sides[0], own.get((STARTER, "", -1)))
            if after and before and after["where"] == before["where"]:
                pairs.append((after, before))
        if not pairs:
            return None
        if any("blocks" not in side for pair in pairs for side in pair):
            mean = fmean(after["score"] - before["score"] for after, before in pairs)
            return Difference(mean, None, None, len(pairs), verdict="")
        rows = [np.subtract(*(np.array(side["blocks"].split(), float) for side in pair)) for pair in pairs]
        return difference(np.array(rows))

    def differences(
        self, recipes: Iterable[str], variant: str, other: str, scores: Iterable[str]
    ) -> dict[tuple[str, str], Difference]:
        """All differences of a table, by recipe and score, with their verdicts."""
        wanted = [(recipe, score) for recipe in recipes for score in scores if recipe != other]
        found = {key: one for key in wanted if (one := self.compared(key[1], key[0], variant, other))}
        return judged(found, {key: self.lower_is_better(key[1]) for key in found})

    @property
    def has_untested(self) -> bool:
        """Whether the differences of a score in the tables have no intervals."""
        shown = chain.from_iterable(self.scores[name].values() for name in {**GAINS, **COSTS} if name in self.scores)
        return any("blocks" not in one for one in shown)

    def lower_is_better(self, score: str) -> bool:
        """Whether a score is an error."""
        return bool(next(iter(self.scores[score].values()))["lower_is_better"])


def machine(content: Mapping[str, Any]) -> str:
    """The hardware of a stage, in words."""
    return content["hardware"].get("gpu") or hardware_words(content["hardware"])


# ----------------------------------------------------------------------------------------------------------------- page


def main_tables(stored: Stored, recipes: Sequence[str], plot: str | None) -> str:
    """The differences from the starter in a setting, as Markdown."""
    trained = [recipe for recipe in recipes if stored.seeds(recipe)]
    if not trained or not stored.scores:
        return EMPTY
    facts = max(stored.training.values(), key=lambda one: one["steps"])
    lines = [
        f"{facts['steps']} steps of {facts['batch_size']} pairs; {'; '.join(stored.hardware)}. Differences in points with "
        "95 % intervals over seeds and items together. A verdict is *better* or *worse* after Holm's correction over the "
        "table, and *tie* otherwise. ↓: lower is better." + f" {UNTESTED}" * stored.has_untested,
    ]
    if plot:
        lines += ["", f"![Gain and cost of each recipe]({plot})"]
    lines += _against(STARTER, "the starter, with or without its prompt", stored, trained)
    return "\n".join(lines)


def further_tables(stored: Stored, recipes: Sequence[str], claims: Sequence[Mapping[str, str]]) -> str:
    """The other results of a setting, as Markdown. ``claims`` are orders that papers report."""
    trained = [recipe for recipe in recipes if stored.seeds(recipe)]
    if not trained or not stored.scores:
        return EMPTY
    lines = _against(REFERENCE, f"`{REFERENCE}`", stored, trained)
    if stored.alphas:
        lines += ["", "### Choice of alpha on dev data", "", *_alpha_table(stored, trained)]
    if any(variant == "raw" for own in stored.scores.values() for _, variant, _ in own) and claims:
        lines += ["", "### Orders that papers report", "", *_claim_table(stored, claims)]
    if any(name.startswith(GROUP) for name in stored.scores):
        lines += ["", "### Groups of languages of Tatoeba", "", *_group_table(stored, trained)]
    return "\n".join([*lines, "", "### Computation", "", *_cost_table(stored, trained)]).strip()


def _against(other: str, name: str, stored: Stored, trained: Sequence[str]) -> list[str]:
    """The differences of each variant to a baseline."""
    lines = []
    scores = [score for score in {**GAINS, **COSTS} if score in stored.scores]
    for variant, words in VARIANTS.items():
        if table := stored.differences(trained, variant, other, scores):
            lines += ["", f"### {words}, against {name}", *_difference_tables(trained, table)]
    return lines


def _alpha_table(stored: Stored, recipes: Sequence[str]) -> Iterator[str]:
    """Gain and guards at the smallest alpha above 0 that was tried, means over the seeds, and the chosen alphas."""
    first = min(point["alpha"] for curve in stored.alphas.values() for point in curve["points"] if point["alpha"])
    yield from (
        f"Differences from the starter at alpha {first:g}, the smallest one above 0 that was tried: means over seeds, with "
        "the interval over items if there is one seed.",
        "",
    )
    rows, names = [], []
    for recipe in recipes:
        curves = [curve for (name, _), curve in stored.alphas.items() if name == recipe]
        points = [point for curve in curves for point in curve["points"] if point["alpha"] == first]
        if points:
            names = list(points[0]["guards"])
            cells = [[point["gain"], *point["guards"].values()] for point in points]
            chosen = ", ".join(f"{curve['alpha']:g}" for curve in curves)
            rows.append([f"`{recipe}`", chosen, *map(_mean_difference, zip(*cells, strict=True))])
    yield from markdown(["recipe", "chosen alpha", "translations", *names], "lr", rows)


def _mean_difference(found: Sequence[Mapping[str, Any]]) -> str:
    """The mean of some differences, or a single one with its interval."""
    interval = " [{:+z.1f}, {:+z.1f}]".format(*found[0]["interval"]) if len(found) == 1 else ""
    return f"{fmean(one['difference'] for one in found):+z.1f}{interval}"


def _cost_table(stored: Stored, recipes: Sequence[str]) -> Iterator[str]:
    if stored.timed_on:
        yield from (f"Step times: {stored.timed_on}, nothing else running.", "")
    names = ("recipe", "seeds", "seconds per step", "time ÷ `tr`")
    names += ("encoder calls per step", "tokens per step", "alpha")
    rows = []
    for recipe in recipes:
        alphas = [curve["alpha"] for (name, _), curve in stored.alphas.items() if name == recipe]
        calls, tokens = (
            fmean(stored.training[recipe, seed][fact] for seed in stored.seeds(recipe))
            for fact in ("encoder_calls", "tokens")
        )
        seconds = f"{stored.step_seconds[recipe]:.2f}" if recipe in stored.step_seconds else ""
        row = [f"`{recipe}`", str(len(stored.seeds(recipe))), seconds, _times(stored, recipe), f"{calls:.1f}"]
        rows.append([*row, f"{tokens:,.0f}", ", ".join(f"{alpha:g}" for alpha in alphas)])
    columns = [at for at in range(len(names)) if any(row[at] for row in rows)]
    yield from markdown([names[at] for at in columns], "lr", [[row[at] for at in columns] for row in rows])


def _times(stored: Stored, recipe: str) -> str:
    """Time of a step in multiples of that of `tr`, if both were measured."""
    if not {recipe, REFERENCE} <= stored.step_seconds.keys():
        return ""
    return f"{stored.step_seconds[recipe] / stored.step_seconds[REFERENCE]:.1f} ×"


def _difference_tables(recipes: Sequence[str], table: Mapping[tuple[str, str], Difference]) -> Iterator[str]:
    """Gains, then costs, one row for each recipe."""
    for part in (GAINS, COSTS):
        columns = [score for score in part if any(score == found for _, found in table)]
        if not columns:
            continue
        rows = []
        for recipe in recipes:
            found = [table.get((recipe, score)) for score in columns]
            if any(found):
                counts = sorted({one.seeds for one in found if one})
                seeds = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
                rows.append([f"`{recipe}`", seeds, *(one or "" for one in found)])
        yield from ("", *markdown(["recipe", "seeds", *(part[score] for score in columns)], "lrl", rows))


def _group_table(stored: Stored, recipes: Sequence[str]) -> list[str]:
    """Accuracies of the groups of languages, means over the seeds."""
    groups = [name for name in stored.scores if name.startswith(GROUP)]
    groups.sort(key=lambda name: -int(name.rpartition(" ")[2]))
    rows = []
    for recipe in (STARTER, *recipes):
        for variant in ("", *VARIANTS):
            cells = []
            for group in groups:
                values = [one["score"] for (*key, _), one in stored.scores[group].items() if key == [recipe, variant]]
                cells.append(f"{fmean(values):.1f}" if values else "")
            if any(cells):
                rows.append([f"`{recipe}`", VARIANTS.get(variant, "").lower(), *cells])
    return markdown(["recipe", "", *(f"the {name.removeprefix(GROUP)}" for name in groups)], "llr", rows)


def _claim_table(stored: Stored, claims: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Compare the order of two encoders with that in a paper; Holm's correction is over the claims."""
    found = {}
    for number, claim in enumerate(claims):
        if one := stored.compared(claim["score"], claim["better"], "raw", claim["than"]):
            found[number] = one
    verdicts = judged(found, {number: stored.lower_is_better(claims[number]["score"]) for number in found})
    words = {"better": "confirmed", "worse": "reversed", "tie": "a tie"}
    rows = []
    for number, one in verdicts.items():
        claim = claims[number]
        order = f"`{claim['better']}` above `{claim['than']}`"
        rows.append(
            [claim["paper"], claim["score"], order, one.words, one.seeds, words.get(one.verdict, "no interval")]
        )
    if rows:
        yield from markdown(["paper", "score", "order in the paper", "here, as trained", "seeds", ""], "llllrl", rows)
    if missing := [claim for number, claim in enumerate(claims) if number not in verdicts]:
        listed = "; ".join(
            f"{one['paper']} ({one['score']}: `{one['better']}` above `{one['than']}`)" for one in missing
        )
        yield from ("", f"Not measured: {listed}.")


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
            gain, cost = (stored.compared(score, recipe, variant, STARTER) for score in AXES)
            if gain is None or cost is None:
                continue
            points.append((cost.mean, gain.mean))
            errors = [[[abs(end - one.mean)] for end in one.interval or [one.mean] * 2] for one in (cost, gain)]
            axes.errorbar(
                *points[-1],
                xerr=errors[0],
                yerr=errors[1],
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
    headings = {**GAINS, **COSTS}
    axes.set(
        xlabel=f"{headings[AXES[1]]}, difference to the starter",
        ylabel=f"{headings[AXES[0]]}, difference to the starter",
    )
    axes.set_title("Circles: as trained; squares: merged; star: merged and debiased", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def write_page(results: Path, page: Path, config: Path = CONFIG) -> None:
    """Write the tables and the plot of every setting between the markers of a page, each under its own heading.

    If there is a page with the same name and ``-tables``, it receives all tables but the differences from the starter, and
    those too of the settings in ``replications`` of the configuration.
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
    for path, own in sections.items():
        if path.exists():
            fill(path, {"evidence": "\n\n".join(own) or EMPTY})
