"""The model cards of scripts/evidence.py: one for each packaged recipe, with all of its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from evidence_table import CONFIG, STARTER, VARIANTS, Stored
from update_tables import CARDS

from metaphrase.encoders.starter import HUB_ID
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
[metaphrase](https://github.com/metaphrase/metaphrase){paper}. The tables show what this recipe gains and what it costs. The
weights are not published: the command below trains and measures them, and stores the task vector of each seed.

## Results

Differences from multilingual-e5-small, with or without its prompt, whichever is better, in points with 95 % intervals over
seeds and items together. A verdict is *better* or *worse* after Holm's correction over the results of this recipe, and
*tie* otherwise.
{results}

## Training

{steps} steps of {pairs} sentence pairs of the demo's bitext (localisation files of free software) in {languages}, with frozen
word embeddings; seeds {seeds}; {hardware}.

{recipe}

## Rebuild

```bash
python scripts/evidence.py --data benchmarks --only {name} --seeds {numbers}
```

## Limits

- The bitext (interface texts of software) and the number of steps are small{larger}.
- The vocabulary is that of the base, and the word embeddings were frozen.
- Results differ for other encoders, texts and seeds.

## Citation

{citation}
"""


def write_cards(results: Path, folder: Path = CARDS) -> list[Path]:
    """Write the cards of the packaged recipes that were trained with enough seeds, and return their paths."""
    stored = Stored.read(results)
    entries = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["recipes"]
    names = [name for name, entry in entries.items() if entry.get("packaged") and len(stored.seeds(name)) >= SEEDS]
    paths = []
    for name in names if stored.scores else []:
        paths.append(folder / f"multilingual-e5-small-{name}.md")
        paths[-1].write_text(card(stored, name, Recipe.load(entries[name]["recipe"])), encoding="utf-8")
    return paths


def card(stored: Stored, name: str, recipe: Recipe) -> str:
    """The text of the card of a recipe."""
    seeds = stored.seeds(name)
    facts = stored.training[name, seeds[0]]
    vectors = {seed: stored.training[name, seed]["vector"] for seed in seeds}
    metadata = {
        "license": "mit",
        "base_model": HUB_ID,
        "library_name": "metaphrase",
        "tags": list(dict.fromkeys(["sentence-similarity", "cross-lingual", "metaphrase", name])),
        "metaphrase": {"recipe": name, "seeds": seeds, "vectors": vectors, "versions": facts["versions"]},
    }
    citations = dict.fromkeys(OBJECTIVES[term.objective].citation.strip() for term in recipe.terms)
    return TEXT.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        name=name,
        base=HUB_ID,
        paper=f" ({recipe.paper})" if recipe.paper else "",
        larger="; the paper's setting is larger" if recipe.paper else "",
        results="\n".join(_results(stored, name)),
        steps=facts["steps"],
        pairs=facts["batch_size"],
        languages=", ".join(facts["languages"]),
        seeds=", ".join(map(str, seeds)),
        numbers=" ".join(map(str, seeds)),
        hardware="; ".join(stored.hardware),
        recipe=fence(yaml.safe_dump({"terms": facts["settings"]["terms"]}, sort_keys=False), "yaml"),
        citation=fence("\n\n".join(citations), "bibtex"),
    )


def _results(stored: Stored, name: str) -> Iterator[str]:
    """The tables of a recipe: every score of each of its encoders."""
    for variant, words in VARIANTS.items():
        found = stored.differences([name], variant, STARTER, stored.scores)
        rows: list[dict[str, Any]] = []
        for (_, score), difference in found.items():
            own: Sequence[float] = [
                one["score"] for key, one in stored.scores[score].items() if key[:2] == (name, variant)
            ]
            rows.append(
                {
                    "benchmark": score + ", lower is better" * stored.lower_is_better(score),
                    "starter": f"{stored.scores[score][STARTER, '', -1]['score']:.1f}",
                    "this recipe": f"{sum(own) / len(own):.1f}",
                    "difference": str(difference).rpartition(" ")[0],
                    "seeds": difference.seeds,
                    "verdict": difference.verdict,
                }
            )
        if rows:
            alphas = [alpha for key, alpha in stored.alphas.items() if key[0] == name]
            chosen = f", with alpha {', '.join(f'{alpha:g}' for alpha in alphas)} by seed" * (variant == "merged")
            yield f"\n### {words}{chosen}\n\n{table(rows)}"
