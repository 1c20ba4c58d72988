r"""Train a word aligner without gold links: lower layers of the starter, and word translation ranking on links of their own.

    python scripts/gettext_bitext.py --language ro --strip_accents --output out/bitext/ro-en.train.tsv.gz --packages \
        binutils-common cinnamon-l10n dpkg evolution-common freeciv-data gimp-data gnucash-common inkscape \
        kmymoney-common kstars-data libglib2.0-data libgtk-3-common libreoffice-l10n-ro phpmyadmin vlc-l10n
    python scripts/train_aligner.py --data DATA --bitext DATA/software out/bitext          # about 25 minutes
    python scripts/train_aligner.py --data DATA --languages fr --steps 2 --pairs 20 --output out/trial

``DATA`` contains folders with gold links (``alignment-gold``, ``wpt05-en-hi``), and ``--bitext`` names folders with files
``xx-en.train.tsv.gz``. The upper layers are dropped, because middle layers align best. In each round, the encoder links the
words of a bitext, and trains on these links (configs/word-aligner.yaml). Every encoder is measured by the suite
`word-alignment`.

Each step keeps its output, and an interrupted program resumes, even within a training; another output folder is required
for other options. The results are ``results.json`` there. ``--keep`` writes ``scripts/results/word_aligner.json`` instead,
from which ``scripts/update_tables.py`` writes docs/word_alignment.md, unless the stored results have more languages or pairs.
"""

from __future__ import annotations

import gzip
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stored_results import check_settings, refuse_less, reports_errors
from transformers import HfArgumentParser

from metaphrase.aligners.options import AlignOptions
from metaphrase.aligners.workflow import align_files
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.reduction import prune_layers
from metaphrase.evaluation.suites.running import EvaluateOptions, evaluate
from metaphrase.exceptions import DataError, MissingFileError, UsageError
from metaphrase.io.configuration import option
from metaphrase.io.digests import file_sha256
from metaphrase.io.environment import hardware, prepare_process
from metaphrase.io.files import write_json
from metaphrase.training.configuration import RunConfig
from metaphrase.training.run import TrainingRun

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "configs" / "word-aligner.yaml"
RESULTS = ROOT / "scripts" / "results" / "word_aligner.json"


class Round(NamedTuple):
    """How the words of a bitext are linked, and how long the encoder trains on the links.

    Rounds with the same ``draw`` use the same pairs, and others pairs that were drawn independently.
    """

    method: str
    steps: int
    learning_rate: float
    draw: int


#: Layer and method of the links were chosen on the first fifth of the gold pairs, as the suite's tuned settings are.
LAYERS, LAYER = 8, 7
ROUNDS = (Round("argmax", 200, 2e-5, draw=0), Round("csls", 400, 3e-5, draw=0), Round("csls", 400, 3e-5, draw=1))


@dataclass
class Options:
    """Options of the program."""

    data: str = option(help="Folder of the gold links.")
    bitext: list[str] = option([], "Folders of the bitext (default: DATA/software).")
    languages: list[str] = option(["fr", "es", "it", "pt", "ro"], "Languages of the bitext.")
    pairs: int = option(4000, "Pairs of each language, drawn at random.")
    steps: int | None = option(None, "Steps of each round, for a trial.")
    seed: int = option(42, "Seed of the pairs and of training.")
    output: str = option("out/aligner", "Folder of bitext, links and encoders.")
    keep: bool = option(False, "Store the results in scripts/results/word_aligner.json.")


def bitext_files(options: Options) -> list[Path]:
    """The file of each language.

    Raises:
        MissingFileError: A language has none.
    """
    folders = list(map(Path, options.bitext or [f"{options.data}/software"]))
    files = []
    for language in options.languages:
        name = f"{language}-en.train.tsv.gz"
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        if not paths:
            raise MissingFileError(f"{name} is in none of these folders: {', '.join(map(str, folders))} (--bitext).")
        files.append(paths[0])
    return files


def write_bitext(options: Options, folder: Path, draw: int) -> Path:
    """Draw pairs of each language."""
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in bitext_files(options):
            header, *rows = gzip.decompress(path.read_bytes()).splitlines()
            drawn = random.Random(options.seed + draw).sample(rows, min(options.pairs, len(rows)))
            (partial / path.name).write_bytes(gzip.compress(b"\n".join([header, *drawn, b""]), mtime=0))
        partial.rename(folder)
    return folder


