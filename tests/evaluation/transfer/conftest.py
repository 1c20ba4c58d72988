"""Tiny benchmarks in the real formats, whose answers a tiny encoder can learn."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

TRAINERS = Path(__file__).parents[3] / "trainers"
LABELS = ("entailment", "neutral", "contradiction")


def program(name: str) -> ModuleType:
    """Import a training program."""
    spec = importlib.util.spec_from_file_location(name, TRAINERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def words(bitext) -> list[str]:
    found = sorted({word.strip(".,?!") for row in bitext for word in row["target"].split()})
    return [word for word in found if word]


@pytest.fixture(scope="session")
def nli(tmp_path_factory, words) -> Path:
    """Sixty items in English and Swahili, three with each premise; each label has a different hypothesis."""
    folder = tmp_path_factory.mktemp("xnli")
    rows = []
    for item in range(60):
        premise = f"{words[item // 3 % len(words)]} {words[(item // 3 * 7 + 1) % len(words)]} {item // 3}"
        rows.append((premise, ("dog", "water", "red house")[item % 3], LABELS[item % 3]))
    for language in ("en", "sw"):
        lines = [f"{premise} {language}\t{hypothesis}\t{label}\n" for premise, hypothesis, label in rows]
        for split in ("train", "dev", "test"):
            with gzip.open(folder / f"{split}-{language}.tsv.gz", "wt", encoding="utf-8", newline="\n") as file:
                file.writelines(lines)
    return folder


@pytest.fixture(scope="session")
def questions(tmp_path_factory, words) -> Path:
    """Twelve paragraphs with two questions each, in English and German."""
    folder = tmp_path_factory.mktemp("xquad")
    for language in ("en", "de"):
        draw = random.Random(1)
        paragraphs = []
        for number in range(12):
            sentence = [draw.choice(words) for _ in range(30)]
            context = " ".join([*sentence, language, str(number)])
            asked = []
            for at in (3, 17):
                answer = " ".join(sentence[at : at + 2])
                start = len(" ".join(sentence[:at])) + 1
                asked.append(
                    {
                        "id": f"{number}-{at}",
                        "question": f"{sentence[at - 1]}?",
                        "answers": [{"text": answer, "answer_start": start}],
                    }
                )
            paragraphs.append({"context": context, "qas": asked})
        content = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (folder / f"xquad.{language}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def treebanks(tmp_path_factory, words) -> Path:
    """Thirty sentences in English and Spanish; a word's first letter determines its tag."""
    folder = tmp_path_factory.mktemp("ud")
    tags = ("NOUN", "VERB", "SCONJ", "CCONJ", "X")
    tag_of = {word: tags[ord(word[0].lower()) % len(tags)] for word in words}
    for name in ("en_a-ud-dev", "en_a-ud-test", "es_b-ud-test"):
        draw, blocks = random.Random(name), []
        for number in range(30):
            chosen = [draw.choice(words) for _ in range(6)]
            rows = [
                f"{at}\t{word}\t{word}\t{tag_of[word]}\t_\t_\t{at - 1}\tdep\t_\t_" for at, word in enumerate(chosen, 1)
            ]
            blocks.append("\n".join([f"# sent_id = {number}", *rows]) + "\n\n")
        (folder / f"{name}.conllu").write_text("".join(blocks), encoding="utf-8")
    return folder


@pytest.fixture
def common(tiny_encoder_dir, tmp_path) -> list[str]:
    """Options of a short run of the tiny encoder."""
    return [
        *("--model", str(tiny_encoder_dir), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"),
        *("--max_length", "48", "--learning_rate", "1e-3", "--per_device_train_batch_size", "8"),
        *("--eval_strategy", "steps", "--eval_steps", "4", "--max_steps", "8", "--logging_steps", "2"),
    ]
