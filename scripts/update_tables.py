"""Write the tables of README.md, docs/ and the model cards from results files.

    python scripts/update_tables.py --demo runs/demo/report.json --swahili out/swahili/report.json
    python scripts/update_tables.py --suites runs/evaluation/results.json

An option stores the results of a run under ``scripts/results``; every call then rewrites the tables of all pages from the
stored results. Stored results are not replaced by results of fewer languages, scores or pairs: delete their file first. The
tables of docs/word_alignment.md come from the results of ``scripts/word_alignment.py``, the tables of docs/speed.md and
docs/scaling.md from the results of ``scripts/benchmarks/run.py`` and ``mining_scale.py`` there.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from stored_results import fill, markdown, reports_errors, write_results
from transformers import HfArgumentParser

from metaphrase.evaluation.compare import verdict_shown
from metaphrase.evaluation.distractors import KINDS
from metaphrase.evaluation.measures import DIRECTIONS
from metaphrase.evaluation.retrieval import TATOEBA_GROUPS
from metaphrase.io.configuration import option
from metaphrase.io.counts import counted
from metaphrase.io.environment import cores
from metaphrase.io.files import read_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
BENCHMARKS = ROOT / "scripts" / "benchmarks" / "results"
CARDS = ROOT / "model_cards"


@dataclass
class Options:
    """New results to store; without options, the tables are rewritten from the stored results."""

    demo: str | None = option(None, "report.json of `make demo`.")
    swahili: str | None = option(None, "report.json of scripts/swahili.sh.")
    adapted: list[str] = option([], "Output folders of `metaphrase adapt` (scripts/my_language.sh).")
    suites: list[str] = option(
        [],
        "results.json of `metaphrase evaluate RELEASE --suite all --baseline starter@wheel --data …`, or several such "
        "files, of other suites or other parts of the data, with the same two encoders.",
    )
    dap_suites: list[str] = option(
        [], "The same for the release of `metaphrase demo --recipe dap --vocabulary english`."
    )
    timed: list[str] = option(
        [], "results.json of `metaphrase evaluate … --suite all` and the like, for the durations of suites."
    )
    exports: list[str] = option(
        [],
        "Outputs of `metaphrase export starter --languages … --json`, in the order of the columns of the table.",
    )
    alignment: str | None = option(None, "alignment.json of scripts/wacse.sh.")
    translation: str | None = option(
        None, "results.json of trainers/finetune_translation.py with configs/finetune/overfit-translation.yaml."
    )


#: Keys of a guard that are stored.
_GUARD = ("before", "after", "difference", "interval", "n", "verdict", "limit")


def keep_report(report: Path, path: Path) -> None:
    """Store the comparisons of a report and the facts of its run."""
    content = read_json(report)
    run = {key: value for key, value in content["run"].items() if key not in ("log_history", "corpus", "settings")}
    for file in run["files"]:
        file.pop("path", None)
    run["command"] = re.sub(r"(?<=\s)/\S*/(?=\S)", "", run["command"])  # local paths of the data
    analysis = content.get("analysis", {})
    guards = {}
    for name, guard in analysis.get("retention", {}).items():
        pooled = guard["pooled"]
        title = f"{pooled['languages']} other languages ({name})"
        guards[title] = pooled | {"verdict": guard["verdict"], "limit": guard["limit"]}
    for name, guard in analysis.get("abilities", {}).items():
        guards[f"{name}, {len(guard['languages'])} languages"] = {key: guard[key] for key in _GUARD}
    results = {
        "run": run,
        "comparisons": content["comparisons"],
        "baseline_prompt": {name: result["settings"]["prompt"] for name, result in content["before"].items()},
        "guards": guards,
    }
    write_results(
        path, results, lambda stored: {"test sets": set(stored["comparisons"]), "steps": stored["run"]["steps"]}
    )


def report_table(content: dict[str, Any]) -> str:
    """Format a run's facts and its test sets as Markdown."""
    run = content["run"]
    pairs = sum(file["pairs"] for file in run["files"])
    lines = [
        f"One run with seed {run['seed']}: {pairs:,} training pairs, {run['steps']} steps of {run['batch_size']} pairs in "
        f"{run['training_seconds'] / 60:.1f} minutes on {cores(run['hardware'])}.",
        "",
    ]
    for name, comparison in content["comparisons"].items():
        prompt = content["baseline_prompt"][name]
        setting = f"with its prompt `{prompt}`" if prompt else "without its prompt"
        lines += [f"**{name}** (baseline measured {setting}, where it scores higher)", ""]
        rows = dict(comparison["languages"])
        if len(rows) > 1:
            rows["**all**"] = comparison["pooled"] | {"n": sum(row["n"] for row in rows.values())}
        cells = [[language, row["n"], *change_cells(row), verdict_shown(row)] for language, row in rows.items()]
        lines += [*markdown(["language", "pairs", "before", "after", "difference", ""], "lrrrrl", cells), ""]
    if guards := content.get("guards"):
        heads = ["measure", "items", "before", "after", "difference", "red line", ""]
        cells = [
            [name, row["n"], *change_cells(row), f"{-row['limit']:+g}", row["verdict"]] for name, row in guards.items()
        ]
        lines += ["**Retention**", "", *markdown(heads, "lrrrrrl", cells)]
    return "\n".join(lines).rstrip()


