"""The baseline of an evaluation: the better of two prompts, results of an earlier evaluation, and the comparisons."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.suites.benchmarks import Benchmark, Note
from metaphrase.exceptions import DataError
from metaphrase.io.digests import files_sha256
from metaphrase.io.files import read_json
from metaphrase.io.work_folders import damage_in

#: What a protocol says about a sample.
_SAMPLE = re.compile(r"; sample: ([^;]*)")


def stronger(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best score of each name in some evaluations of one model, and what failed in any of them.

    Of equally good scores, the first counts. A part is that of the evaluation with its best scores. If the best scores are of
    several evaluations, ``settings`` has no prompt; each score has its own.
    """
    best = {name: (result, 0) for name, result in results[0]["scores"].items()}
    for number, other in enumerate(results[1:], 1):
        for name, result in other["scores"].items():
            gain = result["average"]["score"] - best.get(name, (result, 0))[0]["average"]["score"]
            if name not in best or (gain < 0 if result["lower_is_better"] else gain > 0):
                best[name] = result, number
    failed = {name: reason for one in results for name, reason in one["failed"].items()}
    parts = {}
    for name in dict.fromkeys(name for one in results for name in one["parts"]):
        measured = {number: one["parts"][name] for number, one in enumerate(results) if name in one["parts"]}
        parts[name] = _source(measured, {best[score][1] for part in measured.values() for score in part["scores"]})
    whole = _source(dict(enumerate(results)), {number for _, number in best.values()} or {0})
    return whole | {"scores": {name: result for name, (result, _) in best.items()}, "parts": parts, "failed": failed}


def _source(measured: Mapping[int, dict[str, Any]], chosen: Set[int]) -> dict[str, Any]:
    """The first of the chosen evaluations; the prompts of several are not its own."""
    first = measured[min(chosen)]
    settings = {key: value for key, value in first["settings"].items() if key != "prompt" or len(chosen) == 1}
    return first | {"settings": settings}


def read_results(path: str, suite: str, benchmarks: Sequence[Benchmark], note: Note) -> dict[str, Any]:
    """Read the JSON file of an earlier evaluation as a baseline. Damaged scores are skipped with a note."""
    with damage_in(path):
        results = read_json(path)
    if isinstance(results, dict) and "models" in results:
        raise DataError(
            f"{path} has the results of several encoders. Evaluate the baseline alone, or name the encoder."
        )
    if not isinstance(results, dict) or not all(isinstance(results.get(key), dict) for key in ("scores", "parts")):
        raise DataError(f"{path} is not a result of `metaphrase evaluate`: it needs the keys 'scores' and 'parts'.")
    if suite != results.get("suite") and "all" not in (suite, results.get("suite")):
        raise DataError(
            f"The baseline must be a result of the suite {suite}, but {path} is one of {results.get('suite')}. "
            "Evaluate the baseline with the same --suite."
        )
    names = [benchmark.name for benchmark in benchmarks]
    shared = results["parts"].keys() & set(names)
    if not shared:
        raise DataError(
            f"The baseline must have a result of {', '.join(names)}, but {path} has {', '.join(results['parts']) or 'none'}. "
            "Evaluate the baseline on the same data."
        )
    unlike = differences(results["parts"], benchmarks)
    if unlike.keys() >= shared:
        reasons = "; ".join(f"{name}, {reason}" for name, reason in unlike.items())
        raise DataError(
            f"No result of {path} can be compared: {reasons}. Evaluate the baseline with the same --suite and --data."
        )
    for name, damage in _damaged(results["scores"]).items():
        note(f"Not compared: {name}. {damage}")
        del results["scores"][name]
    return results


def _damaged(scores: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of the damage of scores, by name."""
    found = {}
    for name, score in scores.items():
        try:
            result = Result.from_dict(score)
            for language in result.languages if result.statistic is not None else ():
                result.items(language)
        except DataError as error:
            found[name] = str(error)
    return found


def differences(parts: Mapping[str, Any], benchmarks: Sequence[Benchmark]) -> dict[str, str]:
    """Why parts of an earlier evaluation cannot be compared with the benchmarks of their names.

    These are the differences that are known before a benchmark is measured: its sample and its files. An earlier evaluation
    of more languages has other files, and one of word alignment may have other links of peers: these are compared as far as
    possible, after the measurement.
    """
    found = {}
    for one in benchmarks:
        part = parts.get(one.name, {})
        samples = [_SAMPLE.search(protocol) for protocol in (part.get("protocol", one.protocol), one.protocol)]
        before, now = (sample[1] if sample else "all items" for sample in samples)
        files, own = part.get("data", {}).get("files"), [file.name for file in one.files]
        if before != now:
            found[one.name] = f"of which the baseline has {before}, and this evaluation {now}"
        elif files and own and set(files).isdisjoint(own):
            found[one.name] = f"whose baseline was measured on other files ({files[0]} instead of {own[0]})"
        elif one.suite != "word-alignment" and files == own and part["data"]["sha256"] != files_sha256(one.files):
            found[one.name] = "whose files have changed since the baseline was measured"
    return found


def other_precision(parts: Mapping[str, Any], benchmarks: Sequence[Benchmark], *, bf16: bool) -> list[str]:
    """The benchmarks whose parts of an earlier evaluation were measured in another precision."""
    settings = {one.name: parts.get(one.name, {}).get("settings", {}) for one in benchmarks}
    return [name for name, known in settings.items() if known.get("bf16", bf16) != bf16]


def compare_with(
    baseline: Mapping[str, Any],
    scores: Mapping[str, Mapping[str, Any]],
    unlike: Iterable[str],
    *,
    resamples: int,
    seed: int,
    note: Note,
) -> dict[str, Any]:
    """Compare the scores of an encoder with a baseline, except for its parts of the names in ``unlike``.

    Returns ``comparisons`` and ``baseline``, which lacks the scores that cannot be compared.
    """
    excluded = {score for part in unlike for score in baseline["parts"][part]["scores"]}
    before = {name: score for name, score in baseline["scores"].items() if name not in excluded}
    comparisons = compare_scores(before, scores, resamples=resamples, seed=seed, note=note)
    tested = {name for name, score in scores.items() if score["statistic"] is not None}
    kept = {name: score for name, score in before.items() if name in comparisons or name not in tested}
    return {"comparisons": comparisons, "baseline": {**baseline, "scores": kept}}


def compare_scores(
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    *,
    resamples: int,
    seed: int,
    note: Note = lambda item: None,
) -> dict[str, Any]:
    """Compare all results that two models share, by name.

    Results without items are skipped. Those over other items, with other settings or with damaged items are skipped with a
    note.
    """
    compared = {}
    for name, result in after.items():
        if name in before and result["statistic"] is not None:
            try:
                compared[name] = compare(before[name], result, resamples=resamples, seed=seed)
            except DataError as error:
                note(f"Not compared: {name}. {error}")
    return compared
