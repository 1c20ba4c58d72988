"""Analyses by language for a report: geometry of the embeddings, and answers across languages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.evaluation.geometry import hubs, isotropy, language_identification
from metaphrase.evaluation.measures import spearman
from metaphrase.exceptions import DataError
from metaphrase.io.work_folders import damage_in
from metaphrase.mining.search import unit_rows

#: Result of `metaphrase evaluate` that has the table of question and answer languages.
ANSWERS = "xquad-r mAP in one language"
#: Sentences of a language whose similarities are compared.
_STRUCTURE_SENTENCES = 300

Embedded = Mapping[str, Mapping[str, tuple[NDArray[Any], NDArray[Any]]]]


def geometry_of(embedded: Embedded, sets: Mapping[str, ParallelSet]) -> dict[str, dict[str, Any]]:
    """Geometry of each side of a report, as `metaphrase diagnose` measures it.

    Returns for each side ``language``, the accuracy of a linear probe of the language, with ``chance``; ``isotropy``;
    ``hubness``, the mean skewness over the languages, with the worst ``hub`` and its ``hub_count``; and after training
    ``structure``, the mean Spearman correlation ×100 of the similarities within each language with those before.
    """
    facts: dict[str, dict[str, Any]] = {}
    for side in next(iter(embedded.values())):
        pairs = {language: tuple(map(unit_rows, sides[side])) for language, sides in embedded.items()}
        first = next(iter(pairs.values()))
        probe = language_identification(
            {code: source for code, (source, _) in pairs.items()} | {TARGET_LANGUAGE: first[1]}
        )
        found = {code: hubs(both[0], both[1]) for code, both in pairs.items()}
        worst = max(found, key=lambda code: int(found[code].count_m.max()))
        facts[side] = {
            "language": probe.get("accuracy"),
            "chance": probe.get("chance"),
            "isotropy": isotropy(np.concatenate([rows_nh for both in pairs.values() for rows_nh in both])),
            "hubness": float(np.mean([one.skewness for one in found.values()])),
            "hub": sets[worst].targets[int(found[worst].count_m.argmax())],
            "hub_count": int(found[worst].count_m.max()),
        }
    if "before" in facts:
        kept = [_structure(sides["before"][0], sides["after"][0]) for sides in embedded.values()]
        facts["after"]["structure"] = float(np.mean(kept))
    return facts


def _structure(before_nh: NDArray[Any], after_nh: NDArray[Any]) -> float:
    rows = [unit_rows(side_nh[:_STRUCTURE_SENTENCES]) for side_nh in (before_nh, after_nh)]
    upper = np.triu_indices(len(rows[0]), 1)
    old, new = ((side_nh @ side_nh.T)[upper] for side_nh in rows)
    return spearman(old, new) if len(old) > 1 else 100.0


def read_answers(path: str | Path) -> dict[str, Any]:
    """The table of question and answer languages in the output of `metaphrase evaluate`, of the model and its baseline.

    Returns ``languages``, and a matrix of mAP in percent for ``after`` and, with a baseline, ``before``: a row for each
    language of the questions, a column for each language of the candidates.
    """
    with damage_in(path):
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        scores = {"before": content.get("baseline", {}).get("scores", {}), "after": content["scores"]}
        found = {side: one[ANSWERS]["languages"] for side, one in scores.items() if ANSWERS in one}
        if "after" not in found:
            raise DataError(f"{path} has no answer retrieval. Evaluate with --suite answer-retrieval or --suite all.")
        languages = list(found["after"])
        tables = {
            side: [[one[asked]["answers"][answer] for answer in languages] for asked in languages]
            for side, one in found.items()
        }
    return {"languages": languages, **tables}