def change_cells(row: dict[str, Any]) -> list[str]:
    """Format the scores before and after, and their difference."""
    return [f"{row['before']:.1f}", f"{row['after']:.1f}", difference_words(row)]


def difference_words(row: dict[str, Any]) -> str:
    """Format a difference with its interval."""
    low, high = row["interval"]
    return f"{row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"


def keep_adapted(outputs: Sequence[Path], path: Path) -> None:
    """Store verdicts and the facts of their runs, without sentences of the corpora."""
    runs = []
    for output in outputs:
        verdict = read_json(output / "verdict.json")
        facts = read_json(output / "report.json")["run"]
        run = {key: facts[key] for key in ("seed", "steps", "training_seconds", "hardware", "versions")}
        run["pairs"] = {file["language"]: file["pairs"] for file in facts["files"]}
        run |= {key: verdict[key] for key in ("verdict", "languages", "plan", "seconds")}
        if verdict["retention"]:
            omitted = ("languages", "models")  # the latter name the output folder
            run["retention"] = {key: value for key, value in verdict["retention"].items() if key not in omitted}
        runs.append(run)
    write_results(path, runs, lambda runs: {"languages": {language for run in runs for language in run["languages"]}})


def adapted_words(runs: Sequence[dict[str, Any]]) -> str:
    """Format verdicts as the command prints them, with the cost of each run."""
    paragraphs = []
    for run in runs:
        pairs = ", ".join(f"{run['pairs'][language]:,} pairs of {language}" for language in run["languages"])
        verdict = "\n".join(run["verdict"])
        paragraphs += [
            f"```text\n{verdict}\n```",
            f"{pairs} were used for training: seed {run['seed']}, {run['steps']} steps, {run['seconds'] / 60:.0f} minutes in "
            f"total on {cores(run['hardware'])}.",
        ]
    return "\n\n".join(paragraphs)


#: The baseline and the release in stored results.
SIDES = ("before", "after")

#: Groups of languages with a separate row if a test set contains them, and how the row names them.
GROUPS = {group: f"the {group}" for group in ("36", "14", "8", "5", "4")} | {
    group: f"languages {group}" for group in ("in XLM-R", "not in XLM-R")
}

#: What the groups are.
GROUPS_NOTE = (
    "The papers define these groups. The 36 are the languages of Tatoeba in XTREME, and the 14 are also in XNLI. "
    + " ".join(f"The {group}: {', '.join(TATOEBA_GROUPS[group])}." for group in ("8", "5", "4"))
)


def keep_suites(results: Sequence[Path], path: Path) -> None:
    """Store average scores of the baseline and the release, and the significance tests between them.

    They are added to stored results of the same encoders, whose scores of the same names they replace.

    Raises:
        ValueError: The results are of different encoders, have no baseline, or are of the sample ``quick``.
        UsageError: The stored results cover more data sets or languages.
    """
    contents = _read_suites(results)
    first = contents[0]
    hashes = _encoder_hashes(first)
    suites = [content["suite"] for content in contents]
    parts, scores, skipped, failed = {}, {}, {}, []
    for content in contents:
        parts |= content["parts"]
        scores |= {name: _stored_score(content, name) for name in content["scores"]}
        skipped |= content["skipped"]
        failed += content["failed"]
    stored = read_json(path) if path.exists() else {}
    if stored.get("hashes") == hashes and stored.get("seed") == first["settings"]["seed"]:
        scores = stored["scores"] | scores
        suites = stored["suites"] + suites
        skipped = stored["skipped"]  # results of a part of the data lack most suites
        failed = [name for name in dict.fromkeys([*stored["failed"], *failed]) if name not in parts]
    # The results of some data are skipped in one file and measured in another.
    measured = parts.keys() | {part["suite"] for part in parts.values()}
    suite_results = {
        "scores": scores,
        "skipped": {name: reason for name, reason in skipped.items() if name not in measured},
        "failed": failed,
        "suites": list(dict.fromkeys(suites)),
        "models": {"before": first["baseline"]["model"], "after": first["model"]},
        "hashes": hashes,
        "seed": first["settings"]["seed"],
        "hardware": next(iter(parts.values()))["hardware"],
        "versions": first["versions"],
    }

    def covered(content: dict[str, Any]) -> dict[str, Any]:
        languages = {
            f"languages of {name}": score["languages"] for name, score in content["scores"].items() if name in scores
        }
        return {"scores": set(content["scores"])} | languages

    write_results(path, suite_results, covered)


