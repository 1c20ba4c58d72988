"""The model cards of scripts/evidence.py: one for each packaged recipe, with its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from evidence_table import CONFIG, COSTS, GAINS, STARTER, UNTESTED, VARIANTS, Difference, Stored, machine
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
    facts = stored.training[name, seeds[0]]
    metadata = {
        "license": "mit",
        "base_model": HUB_ID,
        "library_name": "metaphrase",
        "tags": list(dict.fromkeys(["sentence-similarity", "cross-lingual", "metaphrase", name])),
        "metaphrase": {
            "recipe": name,
            "task_vectors_sha256": {seed: stored.training[name, seed]["vector"] for seed in seeds},
            "versions": facts["versions"],
        },
    }
    citations = dict.fromkeys(OBJECTIVES[term.objective].citation.strip() for term in recipe.terms)
    found = {variant: _differences(stored, name, variant, recipes) for variant in VARIANTS}
    release = entry.get("release")
    terms = facts["settings"]["terms"]
    return TEXT.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        name=name,
        base=HUB_ID,
        summary=_summary(found["raw"], facts["steps"]),
        paper=f"The recipe follows {recipe.paper}. " if recipe.paper else "",
        larger="; the paper's setting is larger" if recipe.paper else "",
        released=RELEASED.format(**release) if release else "",
        untested=f"\n{UNTESTED}" * any(one.interval is None for own in found.values() for one in own.values()),
        results="\n".join(_results(stored, name, found)),
        steps=facts["steps"],
        batch=facts["batch_size"],
        pairs=sum(facts["languages"].values()),
        languages=listed([language_name(one) for one in facts["languages"]]),
        length=facts["settings"]["max_length"],
        seeds=listed(list(map(str, seeds))),
        numbers=" ".join(map(str, seeds)),
        hardware=listed(sorted({machine(stored.training[name, seed]) for seed in seeds})),
        recipe=fence(yaml.safe_dump({"terms": terms}, sort_keys=False), "yaml"),
        changes=CHANGED * (terms != as_json(recipe.to_dict()["terms"])),
        citation=fence("\n\n".join(citations), "bibtex"),
    )


def _differences(stored: Stored, name: str, variant: str, recipes: Sequence[str]) -> dict[str, Difference]:
    """The differences of a recipe from the starter by score, with their verdicts among those of all recipes."""
    scores = [score for score in {**GAINS, **COSTS} if score in stored.scores]
    found = stored.differences(recipes, variant, STARTER, scores)
    return {score: one for (recipe, score), one in found.items() if recipe == name}


def _summary(found: Mapping[str, Difference], steps: int) -> str:
    """How many scores are better and worse, as a sentence."""
    verdicts = [one.verdict for one in found.values() if one.interval]
    better, worse = map(verdicts.count, ("better", "worse"))
    return (
        f"After {steps} steps, it is better than the starter on {better} of {len(verdicts)} scores, and worse on "
        f"{worse or 'none'}."
    )


def _results(stored: Stored, name: str, found: Mapping[str, Mapping[str, Difference]]) -> Iterator[str]:
    """The tables of a recipe, one for each of its encoders."""
    for variant, words in VARIANTS.items():
        rows: list[dict[str, Any]] = []
        for score, difference in found[variant].items():
            own = [one["score"] for key, one in stored.scores[score].items() if key[:2] == (name, variant)]
            rows.append(
                {
                    "benchmark": {**GAINS, **COSTS}[score],
                    "starter": f"{stored.scores[score][STARTER, '', -1]['score']:.1f}",
                    "this recipe": f"{fmean(own):.1f}",
                    "difference": difference.words,
                    "seeds": difference.seeds,
                    "verdict": difference.verdict,
                }
            )
        if rows:
            alphas = [curve["alpha"] for key, curve in stored.alphas.items() if key[0] == name]
            chosen = f", with alpha {', '.join(f'{alpha:g}' for alpha in alphas)} by seed" * (variant == "merged")
            yield f"\n### {words}{chosen}\n\n{table(rows)}"
