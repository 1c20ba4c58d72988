"""The facts of a run on its model card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from metaphrase.encoders.names import is_starter, split_revision
from metaphrase.encoders.starter import HUB_ID
from metaphrase.objectives.anchor import Anchor
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.provenance import (
    Origins,
    earlier_training,
    hub_licenses,
    named_base,
    provenance,
    stated,
    stated_base,
    stated_license,
    trained_languages,
)

#: The transform before a vocabulary projection, in words.
TRANSFORMS = {
    "fresh": "a fresh dense-GELU-LayerNorm transform, as the checkpoint has none",
    "pretrained": "the checkpoint's own masked language modelling transform",
    "none": "no transform",
}


def fill_card(
    card: AlignmentModelCardData,
    facts: Mapping[str, Any],
    *,
    origins: Origins | None = None,
    data_license: str | None = None,
    license: str | None = None,
) -> None:
    """Fill a model card with the facts of a run.

    ``origins`` are origins and licences of training files by their bare names; ``data_license`` is the licence of the others.
    Without ``license``, the release has the base model's, if it states one.
    """
    origins = {**hub_licenses(facts["files"]), **(origins or {})}
    card.command = facts["command"]
    card.seed = facts["seed"]
    card.corpus = [
        {key: file.get(key) for key in ("file", "language", "pairs", "sha256", "revision") if key in file}
        | provenance(file, origins=origins, data_license=data_license)
        for file in facts["files"]
    ]
    card.leakage = facts["leakage"]
    removed = facts.get("debias", {})
    card.debias = removed if removed.get("directions") else None
    card.teacher = _teacher(facts.get("recipe", {}))
    languages = {language for file in facts["files"] for language in file["languages"]}
    card.source = earlier_training(facts["model"])
    card.language = sorted(languages.union(trained_languages(facts["model"])))
    card.mlm_head = "; ".join(f"{name}: {TRANSFORMS[kind]}" for name, kind in facts["transforms"].items()) or None
    card.training_logs = training_log(facts["log_history"])
    card.training_seconds = facts.get("training_seconds")
    card.hardware = ", ".join(f"{key} {value}" for key, value in facts["hardware"].items())
    if is_starter(facts["model"]):
        card.base_model, card.license = HUB_ID, "mit"
    elif card.license is None and not license:
        for key, value in stated_license(facts["model"], revision=card.base_model_revision).items():
            setattr(card, key, value)
    card.base_model = card.base_model or stated_base(facts["model"])
    card.merge = named_base(facts.get("merge"), facts["model"], card.base_model)
    card.license = license or card.license


def training_log(log_history: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The training loss and the accuracies on dev sets at each logged step, also of the steps before a run was resumed.

    >>> entries = [{"loss": 1.2, "tr": 1.2}, {"eval_dev_mean_accuracy": 0.8, "eval_dev_sw_accuracy": 0.8}]
    >>> training_log([{"step": 5, "epoch": 0.5, **entry} for entry in entries])
    [{'Epoch': 0.5, 'Step': 5, 'Training Loss': 1.2, 'dev_mean_accuracy': 0.8}]
    """
    rows: dict[int, dict[str, float]] = {}
    for entry in log_history:
        shown = {key.removeprefix("eval_"): value for key, value in entry.items() if key.endswith("_mean_accuracy")}
        if "loss" in entry:
            shown["Training Loss"] = entry["loss"]
        if shown:
            rows.setdefault(entry["step"], {"Epoch": entry["epoch"], "Step": entry["step"]}).update(shown)
    return [*rows.values()]


def _teacher(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """The teacher of a recipe, for the card; None without one."""
    for term in recipe.get("terms", ()):
        args = term["args"] if term["objective"] == "anchor" else {}
        if teacher := args.get("teacher"):
            name, revision = (HUB_ID, None) if is_starter(teacher) else split_revision(teacher)
            known = {"revision": revision, "license": ", ".join(stated(teacher, "license"))}
            sides, toward = args.get("sides", Anchor.sides), args.get("toward", Anchor.toward)
            return {"name": name, **{k: v for k, v in known.items() if v}, "sides": sides, "toward": toward}
    return None