def _read_suites(results: Sequence[Path]) -> list[dict[str, Any]]:
    """Read results of suites, and check that they have a baseline and are of the same encoders."""
    contents = [read_json(result) for result in results]
    for result, content in zip(results, contents, strict=True):
        if content.get("baseline") is None:
            raise ValueError(f"{result} has no baseline to compare with. Pass --baseline to `metaphrase evaluate`.")
        if content["suite"] == "quick":
            raise ValueError(f"{result} has scores of a small sample. Pass --suite all to `metaphrase evaluate`.")
    for content in contents[1:]:
        if _encoder_hashes(content) != _encoder_hashes(contents[0]):
            raise ValueError(
                f"Suite {content['suite']!r} was measured with other encoders than suite {contents[0]['suite']!r}."
            )
    return contents


def _encoder_hashes(results: dict[str, Any]) -> dict[str, str]:
    """The digests of the baseline and the release of suites."""
    return {"before": results["baseline"]["model_hash"], "after": results["model_hash"]}


def _stored_score(results: dict[str, Any], name: str) -> dict[str, Any]:
    """A score of both encoders and its significance test. A baseline at its best without a prompt is ``unprompted``."""
    after = results["scores"][name]
    before = results["baseline"]["scores"].get(name)
    score = {
        "measure": after["measure"],
        "protocol": after["protocol"],
        "lower_is_better": after["lower_is_better"],
        "languages": len(after["languages"]),
        "bf16": results["settings"]["bf16"],
    }
    if before is not None:
        score["before"] = _stored_side(before)
    score["after"] = _stored_side(after)
    score["unprompted"] = before is not None and before.get("settings", {}).get("prompt") == ""
    score["test"] = results["comparisons"].get(name, {}).get("pooled")
    return score


def _stored_side(score: dict[str, Any]) -> dict[str, Any]:
    """The average of a score of one encoder, its groups of languages, and the number of languages that were not learned."""
    return {
        "average": _stored_row(score["average"]),
        **{group: _stored_row(row) for group, row in score["groups"].items()},
        "unlearned": sum(row.get("learned") is False for row in score["languages"].values()),
    }


def _stored_row(row: dict[str, Any]) -> dict[str, Any]:
    """Size, score, interval and directions of an average or a group, without other details of its suite."""
    return {key: row[key] for key in ("n", "score", "interval", *DIRECTIONS) if key in row}


#: What the names of test sets mean, by the regular expression of a score's name.
TEST_SETS = {
    r"demo": "`demo`: held-out pairs of the bitext of `metaphrase demo`. Other pairs of this bitext were used for training.",
    r"lafand": "`lafand`: Swahili news of LAFAND-MT.",
    r"software": (
        "`software`: localisation strings, 500 pairs of each language, from the sources of the release's training"
        " data."
    ),
    r"tatoeba": "`tatoeba`: Tatoeba v1 of LASER.",
    r"udhr": (
        "`udhr`: the Universal Declaration of Human Rights. Directions of language identity were estimated on its "
        "odd-numbered articles."
    ),
    r".* xsim": "`xsim`: retrieval by ratio margin instead of cosine.",
    r".* xsim\+\+": (
        "`xsim++`: retrieval of English sentences among altered copies of them, with another number, name, "
        "negation, comparison or cause."
    ),
    r"stsb": "`stsb`: translations of STS-B, similarity within a language; `stsb cross-lingual`: across two languages.",
    r"bucc": "`bucc2018-sample`: mining of parallel sentences, a sample of BUCC 2018 (the threshold is chosen on it).",
    r"xquad-r": (
        '`xquad-r`: questions in 11 languages, answered from one pool of sentences in all of them (LAReQA). "In '
        'one language" and "in the question\'s language": the candidates of that language only. Own-language bias:'
        " the share of questions whose first answer is in that language, minus the share expected by chance. mAP lost"
        " to the question's language: mAP without the candidates in that language, minus mAP."
    ),
    r"xquad-r paragraph": "`xquad-r paragraph`: the first 120 questions; each candidate is followed by its paragraph.",
    r"sib200": (
        "`sib200`: the first 50 sentences of each split of SIB-200 (FLORES); retrieval, and topics by a linear "
        "probe that is trained in English."
    ),
    r"alignment-gold|wpt05": (
        "`alignment-gold`, `wpt05-en-hi`: word alignment of English–French, Romanian–English and English–Hindi; "
        "`tuned`: with the layer, method and threshold that are best on the first fifth of the pairs."
    ),
    r"ud|pawsx": (
        "`ud`, `pawsx`: parts of speech (Universal Dependencies, 300 sentences of each language) and paraphrases "
        "(600 pairs), by a linear probe that is trained in English on the frozen encoder."
    ),
    r"xnli|xquad": (
        "`xnli`, `xquad`: inference (300 pairs of each language) and question answering (60 questions). The "
        "encoder is fine-tuned in English at a small scale: half of the dev items of XNLI, and half of the "
        "paragraphs of XQuAD."
    ),
    r"mteb": "`mteb`: the same data as tasks of MTEB.",
}


