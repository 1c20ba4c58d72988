"""Scores of tagging: F1 over chunks of equal tags, and accuracy over words.

XTREME scores part-of-speech tags with seqeval, a scorer of named entities (``B-PER I-PER O``), and passes bare tags
(``NOUN VERB``) to it. seqeval reads the first letter of a tag as one of ``B I E S O`` and the rest as the entity type, so
that

- a run of equal tags is one chunk, and one wrong word makes the whole chunk wrong;
- ``SCONJ`` and ``SYM`` (S: an entity of one word) are never part of a run;
- ``SCONJ`` and ``CCONJ`` are chunks of the same type ``CONJ``, and confusing them is not an error;
- ``X`` has the type of no entity: at the end of a sentence its chunk does not end, and at the start of a sentence its chunk
  begins at the start of the previous chunk.

These scores are not comparable with accuracies. This module computes both.

References: Hu et al. 2020 (XTREME), section 3.2; seqeval 1.2 in its default mode, which follows conlleval
(Tjong Kim Sang and Buchholz 2000).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from metaphrase.exceptions import DataError

Tags = Sequence[Sequence[str]]


def tag_chunks(sentences: Tags, *, whole_types: bool = False) -> set[tuple[str, int, int]]:
    """The chunks of tagged sentences, as seqeval defines them.

    Returns type, first and last word of each chunk; the numbering of words has a gap of one after each sentence.
    ``whole_types`` uses the whole tag as the type, as seqeval did before version 1.0, which distinguishes ``SCONJ`` from
    ``CCONJ``.

    >>> sorted(tag_chunks([["DET", "NOUN", "NOUN", "SYM", "SYM"]]))
    [('ET', 0, 0), ('OUN', 1, 2), ('YM', 3, 3), ('YM', 4, 4)]
    """
    chunks = set()
    begin, letter, kind = 0, "O", ""
    for at, tag in enumerate([*(tag for sentence in sentences for tag in (*sentence, "O")), "O"]):
        next_letter, next_kind = tag[0], tag.split("-")[-1] if whole_types else tag[1:].split("-", 1)[-1] or "_"
        changed = kind != next_kind
        if letter in "ES" or (letter in "BI" and next_letter in "BSO") or (letter not in "O." and changed):
            chunks.add((kind, begin, at - 1))
        if next_letter in "BS" or (letter in "ESO" and next_letter in "EI") or (next_letter not in "O." and changed):
            begin = at
        letter, kind = next_letter, next_kind
    return chunks


def tag_scores(
    gold: Tags, predicted: Tags, *, whole_types: bool = False
) -> tuple[dict[str, float], list[tuple[int, int, int]]]:
    """Scores of tags in percent, and for each sentence the numbers of correct, predicted and gold chunks.

    A chunk is correct if a gold chunk of the same type has the same first and last word. Scores are means over chunks
    ("micro"); without chunks they are 0.

    >>> scores, _ = tag_scores([["DET", "NOUN", "NOUN"]], [["DET", "NOUN", "VERB"]])
    >>> round(scores["f1"], 1), round(scores["accuracy"], 1)
    (40.0, 66.7)
    """
    pairs = [list(zip(tags, guesses, strict=True)) for tags, guesses in zip(gold, predicted, strict=True)]
    if not any(pairs):
        raise DataError("There are no words to score.")
    wanted, found = (tag_chunks(tags, whole_types=whole_types) for tags in (gold, predicted))
    sentence_of = [number for number, tags in enumerate(gold) for _ in range(len(tags) + 1)]
    counts = [Counter(sentence_of[last] for _, _, last in chunks) for chunks in (wanted & found, found, wanted)]
    right, guessed, true = len(wanted & found), len(found), len(wanted)
    scores = {
        "f1": _percent(2 * right, guessed + true),
        "accuracy": _percent(sum(tag == guess for sentence in pairs for tag, guess in sentence), sum(map(len, pairs))),
        "precision": _percent(right, guessed),
        "recall": _percent(right, true),
    }
    return scores, [(counts[0][i], counts[1][i], counts[2][i]) for i in range(len(pairs))]


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
