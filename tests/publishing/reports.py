"""Contents of reports, and what they consist of."""

import numpy as np

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.retention import retention
from metaphrase.publishing import analysis


def comparison(differences, interval, before=80.0):
    verdicts = {True: "worse", False: "tie"}
    return {
        "languages": {
            language: {
                "n": 50,
                "before": before,
                "after": before + difference,
                "difference": difference,
                "interval": [difference - 3, difference + 3],
                "p_value": 0.5,
                "p_adjusted": 1.0,
                "verdict": verdicts[difference < -5],
            }
            for language, difference in differences.items()
        },
        "pooled": {
            "languages": len(differences),
            "n": 50 * len(differences),
            "before": before,
            "after": before + sum(interval) / 2,
            "difference": sum(interval) / 2,
            "interval": interval,
            "p_value": 0.01,
            "verdict": "tie",
        },
        "settings": {"resamples": 100, "seed": 0, "correction": "Holm", "alpha": 0.05},
    }


def found(rows, right=0.5, cosine=0.9):
    rows = np.array(rows)
    return {"row": rows, "cosine": np.full(len(rows), cosine), "right": np.full(len(rows), right)}


def analyses(baseline=True, word="mbwa"):
    """What a report of a small run holds."""
    rng = np.random.default_rng(0)
    sides = ("before", "after") if baseline else ("after",)
    languages = ["sw"] * 6 + ["en"] * 6
    matrix = {"source": [word, "kula"], "target": ["dog", "eat"], "layer": 8, "links": [[0, 0]]}
    sets = {"sw": ParallelSet("sw", tuple(f"{word} {i}" for i in range(5)), tuple(f"{word}! {i}" for i in range(5)))}
    wrong = {side: found(np.roll(np.arange(5), at)) for at, side in enumerate(reversed(sides), 1)}
    wrong["after"]["row"][:2] = [0, 4]
    if baseline:
        wrong["before"]["row"][2] = 2
    content = {
        "tokens": {
            "languages": ["en", "sw"],
            "language_of": languages,
            "words": [f"{word}{i}" for i in range(12)],
            "neighbours": 10,
            "expected": analysis.expected_share(languages),
            "data": "demo",
            **{side: analysis.token_map(rng.normal(size=(12, 8)), languages) for side in sides},
        },
        "alignments": [
            {
                "language": "sw",
                "number": 3,
                **{side: {**matrix, "cosine": rng.uniform(size=(2, 2)).round(4).tolist()} for side in sides},
            }
        ],
        "margins": analysis.margin_histogram(
            {side: (rng.normal(1.3, 0.1, 50), rng.normal(1, 0.1, 50)) for side in sides}
        )
        | {"data": "demo"},
        "errors": analysis.nearest_errors(sets, {"sw": wrong}) | {"data": "demo"},
        "retention": {},
    }
    if baseline:
        content["retention"]["udhr"] = retention(comparison({"de": -7.0, "fr": 1.0}, [-4.5, -1.5]), 1.0)
    return content