def suites_table(content: dict[str, Any], *, described: bool = True) -> str:
    """Format one row for each score with its significance test, and the retrieval scores of groups of languages.

    ``described`` adds the meaning of the names.
    """
    scores = content["scores"]
    rows, group_rows = [], []
    for name, score in scores.items():
        measure = measure_words(score)
        is_directed = DIRECTIONS[0] in score["after"]["average"] and not score["lower_is_better"]
        label = name
        if score["languages"] > 1:
            label += f", {score['languages']} languages" if is_directed else f", mean of {score['languages']}"
        if not is_directed:
            rows.append([label, measure, *(score_cell(score, side) for side in SIDES), *test_cells(score)])
            continue
        cells = [" / ".join(_direction_cells(score, side, "average")) + prompt_mark(score, side) for side in SIDES]
        rows.append([label, f"{measure}, xx→en / en→xx", *cells, *test_cells(score)])
        for group, group_words in GROUPS.items():
            if group in score["after"] and group != str(score["languages"]):
                before, after = (_direction_cells(score, side, group) for side in SIDES)
                group_rows.append([f"{name}, {group_words}", before[0], after[0], before[1], after[1]])
    lines = markdown(["test set", "measure", "starter", "release", "difference", ""], "llrrrl", rows)
    suites = ", ".join(f"`--suite {suite}`" for suite in content["suites"])
    lines += [
        *footnotes(lines),
        "",
        f"One run with `metaphrase evaluate {content['models']['after']} --baseline starter@wheel --data …` and {suites}, "
        f"{setting_words(content)}. Differences compare means over languages (of both directions, if measured), with 95 % "
        "paired bootstrap intervals.",
        *(f"Not measured: {name}, because its data could not be loaded." for name in content["skipped"]),
    ]
    if described:
        lines += ["", "The test sets and measures:", ""]
        for pattern, words in TEST_SETS.items():
            if any(re.match(rf"({pattern})(?![\w-])", name) for name in scores):
                lines += textwrap.wrap(f"- {words}", 132, subsequent_indent="  ", break_on_hyphens=False)
    heads = ["accuracy in groups of languages", "xx→en, starter", "release", "en→xx, starter", "release"]
    lines += ["", *markdown(heads, "lr", group_rows)]
    if described:
        lines += ["", *textwrap.wrap(GROUPS_NOTE, 132)]
    return "\n".join(lines)


def _direction_cells(score: dict[str, Any], side: str, group: str) -> list[str]:
    """Format the accuracies of both directions; empty without a baseline."""
    if side not in score:
        return [""] * len(DIRECTIONS)
    return [f"{score[side][group][direction]['accuracy']:.1f}" for direction in DIRECTIONS]


def sib200_table(content: dict[str, Any]) -> str:
    """Format the scores of SIB-200 by resource and by script: a row for each group, with retrieval and topics."""
    measures = [content["scores"][name] for name in ("sib200", "sib200 topics")]
    retrieval = measures[0]["after"]
    rows = []
    for group in ("average", *(name for name in retrieval if name not in ("average", "unlearned"))):
        cells = []
        for score in measures:
            for side in SIDES:
                row = score[side][group]
                if group == "average":
                    row = score[side].get("without English", row)
                cells.append(f"{row['score']:.1f}{prompt_mark(score, side)}")
        label = "**all without English**" if group == "average" else group
        rows.append([label, retrieval[group]["n"], *cells])
    lines = markdown(["languages", "n", "retrieval, starter", "release", "topics, starter", "release"], "lr", rows)
    return "\n".join([*lines, *footnotes(lines)])


def xsimpp_table(content: dict[str, Any]) -> str:
    """Format the errors of xsim++ by kind of distractor: a row for each data set and encoder."""
    kinds = ["average", "without distractors", *KINDS]
    heads = ["all" if kind == "average" else kind.removesuffix(" distractors") for kind in kinds]
    rows = []
    for name, score in content["scores"].items():
        if "without distractors" not in score["after"]:
            continue
        for side, encoder in zip(SIDES, ("starter", "release"), strict=True):
            cells = [f"{score[side][kind]['score']:.1f}" if kind in score[side] else "" for kind in kinds]
            rows.append([name.removesuffix(" xsim++"), f"{encoder}{prompt_mark(score, side)}", *cells])
    lines = markdown(["data", "encoder", *heads], "llr", rows)
    return "\n".join([*lines, *footnotes(lines)])


