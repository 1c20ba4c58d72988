"""Retention: losses of a model in languages without training data and in other abilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metaphrase.evaluation.compare import difference_shown, red_line_verdict, verdict_shown
from metaphrase.evaluation.retrieval import COLLAPSED_COSINE
from metaphrase.io.arguments import AtLeast0, checked
from metaphrase.io.counts import counted


@checked
def retention(comparison: Mapping[str, Any], limit: AtLeast0 = 1.0) -> dict[str, Any]:
    """Test whether languages without training data kept their accuracy.

    This is a non-inferiority test of the mean over the languages. The verdict is ``"kept"`` if the whole interval of the
    difference lies above the red line ``-limit``, ``"lost"`` if the whole interval lies below it, else ``"uncertain"``.

    Languages are sorted from the largest loss to the largest gain; ``below`` is true if a language's difference lies below
    the red line; ``worst`` lists the significantly worse languages and up to five with the largest losses.
    """
    rows = [
        {"language": language, **row, "below": row["difference"] < -limit}
        for language, row in sorted(comparison["languages"].items(), key=lambda item: item[1]["difference"])
    ]
    losses = [row["language"] for row in rows if row["difference"] < 0][:5]
    worst = [row["language"] for row in rows if row["verdict"] == "worse" or row["language"] in losses]
    return {
        "limit": limit,
        "verdict": red_line_verdict(*comparison["pooled"]["interval"], limit=limit),
        "pooled": comparison["pooled"],
        "languages": rows,
        "worst": worst,
        "settings": comparison["settings"],
    }


def collapse_in_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What to do about embeddings that have collapsed before or after training; empty if they have not.

    The arguments are results of `evaluate_retrieval` as dictionaries by test set; without a baseline, ``before`` is empty.

    >>> before, after = ({"udhr": {"facts": {"unrelated_cosine": cosine}}} for cosine in (0.75, 0.9991))
    >>> collapse_in_words(before, before)
    ''
    >>> collapse_in_words(before, after)[:80]
    'Training has collapsed the embeddings: unrelated sentences have a mean cosine of'
    """
    old, new = (
        max((one.get("facts", {}).get("unrelated_cosine", 0.0) for one in side.values()), default=0.0)
        for side in (before, after)
    )
    if max(old, new) <= COLLAPSED_COSINE:
        return ""
    if not before:
        return (
            f"The embeddings have collapsed: unrelated sentences have a mean cosine of {new:.4f}. `metaphrase diagnose` "
            "shows more."
        )
    if old > COLLAPSED_COSINE:
        return (
            "The embeddings of the encoder before training have collapsed: unrelated sentences have a mean cosine of "
            f"{old:.4f} (after training {new:.4f}), so comparisons with it are meaningless. Start from another encoder; "
            "`metaphrase diagnose` shows more."
        )
    return (
        f"Training has collapsed the embeddings: unrelated sentences have a mean cosine of {new:.4f} (before {old:.4f}). "
        "Train again from the original encoder with a lower learning rate or larger batches; `metaphrase diagnose` shows "
        "more."
    )


def overall_verdict(
    comparisons: Mapping[str, Any],
    retained: Mapping[str, Mapping[str, Any]],
    abilities: Mapping[str, Mapping[str, Any]],
) -> str:
    """What a model is better and worse at than before, as one sentence.

    Something is called kept only if nothing is worse or uncertain. A guard with the name of a test set is marked.

    The arguments are outputs of `compare` and `retention` by test set, and rows of guards
    (`metaphrase.evaluation.guards.Guard.measure`) by their names.

    >>> swahili, others = {"pooled": {"verdict": "better"}}, {"verdict": "kept"}
    >>> overall_verdict({"udhr": swahili}, {"udhr": others}, {"stsb": {"verdict": "worse"}})
    'Better at udhr; worse at stsb.'
    >>> overall_verdict({"udhr": swahili}, {"udhr": others}, {"similarity structure": {"verdict": "uncertain"}})
    'Better at udhr; uncertain: similarity structure.'
    >>> overall_verdict({"udhr": swahili}, {"udhr": others}, {"similarity structure": {"verdict": "kept"}})
    'Better at udhr; kept: other languages (udhr), similarity structure.'
    """
    verdicts = {name: verdict_shown(one["pooled"]) for name, one in comparisons.items()}
    verdicts |= {f"other languages ({name})": one["verdict"] for name, one in retained.items()}
    verdicts |= {
        f"{name} (guard)" if name in comparisons else name: verdict_shown(row) for name, row in abilities.items()
    }
    words = {
        "better": "better at ",
        "worse": "worse at ",
        "tie": "a tie: ",
        "too few to tell": "too few items to tell: ",
        "uncertain": "uncertain: ",
        "kept": "kept: ",
    }
    parts: dict[str, list[str]] = {verdict: [] for verdict in words}
    for name, verdict in verdicts.items():
        parts["worse" if verdict == "lost" else verdict].append(name)
    if parts["worse"] or parts["uncertain"]:
        del parts["kept"]
    sentence = "; ".join(f"{words[verdict]}{', '.join(names)}" for verdict, names in parts.items() if names)
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def verdict_in_words(
    languages: Mapping[str, Mapping[str, Any]],
    retained: Mapping[str, Any] | None,
    names: Mapping[str, str],
    abilities: Mapping[str, Mapping[str, Any]] | None = None,
    curve: object = None,
) -> list[str]:
    """The changes as sentences: one for each language, for the other languages and for each guard, and the choice of alpha.

    ``languages`` has the row of `compare` of each adapted language, ``retained`` the retention of the others, ``abilities``
    the rows of guards by their names.
    """
    verdicts = {"better": "Better", "tie": "Tie: the difference may be due to chance", "worse": "Worse"}
    lines = []
    for language, row in languages.items():
        verdict = verdicts.get(verdict_shown(row), "Too few held-out pairs to tell")
        lines.append(
            f"{names.get(language, language)}: {verdict}. {row['before']:.1f} → "
            f"{row['after']:.1f} % on {row['n']} held-out pairs, {difference_shown(row)}."
        )
    if retained is not None:
        limit = retained["limit"]
        loss = f"a loss of more than {limit:g} point{'' if limit == 1 else 's'}"
        verdict, meaning = {
            "kept": ("Kept", f"so {loss} can be excluded"),
            "lost": ("Worse", loss),
            "uncertain": ("Uncertain", f"so {loss} cannot be excluded"),
        }[retained["verdict"]]
        lines.append(
            f"{counted(len(retained['languages']), 'other language')}: {verdict}. "
            f"{difference_shown(retained['pooled'])} on average, {meaning}."
        )
    words = {"kept": "Kept", "lost": "Worse", "uncertain": "Uncertain", "better": "Better", "tie": "Kept (a tie)"}
    words |= {"worse": "Worse", "too few to tell": "Too few items to tell"}
    for name, row in (abilities or {}).items():
        line = f", against a red line of {0 - row['limit']:g}" if "limit" in row else ""
        lines.append(
            f"{name[:1].upper()}{name[1:]}, {counted(len(row['languages']), 'language')}: {words[verdict_shown(row)]}. "
            f"{difference_shown(row)} points{line}."
        )
    return lines if curve is None else [*lines, str(curve)]
