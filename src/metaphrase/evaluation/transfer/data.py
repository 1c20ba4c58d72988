"""Reading the data of the fine-tuned tasks, from folders in their own formats or from the Hub.

A source is ``PATH[@split]`` or ``hf:org/name[:config][@split]``. A path is a file, or a folder of files with the names of
their benchmark. A config may contain ``{language}``::

    data/xnli@dev                       dev-en.tsv.gz, dev-sw.tsv.gz, …
    data/train-v1.1.json                SQuAD: English, because the name has no language
    data/ud@test                        en_ewt-ud-test.conllu, sw_…: the treebanks of a language are concatenated
    hf:facebook/xnli:{language}@test

Every reader returns a data set per language. Its column ``item`` identifies an item. In a parallel benchmark, the
translations of an item have the same identifier.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, get_dataset_config_names, load_dataset

from metaphrase.corpus.code_switching import PairedTexts
from metaphrase.corpus.hub import is_hub_name, parse_hub_name
from metaphrase.corpus.kinds import check_distinct
from metaphrase.corpus.text import open_text
from metaphrase.evaluation.result import item_id
from metaphrase.exceptions import DataError, MissingFileError
from metaphrase.io.work_folders import damage_in

logger = logging.getLogger(__name__)

ENGLISH = "en"
#: Code of a language in the name of a file, with a script or a region if there is one.
_CODE = "[a-z]{2,3}(?:-[A-Z][a-z]{3})?(?:-[A-Z]{2})?"

#: Universal part-of-speech tags.
_TAGS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X"
UPOS = tuple(_TAGS.split())

#: Priority of tags for a written word that consists of several syntactic words (Spanish "del") if none of them is the
#: head of the others, as in XTREME's conversion of the treebanks.
_FUSED_TAGS = {
    "": "VERB NOUN PROPN PRON ADJ NUM ADV INTJ AUX ADP DET PART CCONJ SCONJ X PUNCT",
    "es": "VERB AUX PRON ADP DET",
    "fr": "VERB AUX PRON NOUN ADJ ADV ADP DET PART SCONJ CONJ",
    "it": "VERB AUX ADV PRON ADP DET INTJ",
}

_UNTRANSLATED = ("", "NS")

Row = dict[str, Any]
Languages = dict[str, Dataset]


@dataclass(frozen=True)
class TransferData:
    """Training data, dev data that select the checkpoint, and test data, each with a data set per language."""

    train: Languages
    dev: Languages
    test: Languages

    def facts(self, *parts: str) -> dict[str, Any]:
        """Number and digest of the items of each language, by part; of all parts by default."""
        return {
            part: {code: {"n": len(data), "sha256": digest(data)} for code, data in getattr(self, part).items()}
            for part in parts or ("train", "dev", "test")
        }

    def item_ids(self) -> dict[str, list[int]]:
        """Ids of the test items of each language; the translations of an item have the same id."""
        return {code: [*map(item_id, data["item"])] for code, data in self.test.items()}


@dataclass(frozen=True)
class Format:
    """Names and rows of the files of a task.

    Attributes:
        names: Patterns of file names with a group ``language``, and ``split`` if the name has it.
        read: Reads the rows of a file of a language.
        adapt: Turns the number and row of a Hub data set into a row, or None to drop it.
        group: Column whose equal values stay together when items are split.
        joined: Whether several files of a language are concatenated, because their items differ.
    """

    names: tuple[re.Pattern[str], ...]
    read: Callable[[Path, str], Iterator[Row]]
    adapt: Callable[[int, Row], Row | None]
    group: str
    joined: bool = False


def read_languages(
    source: str,
    form: Format,
    *,
    split: str,
    languages: Sequence[str] | None = None,
    files: Sequence[Path] | None = None,
) -> Languages:
    """Read a source.

    The form of a source is in the module docstring; ``split`` is read if it names none. English comes first, then the others
    sorted by code. Of a folder, only ``files`` are read if they are given.
    """
    place, _, asked = source.rpartition("@")
    if not place or "/" in asked:  # no split: the "@" belongs to the path, if there is one
        place, asked = source, ""
    split = asked or split
    hub = is_hub_name(place)
    sets: Languages = {}
    for language, found in (
        _hub_rows(place, form, split, languages) if hub else _file_rows(place, form, split, languages, files)
    ):
        if not (part := list(found)):
            raise DataError(f"{source} has no rows for {language!r}.")
        data = Dataset.from_list(part)
        sets[language] = concatenate_datasets([sets[language], data]) if language in sets else data
    if missing := sorted(set(languages or ()) - set(sets)):
        raise MissingFileError(
            f"{source} has no {split} data for {', '.join(missing)}. It has: {', '.join(sets) or 'none'}."
        )
    if not sets:
        known = ", ".join(pattern.pattern.replace("\\", "") for pattern in form.names)
        raise MissingFileError(f"{source} has no {split} files. Their names should match {known}.")
    return {language: sets[language] for language in sorted(sets, key=lambda code: (code != ENGLISH, code))}


def files_of(path: Path, form: Format, split: str, files: Sequence[Path] | None = None) -> list[tuple[str, Path]]:
    """The language and path of each file of a folder that belongs to a split, or of a file itself.

    A file without a language in its name is English. ``files`` are the folder's; it is listed by default.
    """
    found = []
    for file in [path] if path.is_file() else sorted(path.iterdir() if files is None else files):
        name = file.name.removesuffix(".gz")
        match = next((match for pattern in form.names if (match := pattern.fullmatch(name))), None)
        groups = match.groupdict() if match else {}
        if path.is_file() or (match is not None and groups.get("split") in (None, split)):
            found.append((groups.get("language") or ENGLISH, file))
    return found


def _file_rows(
    place: str, form: Format, split: str, languages: Sequence[str] | None, files: Sequence[Path] | None
) -> Iterator[tuple[str, Iterator[Row]]]:
    if not Path(place).exists():
        raise MissingFileError(f"{place} does not exist.")
    found = [one for one in files_of(Path(place), form, split, files) if languages is None or one[0] in languages]
    check_distinct((file,) for _, file in found)
    known: dict[str, Path] = {}
    for language, file in found:
        if (other := known.setdefault(language, file)) is not file and not form.joined:
            raise DataError(
                f"{other} and {file} are both {split} data of {language!r}, and may share items. Move one of them to another "
                "folder, or pass a file instead of the folder."
            )
        yield language, form.read(file, language)


def _hub_rows(
    place: str, form: Format, split: str, languages: Sequence[str] | None
) -> Iterator[tuple[str, Iterator[Row]]]:
    parsed = parse_hub_name(place)
    config = parsed.config
    configs: dict[str, str | None] = {ENGLISH: config}
    if config is not None and "{language}" in config:
        template = re.compile(re.escape(config).replace(r"\{language\}", rf"(?P<language>{_CODE})", 1))
        if languages is None:
            entries = get_dataset_config_names(parsed.path, revision=parsed.revision)
            languages = [match["language"] for match in map(template.fullmatch, entries) if match]
        configs = {language: config.replace("{language}", language) for language in languages}
    for language, entry in configs.items():
        if languages is None or language in languages:
            data = load_dataset(parsed.path, entry, split=split, revision=parsed.revision)
            rows = (form.adapt(number, row) for number, row in enumerate(_named(data, place)))
            yield language, (row for row in rows if row is not None)


def _named(data: Dataset, place: str) -> Iterator[Row]:
    """Rows of a Hub data set with class names instead of class numbers; a number below 0 stands for a missing label."""
    kinds = {name: getattr(kind, "feature", kind) for name, kind in data.features.items()}
    names = {name: kind.names for name, kind in kinds.items() if hasattr(kind, "names")}
    for number, row in enumerate(data, 1):
        named = {}
        for name, classes in names.items():
            value = row[name]
            if any(label is None or label < 0 for label in (value if isinstance(value, list) else [value])):
                raise DataError(f"{place}: row {number} has no label: {name} is {value}. Read a split with labels.")
            named[name] = [classes[v] for v in value] if isinstance(value, list) else classes[value]
        yield {**row, **named}


# Pairs of sentences


def pairs_format(columns: PairedTexts, labels: Sequence[str]) -> Format:
    """Labelled pairs of sentences: XNLI and PAWS-X.

    Lines are ``first<TAB>second<TAB>label``, optionally preceded by an identifier. A header is skipped, and quotation marks
    are text. Untranslated rows ("NS" in PAWS-X, or empty) are dropped.
    """
    classes = {label: number for number, label in enumerate(labels)}
    if "contradiction" in classes:  # the machine-translated training sets have another name
        classes["contradictory"] = classes["contradiction"]

    def row_of(item: int | str, first: str, second: str, label: str) -> Row | None:
        if first.strip() in _UNTRANSLATED or second.strip() in _UNTRANSLATED:
            return None
        return {"item": str(item), columns.first: first, columns.second: second, "label": classes[label]}

    def read(path: Path, language: str) -> Iterator[Row]:
        dropped = header = 0
        with open_text(path) as lines:
            for number, line in enumerate(lines):
                fields = line.rstrip("\r\n").split("\t")
                if number == 0 and fields[-1] in ("label", "gold_label"):
                    header = 1  # items without identifiers have the same numbers as in files without a header
                    continue
                if len(fields) not in (3, 4) or fields[-1].strip() not in classes:
                    raise DataError(
                        f"{path}:{number + 1}: a line must have two sentences and one of {', '.join(labels)}, separated by "
                        f"tabs, but is {line.rstrip()[:80]!r}."
                    )
                item = fields[0] if len(fields) == 4 else number - header
                if (row := row_of(item, fields[-3], fields[-2], fields[-1].strip())) is None:
                    dropped += 1
                else:
                    yield row
        if dropped:
            logger.info("%s: %d untranslated rows dropped.", path, dropped)

    return Format(
        names=(
            re.compile(rf"(?P<split>train|dev|test)-(?P<language>{_CODE})\.tsv"),
            re.compile(rf"multinli\.(?P<split>train)\.(?P<language>{_CODE})\.tsv"),
        ),
        read=read,
        adapt=lambda number, row: row_of(number, row[columns.first], row[columns.second], str(row["label"])),
        group=columns.first,
    )


# Questions


def _read_questions(path: Path, language: str) -> Iterator[Row]:
    with open_text(path) as file:
        try:
            content = json.load(file)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path} is not in SQuAD's JSON format: {error}.") from error
    if not isinstance(content, dict) or "data" not in content:
        raise DataError(f"{path} is not in SQuAD's JSON format: the key 'data' is missing.")
    seen: set[str] = set()
    misplaced = 0
    with damage_in(path):
        for paragraph in (paragraph for article in content["data"] for paragraph in article["paragraphs"]):
            for question in paragraph["qas"]:
                if question["id"] in seen:
                    raise DataError(
                        f"{path} has two questions with the id {question['id']!r}. Give each an id of its own."
                    )
                seen.add(question["id"])
                answers = {key: [one[key] for one in question["answers"]] for key in ("text", "answer_start")}
                answers = _placed(answers, paragraph["context"])
                misplaced += NOWHERE in answers["answer_start"]
                row = {"item": question["id"], "question": question["question"], "context": paragraph["context"]}
                yield row | {"answers": answers}
    if misplaced:
        logger.warning("%s: %d questions have an answer that is not at its place in the context.", path, misplaced)


def _placed(answers: Mapping[str, Sequence[Any]], context: str) -> dict[str, list[Any]]:
    """Answers without spaces around them, with their place in the context: `NOWHERE` if they are empty or not there."""
    texts, starts = [], []
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        at = start + len(text) - len(text.lstrip())
        texts.append(text.strip())
        is_there = bool(texts[-1]) and at >= 0 and context.startswith(texts[-1], at)
        starts.append(at if is_there else NOWHERE)
    return {"text": texts, "answer_start": starts}


#: The place of an answer that is not in its context; no window is trained to contain it.
NOWHERE = -1

#: SQuAD's JSON: SQuAD itself, XQuAD, MLQA (context and question of one language: XLT) and XTREME's translations of SQuAD.
QUESTIONS = Format(
    names=(
        re.compile(rf"(?P<split>train|dev|test)-(?P<language>{_CODE})\.json"),
        re.compile(rf"(?P<split>dev|test)-context-(?P<language>{_CODE})-question-(?P=language)\.json"),
        re.compile(rf"squad\.translate\.(?P<split>train)\.en-(?P<language>{_CODE})\.json"),
        re.compile(r"(?P<split>train|dev)-v1\.1\.json"),
        re.compile(rf"xquad\.(?P<language>{_CODE})\.json"),
    ),
    read=_read_questions,
    adapt=lambda number, row: (
        {"question": row["question"], "context": row["context"], "answers": _placed(row["answers"], row["context"])}
        | {"item": str(row.get("id", number))}
    ),
    group="context",
)


# Treebanks


def treebank_format(*, fused: bool = False) -> Format:
    """Words and their universal part-of-speech tags, from CoNLL-U.

    If ``fused``, written words are read: one that consists of several syntactic words ("del", "don't") has the tag of the
    one that is highest in the tree, as in XTREME.
    """

    def read(path: Path, language: str) -> Iterator[Row]:
        with damage_in(path), open_text(path) as lines:
            for number, sentence in enumerate(_sentences(lines)):
                if fused:
                    words, tags = _fused(sentence, language)
                else:
                    words, tags = ([fields[at] for fields in sentence if fields[0].isdigit()] for at in (1, 3))
                if not words:
                    raise DataError(f"{path}: sentence {number + 1} has no words. Tabs must separate the columns.")
                if sum(word == "_" for word in words) >= max(1, len(words) - 1):
                    continue  # its words are withheld for copyright reasons
                if unknown := sorted(set(tags) - set(UPOS)):
                    raise DataError(
                        f"{path}: sentence {number + 1} has unknown tags: {', '.join(unknown)}. The tags are "
                        f"{', '.join(UPOS)}. The test files of XTREME have no tags. Use those of Universal Dependencies."
                    )
                yield {"item": f"{path.name}#{number}", "words": words, "tags": tags}

    def adapt(number: int, row: Row) -> Row:
        return {"item": str(number), "words": row["tokens"], "tags": row["upos"]}

    name = re.compile(r"(?P<language>[a-z]{2,3})_[a-z]+-ud-(?P<split>train|dev|test)\.conllu")
    return Format((name,), read, adapt, group="item", joined=True)


def _sentences(lines: Iterable[str]) -> Iterator[list[list[str]]]:
    """The fields of the words of each sentence; sentences are separated by empty lines."""
    for filled, block in groupby((line.rstrip("\r\n") for line in lines), bool):
        if filled and (sentence := [line.split("\t") for line in block if not line.startswith("#")]):
            yield sentence


def _fused(sentence: Sequence[Sequence[str]], language: str) -> tuple[list[str], list[str]]:
    heads = {fields[0]: fields[6] for fields in sentence if fields[0].isdigit()}
    tags = {fields[0]: fields[3] for fields in sentence if fields[0].isdigit()}
    ranks = _FUSED_TAGS.get(language, _FUSED_TAGS[""]).split()

    def depth(word: str) -> int:
        above: set[str] = set()
        while (word := heads.get(word, "0")) != "0" and word not in above:
            above.add(word)
        return len(above)

    def rank(word: str) -> int:
        return ranks.index(tags[word]) if tags[word] in ranks else len(ranks)

    words, kept, upto = [], [], 0
    for fields in sentence:
        number, _, last = fields[0].partition("-")
        if last:
            span = [str(at) for at in range(int(number), int(last) + 1)]
            words.append(fields[1])
            kept.append(tags[min(span, key=lambda word: (depth(word), rank(word)))])
            upto = int(last)
        elif number.isdigit() and int(number) > upto:
            words.append(fields[1])
            kept.append(fields[3])
    return words, kept


def digest(data: Dataset) -> str:
    """SHA-256 of the rows."""
    content = hashlib.sha256()
    for row in data:
        content.update(json.dumps(row, ensure_ascii=False, sort_keys=True).encode())
        content.update(b"\n")
    return content.hexdigest()