def keep_durations(results: Sequence[Path], path: Path) -> None:
    """Add the durations of suites to the stored ones.

    They replace those of the same encoder. Results of a part of the data replace only the suites that they contain.
    """
    runs = {}
    for run in read_json(path) if path.exists() else []:
        runs[run["model"], run["suite"]] = run
    for result in results:
        content = read_json(result)
        parts = content["parts"].values()
        seconds: dict[str, float] = {}
        for part in parts:
            seconds[part["suite"]] = round(seconds.get(part["suite"], 0) + part["seconds"], 1)
        identity = {key: content[key] for key in ("model", "model_hash", "suite")}
        stored = runs.get((content["model"], content["suite"]), {})
        if all(stored.get(key) == value for key, value in identity.items()):
            seconds = stored["seconds"] | seconds
        run = identity | {"seconds": seconds, "hardware": next(iter(parts))["hardware"]}
        runs[content["model"], content["suite"]] = run
    write_results(
        path, list(runs.values()), lambda runs: {"suites": {suite for run in runs for suite in run["seconds"]}}
    )


def durations_table(runs: Sequence[dict[str, Any]]) -> str:
    """Format the minutes of each suite, with a column for each run."""
    suites = list(dict.fromkeys(suite for run in runs for suite in run["seconds"]))
    minutes = [{suite: seconds / 60 for suite, seconds in run["seconds"].items()} for run in runs]
    rows = [[suite, *(f"{of_run[suite]:.1f}" if suite in of_run else "" for of_run in minutes)] for suite in suites]
    rows.append(["**minutes**", *(f"**{sum(of_run.values()):.0f}**" for of_run in minutes)])
    commands = [f"`evaluate {run['model']} --suite {run['suite']}`" for run in runs]
    machines = dict.fromkeys(hardware_words(run["hardware"]) for run in runs)
    caption = f"One run each, on {' and '.join(machines)}."
    return "\n".join([*markdown(["suite", *commands], "lr", rows), "", caption])


#: Scores in the README's table, and how they are named there.
HEADLINES = {
    "tatoeba": "Tatoeba, retrieval, {languages} languages",
    "xquad-r mAP": "XQuAD-R, answers in one pool of {languages} languages",
    "xquad-r MRR in the question's language": "XQuAD-R, answers in the question's language",
    "sib200": "SIB-200, retrieval, {languages} languages",
    "sib200 topics": "SIB-200, topics by a probe, {languages} languages",
    "alignment-gold enfr": "English–French, word alignment",
    "ud f1": "Universal Dependencies, POS tags, {languages} languages",
    "stsb cross-lingual": "STS-B across languages, {languages} pairs",
    "stsb": "STS-B within a language, {languages} languages",
    "pawsx accuracy": "PAWS-X, paraphrases, {languages} languages",
    "xnli accuracy": "XNLI, inference, {languages} languages",
    "xquad f1": "XQuAD, question answering, {languages} languages",
    "ud probe f1": "Universal Dependencies, POS tags by a probe, {languages} languages",
    "pawsx probe accuracy": "PAWS-X, paraphrases by a probe, {languages} languages",
    "xnli probe accuracy": "XNLI, inference by a probe, {languages} languages",
}


def headline_table(content: dict[str, Any]) -> str:
    """Format the README's table: one row for each benchmark, gains and losses."""
    rows = []
    for name, label in HEADLINES.items():
        score = content["scores"].get(name)
        if score is None:  # of --transfer probe or of --transfer finetune
            continue
        cells = [*(score_cell(score, side) for side in SIDES), *test_cells(score)]
        rows.append([label.format(languages=score["languages"]), measure_words(score), *cells])
    lines = markdown(["benchmark", "measure", "starter", "release", "difference [95 %]", ""], "llrrrl", rows)
    caption = f"One run of each encoder, {setting_words(content)}. Intervals are paired bootstrap intervals."
    return "\n".join([*lines, *footnotes(lines), "", caption])


def setting_words(content: dict[str, Any]) -> str:
    """State seed, precision and hardware of suites."""
    in_float32 = [name for name, score in content["scores"].items() if not score["bf16"]]
    precision = ""
    if len(in_float32) < len(content["scores"]):
        precision = ", in bfloat16"
        if in_float32:
            precision += f", except {' and '.join(in_float32)}, in float32"
    return f"bootstrap seed {content['seed']}{precision} ({cores(content['hardware'])})"


