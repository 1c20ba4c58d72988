"""Scores of extractive question answering: exact match and F1, as in the official scripts of MLQA and SQuAD.

The script of MLQA normalises an answer by its language. The script of SQuAD, which also scores XQuAD, treats every text as
English. Both score a question by the best of its gold answers, and assign 0 to a question without an answer.

References: Lewis et al. 2020, "MLQA: Evaluating Cross-lingual Extractive Question Answering" (section 6.1 and its
evaluation script); Rajpurkar et al. 2016, "SQuAD" (section 6.1 and its evaluation script).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from metaphrase.exceptions import DataError

#: Articles that are removed, by language. Hindi and Chinese have none. The two letters of the Arabic article are removed
#: everywhere, even inside a word, as in the official script.
ARTICLES = {
    "en": r"\b(?:a|an|the)\b",
    "es": r"\b(?:un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(?:của|là|cái|chiếc|những)\b",
    "de": r"\b(?:ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": "ال",
    "hi": None,
    "zh": None,
}
_HAN = re.compile("[\u4e00-\u9fa5]")


def normalise_answer(text: str, language: str | None) -> str:
    """An answer in lower case, without punctuation and articles, its words separated by single spaces.

    In the seven languages of MLQA, punctuation is Unicode's and the ASCII symbols, and each Chinese character is a word.
    None normalises as SQuAD does: English articles, ASCII punctuation.

    >>> normalise_answer("The U.S. «Army»", "en"), normalise_answer("The U.S. «Army»", None)
    ('us army', 'us «army»')
    >>> normalise_answer("Der König", "de"), normalise_answer("在1990年", "zh")
    ('könig', '在 1990 年')
    """
    if language is not None and language not in ARTICLES:
        raise DataError(
            f"MLQA normalises {', '.join(ARTICLES)}, not {language!r}. Score other languages as SQuAD does."
        )
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    if language is not None:
        text = "".join(char for char in text if not unicodedata.category(char).startswith("P"))
    articles = ARTICLES["en" if language is None else language]
    if articles is not None:
        text = re.sub(articles, " ", text)
    if language == "zh":
        text = _HAN.sub(r" \g<0> ", text)
    return " ".join(text.split())


def answer_f1(prediction: str, gold: str, language: str | None) -> float:
    """Harmonic mean of precision and recall over the words of an answer, in [0, 1].

    Two answers that are empty after normalisation have no common word: their F1 is 0, although they match exactly.

    >>> answer_f1("the red house", "a red car", "en")
    0.5
    """
    predicted, wanted = (normalise_answer(text, language).split() for text in (prediction, gold))
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def exact_match(prediction: str, gold: str, language: str | None) -> bool:
    """Whether two answers are equal after normalisation."""
    return normalise_answer(prediction, language) == normalise_answer(gold, language)


def answer_scores(
    predictions: Mapping[str, str], golds: Mapping[str, Sequence[str]], language: str | None
) -> tuple[dict[str, float], list[float]]:
    """F1 over words and share of exact matches in percent, and the F1 of each question in [0, 1].

    The best gold answer of a question counts. A question without an answer, predicted or gold, scores 0.
    """
    if not golds:
        raise DataError("There are no questions to score.")
    f1_n, matches = [], 0
    for question, answers in golds.items():
        pairs = [(predictions[question], gold) for gold in answers if question in predictions]
        f1_n.append(max((answer_f1(*pair, language) for pair in pairs), default=0.0))
        matches += any(exact_match(*pair, language) for pair in pairs)
    return {"f1": 100 * sum(f1_n) / len(f1_n), "exact_match": 100 * matches / len(f1_n)}, f1_n
