"""The model cards of scripts/evidence.py: one for each packaged recipe, with its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from evidence_table import CONFIG, HEADINGS, STARTER, UNTESTED, VARIANTS, Difference, Stored
from stored_results import machine_words
from update_tables import CARDS

from metaphrase.corpus.identification import language_name
from metaphrase.encoders.starter import HUB_ID
from metaphrase.io.counts import listed
from metaphrase.io.files import as_json
from metaphrase.objectives import OBJECTIVES
from metaphrase.publishing.card import fence, table
from metaphrase.training.recipe import Recipe

#: Folder of the results of which cards are written.
SETTING = "starter-100x64"
#: Fewest seeds of a card.
SEEDS = 3

TEXT = """\
---
{metadata}---

# multilingual-e5-small with {name}

[multilingual-e5-small](https://huggingface.co/{base}), trained with the recipe `{name}` of
[metaphrase](https://github.com/metaphrase/metaphrase). {summary}

{paper}The weights are not published; the command under *Rebuild* trains and measures them.

## Results

The starter is multilingual-e5-small with weights rounded to 4 bits (`starter@wheel`). It is measured with and without its
prompt, and each score is compared with the better of the two. Encoders *as trained* are measured without prompts.{released}

Differences are in points, with 95 % intervals over seeds and items together. *Seeds* is the number of trained encoders that
were measured; with one seed, the interval covers items only. A verdict is *better* or *worse* after Holm's correction over
all recipes of the comparison, and *tie* otherwise. ↓: lower is better.{untested}
{results}

## Training

- **Text**: the demo's bitext, {pairs:,} sentence pairs from localisation files of free software: English, and {languages}.
- **Steps**: {steps} steps of {batch} pairs, with seeds {seeds}, on {hardware}.
- **Encoder**: word embeddings are frozen. Sentences are truncated to {length} pieces.
- **Recipe**:{changes}

{recipe}

## Rebuild

In a clone of metaphrase, with a folder of benchmarks:

```bash
python scripts/evidence.py --data benchmarks --only {name} --seeds {numbers}
```

The key `task_vectors_sha256` in the metadata of this card contains, for each seed, the digest of the task vector: the change
of the weights in training. A repeated run has the same digests only on the same hardware and with the same versions.

## Limits

- The bitext (short strings of software) and the number of steps are small{larger}.
- The vocabulary is unchanged, and the word embeddings were frozen.
- Results differ for other encoders, texts and seeds.

## Citation

{citation}
"""

RELEASED = (
    " *Merged and debiased* encoders are merged with the starter (weight {merge:g}), and {debias} directions of language "
    "identity are projected out."
)
CHANGED = " the terms differ from the packaged recipe, because there is no monolingual text and the run is short."


def write_cards(results: Path, folder: Path = CARDS) -> list[Path]:
    """Write the cards of the packaged recipes that were trained with enough seeds, and return their paths."""
    stored = Stored.read(results)
    entries = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["recipes"]
    names = [name for name, entry in entries.items() if entry.get("packaged") and len(stored.seeds(name)) >= SEEDS]
    recipes = [name for name in entries if stored.seeds(name)]
    paths = []
    for name in names if stored.scores else []:
        paths.append(folder / f"multilingual-e5-small-{name}.md")
        paths[-1].write_text(card(stored, name, entries[name], recipes), encoding="utf-8")
    return paths


def card(stored: Stored, name: str, entry: Mapping[str, Any], recipes: Sequence[str]) -> str:
    """The text of the card of a recipe, with its entry in the configuration. ``recipes`` are all that are compared."""
    recipe, seeds = Recipe.load(entry["recipe"]), stored.seeds(name)
    training = {seed: stored.training[name, seed] for seed in seeds}
    facts = training[seeds[0]]
    terms = facts["settings"]["terms"]
    metadata = {
        "license": "mit",
        "base_model": HUB_ID,
        "library_name": "metaphrase",
        "tags": list(dict.fromkeys(["sentence-similarity", "cross-lingual", "metaphrase", name])),
        "metaphrase": {
            "recipe": name,
            "task_vectors_sha256": {seed: training[seed]["vector"] for seed in seeds},
            "versions": facts["versions"],
        },
    }
    citations = dict.fromkeys(OBJECTIVES[term.objective].citation.strip() for term in recipe.terms)
    differences = {variant: _differences(stored, name, variant, recipes) for variant in VARIANTS}
    has_untested = any(
        difference.interval is None for by_score in differences.values() for difference in by_score.values()
    )
    return TEXT.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        name=name,
        base=HUB_ID,
        summary=_summary(differences["raw"], facts["steps"]),
        paper=f"The recipe follows {recipe.paper}. " if recipe.paper else "",
        larger="; the paper's setting is larger" if recipe.paper else "",
        released=RELEASED.format(**entry["release"]) if entry.get("release") else "",
        untested=f"\n{UNTESTED}" if has_untested else "",
        results="\n".join(_result_tables(stored, name, differences)),
        steps=facts["steps"],
        batch=facts["batch_size"],
        pairs=sum(facts["languages"].values()),
        languages=listed([language_name(language) for language in facts["languages"]]),
        length=facts["settings"]["max_length"],
        seeds=listed(list(map(str, seeds))),
        numbers=" ".join(map(str, seeds)),
        hardware=listed(sorted({machine_words(run["hardware"]) for run in training.values()})),
        recipe=fence(yaml.safe_dump({"terms": terms}, sort_keys=False), "yaml"),
        changes=CHANGED if terms != as_json(recipe.to_dict()["terms"]) else "",
        citation=fence("\n\n".join(citations), "bibtex"),
    )


def _differences(stored: Stored, name: str, variant: str, recipes: Sequence[str]) -> dict[str, Difference]:
    """The differences of a recipe from the starter by score, with their verdicts among those of all recipes."""
    differences = stored.compare_all(recipes, variant, STARTER)
    return {score: difference for (recipe, score), difference in differences.items() if recipe == name}


def _summary(differences: Mapping[str, Difference], steps: int) -> str:
    """How many scores are better and worse, as a sentence."""
    verdicts = [difference.verdict for difference in differences.values() if difference.interval]
    return (
        f"After {steps} steps, it is better than the starter on {verdicts.count('better')} of {len(verdicts)} scores, and "
        f"worse on {verdicts.count('worse') or 'none'}."
    )


def _result_tables(stored: Stored, name: str, differences: Mapping[str, Mapping[str, Difference]]) -> Iterator[str]:
    """The tables of a recipe, one for each of its encoders, from the differences by variant and score."""
    for variant, heading in VARIANTS.items():
        rows: list[dict[str, Any]] = [
            {
                "benchmark": HEADINGS[score],
                "starter": f"{fmean(stored.values(score, STARTER, '')):.1f}",
                "this recipe": f"{fmean(stored.values(score, name, variant)):.1f}",
                "difference": difference.words,
                "seeds": difference.seeds,
                "verdict": difference.verdict,
            }
            for score, difference in differences[variant].items()
        ]
        if variant == "merged":
            heading += f", with alpha {stored.chosen_alphas(name)} by seed"
        if rows:
            yield f"\n### {heading}\n\n{table(rows)}"