def measure_words(score: dict[str, Any]) -> str:
    """Name the measure of a score, and its direction if lower is better."""
    measure = score["measure"].replace("f1", "F1")
    return f"{measure}, lower is better" if score["lower_is_better"] else measure


def score_cell(score: dict[str, Any], side: str) -> str:
    """Format an average score with its footnote marks."""
    if side not in score:
        return ""
    unlearned = score[side].get("unlearned", 0) == max(score["languages"], 1)
    return f"{score[side]['average']['score']:.1f}{' †' if unlearned else ''}{prompt_mark(score, side)}"


def prompt_mark(score: dict[str, Any], side: str) -> str:
    """Return the mark of a baseline that was measured without its prompt."""
    return " ‡" if side == "before" and score["unprompted"] else ""


def test_cells(score: dict[str, Any]) -> list[str]:
    """Format a difference with its interval, and the verdict."""
    test = score["test"]
    if test is None:
        return ["", ""]
    verdict = verdict_shown(test).replace("one run", "one run §")
    if test.get("runs", 1) > 1:
        verdict += f", {test['runs']} runs ¶"
    return [difference_words(test), verdict]


def footnotes(lines: Sequence[str]) -> list[str]:
    """Explain the marks that occur in a table, in a paragraph."""
    notes = {
        "†": "† No better than predicting the most frequent class: the classifier learned nothing at this scale.",
        "‡": "‡ Measured without its prompt (`query: `), where it scores higher.",
        "§": "§ Fine-tuned once. The interval covers test items, not the variation between fine-tunings.",
        "¶": "¶ Mean of several fine-tunings, each with its own seed. The interval also covers the variation between these.",
    }
    used = [note for mark, note in notes.items() if any(mark in line for line in lines)]
    return ["", " ".join(used)] if used else []


def hardware_words(hardware: dict[str, Any]) -> str:
    """Format a description of the hardware."""
    return f"{cores(hardware)}, {counted(hardware['threads'], 'thread')}"


def machine_words(hardware: dict[str, Any]) -> str:
    """Name the GPU, or describe the CPU."""
    return hardware.get("gpu") or hardware_words(hardware)


def keep_exports(outputs: Sequence[Path], path: Path) -> None:
    """Store the sizes and scores of exported encoders."""
    exports = []
    for content in map(read_json, outputs):
        options = {key: content["options"][key] for key in ("languages", "layers")}
        facts = {key: content[key] for key in ("changes", "sizes", "languages", "settings", "versions")}
        exports.append({"options": options} | facts)
    write_results(path, {"exports": exports}, lambda stored: {"exports": len(stored["exports"])})


def exports_table(content: dict[str, Any]) -> str:
    """Format sizes and scores of the starter and of exported encoders as Markdown."""
    exports = content["exports"]
    rows = []
    for label, name, number_format in (
        ("MB on disk", "megabytes", ".0f"),
        ("pieces", "pieces", ","),
        ("layers", "layers", ""),
    ):
        sizes = [exports[0]["sizes"][name]["before"], *(export["sizes"][name]["after"] for export in exports)]
        rows.append([label, *(format(size, number_format) for size in sizes)])
    for language, starter in exports[0]["languages"].items():
        cells = []
        for export in exports:
            row = export["languages"][language]
            cells.append(f"{row['after']:.1f} ({difference_words(row)}, {verdict_shown(row)})")
        rows.append([f"retrieval, {language}, {starter['n']} pairs", f"{starter['before']:.1f}", *cells])
    columns = []
    for export in exports:
        options = [f"--{key} {as_words(value)}" for key, value in export["options"].items() if value]
        columns.append(f"`{' '.join(options)}`")
    return "\n".join(markdown(["", "starter", *columns], "lr", rows))


def as_words(value: Any) -> str:
    """Format the value of an option."""
    return " ".join(value) if isinstance(value, list) else str(value)


def keep_translation(report: Path, path: Path) -> None:
    """Store the results of a translation run with a few examples, and with file names instead of paths."""
    content = read_json(report)
    for split in ("train", "test"):
        content["settings"][split] = Path(content["settings"][split]).name
    content["examples"] = content["examples"][:3]
    write_results(path, content, lambda stored: {"steps": stored["steps"]})


def translation_words(content: dict[str, Any]) -> str:
    """Describe the overfitting check of the translation program."""
    settings, bleu = content["settings"], content["signatures"]["bleu"]
    (_, first), *_, (_, last) = content["loss"]
    hardware = hardware_words(content["hardware"])
    return (
        f"{settings['limit_train']} pairs of {settings['train']} ({settings['language']}–en), {content['steps']:,} steps: "
        f"the loss falls from {first:.1f} to {last:.2g}, and the training pairs are translated with BLEU "
        f"{content['metrics']['bleu']:.1f} (`{bleu}`). Frozen encoder, decoder with {settings['decoder_layers']} layers, one "
        f"run with seed {content['seed']}, {content['training_seconds'] / 60:.0f} minutes ({hardware})."
    )


