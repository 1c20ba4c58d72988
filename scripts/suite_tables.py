"""Results of `metaphrase evaluate --suite`: how they are stored, and their tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stored_results import hardware_words, markdown, write_results

from metaphrase.evaluation.compare import difference_shown, verdict_shown
from metaphrase.evaluation.distractors import KINDS
from metaphrase.evaluation.measures import DIRECTIONS
from metaphrase.evaluation.retrieval import TATOEBA_GROUPS
from metaphrase.io.environment import cores
from metaphrase.io.files import read_json

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
    unlearned = score[side]["unlearned"] == max(score["languages"], 1)
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
    return [difference_shown(test), verdict]


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
