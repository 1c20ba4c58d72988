"""Compare training runs with each other or with the encoder before training; seeds of one configuration are pooled."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.seeds import difference, interval
from metaphrase.exceptions import DataError, DataMismatchError, MissingFileError, UsageError
from metaphrase.io.files import read_json
from metaphrase.publishing.plots import Chart, draw_differences, save_picture

#: Baseline: the encoder that the runs started from.
BEFORE = "before"
#: Settings of a run that do not distinguish configurations, or of which the report has facts.
_NOT_DISTINGUISHING = {"seed", "output_dir", "resume_from_checkpoint", "recipe", "model", "corpus", "test"}


@dataclass(frozen=True)
class Run:
    """A finished run, as its ``report.json`` describes it; results are by test set.

    ``configuration`` is what runs of different seeds have in common.
    """

    folder: Path
    seed: int
    recipe: str
    model: str
    configuration: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """Read the report of a run."""
        path = Path(folder) / "report.json"
        if not path.is_file():
            raise MissingFileError(
                f"{folder} has no report.json. Pass folders that `metaphrase adapt`, `train --test` or `demo` wrote."
            )
        try:
            report = read_json(path)
            facts = report["run"]
            known = int(facts["seed"]), str(facts["recipe"]["name"]), str(facts["model"]), _configuration(facts)
            return cls(Path(folder), *known, report["before"] or {}, report["after"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged. Delete it, run `metaphrase report {shlex.quote(str(folder))} --data TEST_SETS`, and "
                f"compare {Path(folder) / 'report'} in its place."
            ) from error


def _configuration(facts: Mapping[str, Any]) -> str:
    common = [facts["recipe"], facts.get("objective_code", {})]
    common += [facts.get(name) for name in ("model", "steps", "batch_size")]
    files = [file["sha256"] or [file.get("path"), file.get("revision")] for file in facts["files"]]
    settings = facts["settings"].items()
    return json.dumps(
        [common, files, {name: value for name, value in settings if name not in _NOT_DISTINGUISHING}],
        sort_keys=True,
    )


def compare_runs(folders: Sequence[str | Path], *, baseline: str = BEFORE) -> list[dict[str, Any]]:
    """Compare runs with a baseline on every test set.

    Args:
        folders: Output folders of the runs. Runs that differ only in their seed are pooled.
        baseline: ``"before"``, the encoder that each run started from, or one of the folders: the runs of its
            configuration are the baseline, paired with the others by seed.

    Returns:
        A row for each configuration and test set: ``configuration``, ``test``, ``seeds``, ``languages``, ``n`` (items of all
        languages), ``before`` and ``after`` (means over the seeds), ``difference``, ``interval`` and ``verdict``. The
        interval covers the test items (paired bootstrap) and, for several seeds, the seeds (Student's t). It is not corrected
        for the number of rows.

    Raises:
        UsageError: The baseline is not one of the runs, lacks a seed or has the configuration of all; or two runs differ in
            nothing.
        MissingFileError: A folder has no report.
        DataError: A report is damaged, or lacks the settings of its run.
        DataMismatchError: Runs were measured on different test sets, or seeds of one configuration have other baselines.
    """
    runs = [Run.read(folder) for folder in dict.fromkeys(map(Path, folders))]
    distinct: dict[tuple[str, int], Run] = {}
    for run in runs:
        same = distinct.setdefault((run.configuration, run.seed), run)
        if same is not run:
            raise UsageError(
                f"{same.folder} and {run.folder} have the same configuration and the seed {run.seed}, so they are "
                "not independent. Pass one of them, or train with another seed."
            )
    base = _baseline(runs, baseline)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if base is None or run.configuration != base.configuration:
            groups.setdefault(run.configuration, []).append(run)
    if not groups:
        raise UsageError("All runs have the configuration of the baseline. Pass runs of another configuration.")
    recipes = [group[0].recipe for group in groups.values()]
    rows = []
    for recipe, group in zip(recipes, groups.values(), strict=True):
        label = recipe if recipes.count(recipe) == 1 else str(group[0].folder)
        pairs = [(_reference(run, distinct, base), run.after) for run in group]
        names = {str(one.get("model")) for before, _ in pairs for one in before.values()}
        if base is None and len(names) > 1:
            raise DataMismatchError(
                f"The reports of {', '.join(str(run.folder) for run in group)} have different baselines: "
                f"{', '.join(sorted(names))}. Repeat `metaphrase report` with the same --baseline."
            )
        for test in dict.fromkeys(test for _, after in pairs for test in after):
            if any(test not in side for pair in pairs for side in pair):
                raise DataMismatchError(f"Not all runs were measured on {test}. Pass the same --test folders to each.")
            seeds = sorted(run.seed for run in group)
            rows.append(
                {"configuration": label, "test": test, "seeds": seeds} | _row([(a[test], b[test]) for a, b in pairs])
            )
    return rows


def _baseline(runs: Sequence[Run], baseline: str) -> Run | None:
    if baseline == BEFORE or all(run.model == baseline for run in runs):
        return None
    for run in runs:
        if run.folder.resolve() == Path(baseline).resolve():
            return run
    raise UsageError(
        f"--baseline is 'before', the encoder that all runs started from, or one of the runs, not {baseline!r}. The runs "
        f"are {', '.join(str(run.folder) for run in runs)}."
    )


def _reference(run: Run, runs: Mapping[tuple[str, int], Run], base: Run | None) -> Mapping[str, Any]:
    """The results that a run is compared with: its own before training, or those of the baseline's run with its seed."""
    if base is None:
        return run.before
    if (other := runs.get((base.configuration, run.seed))) is None:
        raise UsageError(
            f"The baseline {base.folder} has no run with seed {run.seed}, but {run.folder} has. Train that run too."
        )
    return other.after


def _row(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """A configuration on a test set, from the results before and after of each seed."""
    pooled = [compare(before, after)["pooled"] for before, after in pairs]
    old, new = ([one[side] for one in pooled] for side in ("before", "after"))
    moved: dict[str, Any] = {"mean": pooled[0]["difference"], "verdict": pooled[0]["verdict"]}
    ends = list(pooled[0]["interval"])
    if len(pooled) > 1:
        sampling = max((one["interval"][1] - one["interval"][0]) / 2 for one in pooled)
        moved = difference(old, new, sampling)
        ends = [moved["mean"] - moved["half"], moved["mean"] + moved["half"]]
    return {
        **{key: value for key, value in pooled[0].items() if key in ("languages", "n", "clusters", "runs")},
        "before": interval(old)["mean"],
        "after": interval(new)["mean"],
        "difference": moved["mean"],
        "interval": ends,
        "verdict": moved["verdict"],
    }


def save_plot(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the differences with their intervals, a panel for each test set; the suffix decides the format."""
    return save_picture(Chart("Differences of runs, with 95 % intervals", partial(_draw, rows=rows)), path)


def _draw(figure: Figure, *, rows: Sequence[Mapping[str, Any]]) -> None:
    tests = list(dict.fromkeys(row["test"] for row in rows))
    figure.set_size_inches(2 + 3.2 * len(tests), 1.4 + 0.3 * max(1, len(rows) // len(tests)))
    for panel, test in zip(np.atleast_1d(figure.subplots(1, len(tests), sharey=True)), tests, strict=True):
        changes = [{**row, "language": row["configuration"]} for row in rows if row["test"] == test]
        draw_differences(panel, changes)
        panel.axvline(0, lw=0.8, zorder=0)
        panel.set(title=test, xlabel="difference in points")
        panel.set_yticks(range(len(changes)), [row["configuration"] for row in changes])
        panel.invert_yaxis()