def alignment_table(content: dict[str, Any]) -> str:
    """Format the speed of an aligner on a corpus, and the share of words it linked."""
    heads = ["corpus", "aligner", "pairs", "training + aligning", "pairs/s"]
    heads += ["source words linked", "target words linked"]
    cells = (
        content["files"][0]["file"],
        content["aligner"],
        f"{content['pairs']:,}",
        f"{content['training_seconds']:.0f} s + {content['seconds']:.0f} s",
        f"{content['pairs_per_second']:,.0f}",
        f"{content['share_source_linked']:.1%}",
        f"{content['share_target_linked']:.1%}",
    )
    caption = f"One run of `scripts/wacse.sh` on {content['cpus']} cores."
    return "\n".join([*markdown(heads, "llr", [cells]), "", caption])


def trained_aligner_table(content: dict[str, Any]) -> str:
    """Format the error of a trained word aligner after each round, on each gold set, with default and tuned settings."""
    parts = list(dict.fromkeys(row["part"] for row in content["rows"]))
    rows = []
    for encoder in dict.fromkeys(row["encoder"] for row in content["rows"]):
        by_part = {row["part"]: row for row in content["rows"] if row["encoder"] == encoder}
        cells = [f"{row['aer']:.1f} [{row['interval'][0]:.1f}, {row['interval'][1]:.1f}]" for row in by_part.values()]
        rows.append([encoder, *cells])
    # Errors of the links of other aligners, which are in files ``PART.ALIGNER``.
    peers: dict[str, dict[str, float]] = {}
    for row in content["rows"]:
        for file, error in row["peers"].items():
            aligner = file.partition(".")[2]
            peers.setdefault(aligner, {})[row["part"]] = error
    for aligner, errors in peers.items():
        rows.append(
            [aligner.removesuffix(".out"), *(f"{errors[part]:.1f}" if part in errors else "" for part in parts)]
        )
    settings = content["settings"]
    steps = ", ".join(str(settings["steps"] or training["steps"]) for training in content["rounds"])
    caption = (
        f"`scripts/train_aligner.py`: {content['layers']} layers, {settings['pairs']:,} pairs of each of "
        f"{', '.join(settings['languages'])} with English, rounds of {steps} steps. One run with seed {settings['seed']}, "
        f"{hardware_words(content['hardware'])}. Intervals are over sentences."
    )
    return "\n".join([*markdown(["encoder", *parts], "lr", rows), "", caption])


def aligner_cells(row: dict[str, Any]) -> list[str]:
    """Format the measures of an aligner, which are fractions, in percent, and its speed."""
    low, high = row["aer_interval"]
    error = f"{100 * row['aer']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    measures = [f"{100 * row[name]:.1f}" for name in ("precision", "recall", "f1")]
    return [error, *measures, f"{row['pairs_per_second']:,.0f}"]


def is_default(row: dict[str, Any], section: dict[str, Any]) -> bool:
    """Return whether a row was measured with the default settings of its aligner."""
    return all(row[name] == value for name, value in section["default"].items())


def word_alignment_tables(content: dict[str, Any]) -> dict[str, str]:
    """Return the tables of docs/word_alignment.md by marker."""
    measures = ["AER [95 %]", "precision", "recall", "F1", "pairs/s"]
    gold, aligners = content["gold"], content["aligners"]
    default_rows, heuristic_rows, facts = [], [], []
    for name, section in sorted(aligners.items()):
        facts.append(_aligner_facts(name, section))
        for row in section["rows"]:
            if is_default(row, section):
                settings = ", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in section["default"])
                default_rows.append([name, settings, *aligner_cells(row)])
            if "heuristic" in row:
                heuristic_rows.append([name, row["heuristic"], *aligner_cells(row)])
    about = f"{gold['name']}: {gold['pairs']} pairs, {gold['links']:,} links. Every aligner uses its default settings."
    lines = [about, "", *markdown(["aligner", "settings", *measures], "llr", default_rows), "", *facts]
    tables = {
        "word_alignment": "\n".join(lines),
        "word_alignment_heuristics": "\n".join(markdown(["aligner", "heuristic", *measures], "llr", heuristic_rows)),
    }
    if "embedding" in aligners:
        tables["word_alignment_layers"] = _layer_table(aligners["embedding"])
    return tables


def _aligner_facts(name: str, section: dict[str, Any]) -> str:
    """Format the command of an aligner, and how long it took, as a list item."""
    training = ""
    if corpus := section.get("corpus"):
        training = (
            f", trained on {section['trained_pairs']:,} pairs ({corpus['file']} and the test sentences) "
            f"in {section['training_seconds']:,.0f} s"
        )
    return f"- {name}: `{section['command']}`{training}; {section['seconds']:,.0f} s in total."