def write_lower_layers(folder: Path) -> Path:
    """Write the starter without its upper layers."""
    if not (folder / "modules.json").exists():
        prune_layers(load_encoder("starter", device="cpu"), range(LAYERS)).save(str(folder))
    return folder


def trained(encoder: Path, number: int, options: Options) -> Path:
    """Link a bitext with an encoder, and train it on the links in the round with this number, counted from 0."""
    training, output = ROUNDS[number], Path(options.output)
    bitext = write_bitext(options, output / f"bitext-{training.draw + 1}", training.draw)
    links, folder = output / f"links-{number + 1}.parquet", output / f"round-{number + 1}"
    if not links.exists():
        align_files(
            AlignOptions(
                files=[str(bitext)],
                output=str(links),
                aligner="embedding",
                model=str(encoder),
                layer=LAYER,
                method=training.method,
                segmenter="whitespace",
            )
        )
    if not (folder / "release.json").exists():
        config = RunConfig(
            model=str(encoder),
            recipe=str(RECIPE),
            corpus=[str(links)],
            max_steps=options.steps or training.steps,
            learning_rate=training.learning_rate,
            freeze_word_embeddings=True,
            bf16=None,
            seed=options.seed,
            output_dir=str(folder),
            resume_from_checkpoint="true",
            report_to="none",
        )
        TrainingRun(config).execute()
    return folder


def measured(name: str, encoder: str, options: Options) -> list[dict[str, Any]]:
    """Measure an encoder on all gold links: with the default settings, and with the settings chosen on the first fifth."""
    folder = str(Path(options.output) / "evaluation")
    results = evaluate(EvaluateOptions(model=encoder, suite="word-alignment", data=options.data, output_dir=folder))
    if results["failed"]:
        raise DataError(f"These benchmarks failed: {results['failed']}. Results without them are not written.")
    rows = []
    for part, result in results["scores"].items():
        (score,) = result["languages"].values()
        chosen = ("layer", "method", "level", "threshold", "temperature")
        settings = {key: value for key, value in result["settings"].items() if key in chosen}
        row = {
            "encoder": name,
            "part": part,
            "aer": score["score"],
            "interval": score["interval"],
            "pairs": score["n"],
        }
        rows.append(row | {"settings": settings, "peers": result.get("facts", {}).get("peers", {})})
    return rows


@reports_errors
def main(argv: list[str]) -> int:
    """Train what is missing, measure, and write the results."""
    options = HfArgumentParser(Options).parse_args_into_dataclasses(argv)[0]
    settings = {key: getattr(options, key) for key in ("languages", "pairs", "steps", "seed")}
    output = Path(options.output)
    if options.keep:
        if options.steps is not None:
            raise UsageError("--steps is for trials, whose results are not stored. Omit --steps or --keep.")
        refuse_less(RESULTS, covers, covers({"settings": settings}))
    files = {path.name: file_sha256(path) for path in bitext_files(options)}
    check_settings(output, settings | {"rounds": ROUNDS, "bitext files": files})
    rows = rows_of(options, output)
    settings |= {"bitext": {path.name: file_sha256(path) for path in sorted((output / "bitext-1").glob("*"))}}
    content = {
        "settings": settings,
        "layers": LAYERS,
        "rounds": [training._asdict() for training in ROUNDS],
        "rows": rows,
    }
    write_json(RESULTS if options.keep else output / "results.json", content | {"hardware": hardware()})
    return 0


def covers(content: dict[str, Any]) -> dict[str, Any]:
    """Return the languages and pairs of results."""
    return {"languages": set(content["settings"]["languages"]), "pairs": content["settings"]["pairs"]}


def rows_of(options: Options, output: Path) -> list[dict[str, Any]]:
    """Train what is missing, and measure every encoder."""
    prepare_process()
    encoders = {"starter": "starter", "lower layers": str(write_lower_layers(output / "base"))}
    for number in range(len(ROUNDS)):
        previous = list(encoders.values())[-1]
        encoders[f"round {number + 1}"] = str(trained(Path(previous), number, options))
    return [row for name, encoder in encoders.items() for row in measured(name, encoder, options)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
