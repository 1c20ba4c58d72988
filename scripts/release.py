"""Reproduce the release of a model card from its recorded facts, and report differences.

    python scripts/release.py runs/demo/README.md --output runs/again

The card's front matter records, under `metaphrase`, the command, the seed, and the SHA-256 of every training file and of
the weights. The files are verified before training. The same command with the same versions produces the same weights on
the same hardware; on other hardware, weights are not compared.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from metaphrase.corpus.files import find_files
from metaphrase.io.digests import file_sha256

#: The installed command line; cards record its commands.
METAPHRASE = (sys.executable, "-m", "metaphrase")
#: Facts that must be equal on any hardware, in addition to the data. Versions may explain different weights.
BINDING = ("recipe", "seed", "base_model_revision")
#: Facts that identify training data. Facts about their origin may differ.
DATA_FACTS = ("file", "language", "pairs", "sha256", "revision")


def main(argv: Sequence[str] | None = None) -> int:
    """Reproduce a release; return 0 if all reproducible facts are equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", type=Path, help="path of a card, such as runs/demo/README.md")
    parser.add_argument(
        "--output", type=Path, help="output folder (default: runs/NAME-again, for a card in a folder NAME)"
    )
    options = parser.parse_args(argv)
    recorded = read_facts(options.card)
    command = [
        str(Path(word).expanduser()) if word.startswith("~") else word for word in shlex.split(recorded["command"])
    ]
    if missing := differing_files(recorded["data"], training_files(command)):
        print("The training data differ from those of the card. Nothing was trained.", *missing, sep="\n  ")
        return 1
    command = at_commits(command, recorded["data"])
    output = options.output or Path("runs") / f"{options.card.resolve().parent.name}-again"
    print(f"Training to {output}: {recorded['command']}")
    if metaphrase([*command[1:], "--output_dir", str(output)]) != 0:
        return 1
    differences, same = compare(recorded, read_facts(made_card(output)))
    print("", *(differences or ["No differences."]), sep="\n")
    return 0 if same else 1


def metaphrase(arguments: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    return subprocess.run([*METAPHRASE, *arguments], check=False).returncode


def made_card(output: Path) -> Path:
    """Return the card of a release. A recipe with language embeddings has one release per language; English comes last."""
    releases = sorted(
        (path.parent for path in output.glob("*/reference.json")), key=lambda folder: (folder.name == "en", folder)
    )
    return next(folder for folder in [output, *releases] if (folder / "reference.json").exists()) / "README.md"


def read_facts(card: Path) -> dict[str, Any]:
    """Return the facts in the front matter of a card, under `metaphrase`."""
    if not card.is_file():
        raise SystemExit(f"The card {card} does not exist. Name the README.md of a run.")
    facts = ModelCard.load(card).data.to_dict().get("metaphrase") or {}
    if "runs" in facts or "task_vectors_sha256" in facts:
        raise SystemExit(f"{card} describes several runs. Repeat them with the command in its section Rebuild.")
    check_repeatable(facts.get("command"))
    if missing := [key for key in ("command", "seed", "data") if key not in facts]:
        raise SystemExit(f"{card} does not record its {', '.join(missing)}, so it cannot be reproduced.")
    return dict(facts)


def check_repeatable(command: str | None) -> None:
    """Refuse the commands that do not train, and those that measure the machine first."""
    name = shlex.split(command or "")[1:2]
    if name and name[0] not in ("demo", "train"):
        raise SystemExit(f"To reproduce a release of `metaphrase {name[0]}`, run the command itself: {command}")


def training_files(command: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of the training files of a command, by file name."""
    name, *arguments = command[1:]
    printed = subprocess.run([*METAPHRASE, name, *arguments, "--print-config"], capture_output=True, check=False)
    if printed.returncode != 0:
        raise SystemExit(printed.stderr.decode())
    chosen = yaml.safe_load(printed.stdout)
    digests = {}
    for file in find_files(chosen["corpus"], languages=chosen["languages"] or None):
        names, parts = [path.name for path in file.paths], [file_sha256(path) for path in file.paths]
        digests[",".join(names)] = ",".join(parts)
    return digests


def differing_files(recorded: Iterable[Mapping[str, Any]], present: Mapping[str, str]) -> list[str]:
    """Describe every recorded file that is missing or has changed."""
    lines = []
    for row in recorded:
        name, wanted = row["file"], row.get("sha256")
        if name.startswith("hf:") or wanted is None:
            continue
        if name not in present:
            lines.append(f"{name} is missing.")
        elif present[name] != wanted:
            lines.append(f"{name} has the SHA-256 {present[name]}, not {wanted}.")
    return lines


def at_commits(command: Sequence[str], recorded: Iterable[Mapping[str, Any]]) -> list[str]:
    """Pin the data sets of the Hub in a command to the commits recorded in the card."""
    commits = {row["file"].split("#")[0]: row["revision"] for row in recorded if row.get("revision")}
    return [f"{name}#{commits[name]}" if (name := word.split("#")[0]) in commits else word for word in command]


def data_facts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts that identify training data; a data set of the Hub is identified by its name and its commit."""
    return [
        {key: row[key] for key in DATA_FACTS if row.get(key) is not None} | {"file": row["file"].split("#")[0]}
        for row in rows
    ]


def compare(recorded: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Describe the differences between two releases, and return whether all reproducible facts are equal."""
    binding = [
        f"{key}: {recorded.get(key)!r} was recorded, but the new release has {made.get(key)!r}."
        for key in BINDING
        if recorded.get(key) != made.get(key)
    ]
    binding += compare_data(*(data_facts(facts.get("data") or ()) for facts in (recorded, made)))
    lines = binding + compare_versions(recorded.get("versions") or {}, made.get("versions") or {})
    if recorded.get("hardware") != made.get("hardware"):
        lines.append(
            f"hardware: {recorded.get('hardware')} was recorded, this is {made.get('hardware')}; weights are not compared."
        )
        return lines, not binding
    same_weights = True
    for name, digest in sorted((made.get("weights") or {}).items()):
        recorded_digest = (recorded.get("weights") or {}).get(name)
        if recorded_digest is None:
            lines.append(f"{name}: the card records no SHA-256; the new one is {digest}.")
        elif recorded_digest != digest:
            same_weights = False
            lines.append(f"{name}: the SHA-256 {recorded_digest} was recorded, the new one is {digest}.")
    return lines, not binding and same_weights


def compare_data(recorded: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the differences between the training data of two releases."""
    lines = [f"data: {row} was recorded, but not used." for row in recorded if row not in made]
    lines += [f"data: {row} was used, but not recorded." for row in made if row not in recorded]
    if not lines and recorded != made:
        lines.append("data: the same files were read in a different order or number of times.")
    return lines


def compare_versions(recorded: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Describe the differences between the versions of two releases."""
    return [
        f"version of {name}: {recorded.get(name)} was recorded, {installed.get(name)} is installed."
        for name in sorted({*recorded, *installed})
        if recorded.get(name) != installed.get(name)
    ]


if __name__ == "__main__":
    sys.exit(main())