def _layer_table(section: dict[str, Any]) -> str:
    """Format the error of the embedding aligner by layer, level and method; the default is bold."""
    rows = {(row["layer"], row["level"], row["method"]): row for row in section["rows"]}
    layers = sorted({layer for layer, _, _ in rows})
    settings = sorted({(level, method) for _, level, method in rows})
    lines = []
    for layer in layers:
        cells = [layer]
        for level, method in settings:
            row = rows[layer, level, method]
            error = f"{100 * row['aer']:.1f}"
            cells.append(f"**{error}**" if is_default(row, section) else error)
        lines.append(cells)
    heads = ["layer", *(f"{level}, {method}" for level, method in settings)]
    return "\n".join(markdown(heads, "r", lines))


def benchmark_tables(folder: Path) -> dict[str, str]:
    """Return the tables of speed and memory by marker."""
    patterns = {
        "bench": "cpu/table.md",
        "flops": "cpu/flops.md",
        "costs": "costs.md",
        "bench-gpu": "NVIDIA*/table.md",
        "profile": "cpu/profile.md",
        "mining-scale": "mining-scale.md",
        "mining-peers": "mining-peers.md",
    }
    tables = {}
    for marker, pattern in patterns.items():
        if paths := sorted(folder.glob(pattern)):
            tables[marker] = paths[0].read_text(encoding="utf-8").rstrip()
    return tables


def store(options: Options) -> None:
    """Store new results under ``scripts/results``."""
    for name in ("demo", "swahili"):
        if report := getattr(options, name):
            keep_report(Path(report), RESULTS / f"{name}.json")
    if options.adapted:
        keep_adapted([Path(output) for output in options.adapted], RESULTS / "adapt.json")
    for name, files in (("suites", options.suites), ("suites-dap", options.dap_suites)):
        if files:
            keep_suites([Path(file) for file in files], RESULTS / f"{name}.json")
    if options.timed:
        keep_durations([Path(file) for file in options.timed], RESULTS / "durations.json")
    if options.exports:
        keep_exports([Path(file) for file in options.exports], RESULTS / "export.json")
    if options.alignment:
        measured = read_json(options.alignment) | {"cpus": os.cpu_count()}
        write_results(RESULTS / "alignment.json", measured, lambda stored: {"pairs": stored["pairs"]})
    if options.translation:
        keep_translation(Path(options.translation), RESULTS / "translation_overfit.json")


def stored_tables() -> dict[str, str]:
    """Return every table that can be written from stored results, by marker."""
    formats = {
        "demo": ("demo", report_table),
        "swahili": ("swahili", report_table),
        "adapted": ("adapt", adapted_words),
        "results": ("suites", headline_table),
        "suites": ("suites", suites_table),
        "sib200": ("suites", sib200_table),
        "xsimpp": ("suites", xsimpp_table),
        "suites-dap": ("suites-dap", partial(suites_table, described=False)),
        "durations": ("durations", durations_table),
        "exports": ("export", exports_table),
        "alignment": ("alignment", alignment_table),
        "trained-aligner": ("word_aligner", trained_aligner_table),
        "translation": ("translation_overfit", translation_words),
    }
    tables = {}
    for marker, (name, format_table) in formats.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            tables[marker] = format_table(read_json(path))
    if (RESULTS / "word_alignment.json").exists():
        tables |= word_alignment_tables(read_json(RESULTS / "word_alignment.json"))
    return tables | benchmark_tables(BENCHMARKS)


def fill_pages(pages: Sequence[Path]) -> None:
    """Rewrite the tables of pages from stored results. A model card has only results of its own weights."""
    tables, suites = stored_tables(), RESULTS / "suites.json"
    measured = read_json(suites)["hashes"]["after"] if suites.exists() else None
    for page in pages:
        hashes = measured_as(page)
        is_own = hashes is None or measured in hashes
        fill(page, tables if is_own else tables | {"suites": "The suites have not been measured with these weights."})


def measured_as(page: Path) -> list[str] | None:
    """Return the digests of the encoders whose results a model card may have; None if the page is not a model card."""
    head = re.match(r"---\n(.*?)^---$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return None if head is None else yaml.safe_load(head[1])["metaphrase"].get("measured_as", [])


@reports_errors
def main(argv: list[str]) -> int:
    """Store new results, then rewrite the tables of all pages."""
    store(HfArgumentParser(Options).parse_args_into_dataclasses(argv)[0])
    cards = [*CARDS.glob("*.md"), *ROOT.glob("models/*/*/README.md")]
    fill_pages([ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *cards])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
