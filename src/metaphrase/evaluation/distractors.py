"""Distractors: English sentences that differ from a given one in a number, name, negation, comparison or cause.

An encoder that captures only the topic of a sentence confuses them with the original. Each rule replaces, inserts or removes
a few words, and skips a sentence if the result might be ungrammatical.

Reference: Chen et al. 2023, "xSIM++: An Improved Proxy to Bitext Mining Performance for Low-Resource Languages", which alters
causality (here negation, comparison and cause), entities and numbers. The rules are ours: they need no models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Edit(NamedTuple):
    """A replacement of the characters from ``start`` to the exclusive end ``end``."""

    start: int
    end: int
    text: str


def distractors(text: str) -> dict[str, str]:
    """Return altered versions of an English sentence, at most one for each of `KINDS`.

    >>> distractors("Tom bought two more apples than Mary.")["number"]
    'Tom bought three more apples than Mary.'
    >>> distractors("He is tall because he drinks milk.")  # doctest: +NORMALIZE_WHITESPACE
    {'negation': 'He is not tall because he drinks milk.', 'cause': 'He is tall although he drinks milk.'}
    >>> distractors("Nice weather!")
    {}
    """
    changed = {}
    plain = text.replace("’", "'")
    for kind, rule in KINDS.items():
        if (edit := next((edit for edit in rule(plain) if _fits(plain, edit)), None)) is not None:
            changed[kind] = text[: edit.start] + edit.text + text[edit.end :]
    return changed


def _fits(text: str, edit: Edit) -> bool:
    """Whether an edit changes something, and an article before it keeps its form."""
    old = text[edit.start : edit.end]
    article = _before(text, edit.start) in ("a", "an")
    return edit.text != old and not (article and bool(_VOWEL.match(edit.text)) != bool(_VOWEL.match(old)))


#: Words and numbers after "an", such as 8, 80, 11th, 18,000 and the year 1850; "European" and "one" follow "a".
_VOWEL = re.compile(r"(?!eu|one\b)[aeio]|un(?!i)|8|1[18](?:\d\d)?(?!\d)", re.IGNORECASE)


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _before(text: str, at: int) -> str:
    """The word before a position, in lower case; ``""`` after punctuation or at the start."""
    match = re.search(r"([\w']+)\s+$", text[:at])
    return match[1].lower() if match else ""


def _after(text: str, at: int) -> str:
    """The word after a position; ``""`` before punctuation or at the end."""
    match = re.match(r"\s+([\w']+)", text[at:])
    return match[1] if match else ""


def _like(word: str, model: str) -> str:
    """A word with the capital of another."""
    return word[0].upper() + word[1:] if model[0].isupper() else word


def _has(text: str, words: str) -> bool:
    """Whether a text has one of some words, separated by bars."""
    return re.search(rf"\b(?:{words})\b", text, re.IGNORECASE) is not None


# Numbers

_DIGITS = re.compile(r"(?<![\w.,:/#'-])(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)(?![\w:/'-]|[.,]\d|\s*[–:-]\s*\d)")
_ORDINAL = re.compile(r"(?<![\w.,-])(\d+)(?:th|st)\b(?!-)")
_NUMBER_WORDS = _pairs(
    "two=three three=four four=five five=six six=seven seven=eight eight=nine nine=eight ten=nine eleven=ten "
    "twelve=eleven twenty=thirty thirty=forty forty=fifty fifty=sixty sixty=seventy seventy=eighty eighty=ninety "
    "ninety=eighty hundred=thousand thousand=hundred million=billion billion=million"
)
_ORDINALS = _pairs("first=second second=third third=fourth fourth=fifth fifth=sixth last=first")
_VALUES: dict[str, float] = {
    word: value
    for words, values in (
        ("one two three four five six seven eight nine ten eleven twelve", range(1, 13)),
        ("twenty thirty forty fifty sixty seventy eighty ninety", range(20, 100, 10)),
        ("hundred thousand million billion", (100, 1000, 10**6, 10**9)),
        ("first second third fourth fifth sixth last", (1, 2, 3, 4, 5, 6, math.inf)),
    )
    for word, value in zip(words.split(), values, strict=True)
}
#: Text between the numbers of a pair, such as "2 or 3", "two million to three million", "the first and the second".
_BETWEEN = r"(?: ?%| (?:percent|hundred|thousand|million|billion))?(?:,|,? (?:and|or|to))(?: the)? [$£€]?"
_NUMBER_BEFORE = re.compile(rf"([\w.,]+){_BETWEEN}$")
_NUMBER_AFTER = re.compile(rf"{_BETWEEN}([\w.,]+)")
_NUMBER_WORD = re.compile(rf"(?<![\w'-])({'|'.join(_NUMBER_WORDS)})(?![\w'-])", re.IGNORECASE)
_THE_ORDINAL = re.compile(rf"\b(?<=the )({'|'.join(_ORDINALS)})(?= [a-z])")


def _numbers(text: str) -> Iterator[Edit]:
    return (edit for edit in _changed_numbers(text) if not _collides(text, edit))


def _collides(text: str, edit: Edit) -> bool:
    """Whether a changed number equals or passes the other number of a pair: "2 or 3" would be "3 or 3"."""
    near = _NUMBER_BEFORE.search(text[max(0, edit.start - 40) : edit.start]), _NUMBER_AFTER.match(text, edit.end)
    others = [value for match in near if match and not math.isnan(value := _value(match[1]))]
    old, new = _value(text[edit.start : edit.end]), _value(edit.text)
    return any(new == other or (new < other) != (old < other) for other in others)


def _value(number: str) -> float:
    """Value of a number in digits or words, or of an ordinal; NaN for other text."""
    word = number.rstrip(".,").lower()
    digits = re.fullmatch(r"([0-9][0-9,]*(?:\.[0-9]+)?)(?:st|[nr]d|th)?", word)
    return float(digits[1].replace(",", "")) if digits else _VALUES.get(word, math.nan)


def _changed_numbers(text: str) -> Iterator[Edit]:
    for match in _DIGITS.finditer(text):
        if (other := _other_number(match[1])) is not None:
            yield Edit(*match.span(), other)
    for match in _ORDINAL.finditer(text):
        if 5 <= int(match[1]) <= 21:
            yield Edit(*match.span(), f"{int(match[1]) - 1}th")
    for match in _NUMBER_WORD.finditer(text):
        word, before = match[1].lower(), _before(text, match.start())
        scale = word in ("hundred", "thousand", "million", "billion")
        after = _after(text, match.end()).lower()
        compound = scale and (after == "and" or after.partition("-")[0] in _NUMBER_WORDS or after == "one")
        if before != "or" and (scale or before not in ("a", "an")) and after != "or" and not compound:
            yield Edit(*match.span(), _like(_NUMBER_WORDS[word], match[1]))
    for match in _THE_ORDINAL.finditer(text):
        if _after(text, match.end()) not in ("place", "half", "hand", "thing", "minute", "moment", "resort"):
            yield Edit(*match.span(), _ORDINALS[match[1]])


def _other_number(digits: str) -> str | None:
    """Another number of the same form; None for 0, 1 and numbers with leading zeros, which are not plain amounts."""
    whole = digits.partition(".")[0]
    if digits[0] == "0" or digits == "1":
        return None
    if len(whole) == 4 and 1000 <= int(whole) <= 2100 and whole == digits:
        return str(int(whole) - 10)
    if "," not in digits and len(whole) <= 2 and int(whole) <= 31:
        step = -1 if int(whole) in (10, 12, 24, 28, 29, 30, 31) else 1
        return str(int(whole) + step) + digits[len(whole) :]
    first = int(digits[0])
    return "90" if digits == "100" else str(first + 1 if first < 9 else 8) + digits[1:]


# Entities

_MALE = "Tom|John|Jim|Peter|George|David|Michael|Mike|Robert|Jack|Ken"
_FEMALE = "Mary|Jane|Emily|Alice|Lucy|Susan|Linda|Kate|Nancy|Helen"
_PLACES = (
    "France|Germany|Italy|Spain|Japan|China|India|Russia|Canada|Brazil|Mexico|Australia|Egypt|Greece|Sweden|Norway|Poland|"
    "Ireland|Portugal|Kenya|Vietnam|Thailand|England|Scotland|Iran|Iraq|Israel|Cuba|Argentina|Hungary|Austria|Belgium|Denmark|"
    "Finland|Switzerland|Nigeria|Ethiopia|Pakistan|Indonesia|Malaysia|Ukraine|Greenland|Iceland"
)
_CITIES = (
    "London|Paris|Berlin|Tokyo|Boston|Rome|Madrid|Moscow|Chicago|Kyoto|Osaka|Vienna|Beijing|Cairo|Athens|Toronto|Dublin|"
    "New York|San Francisco|Los Angeles|Hong Kong|Cape Town"
)
_ENTITIES = [
    names.split("|")
    for names in (
        *(_MALE, _FEMALE, _PLACES, _CITIES, "Europe|Asia|Africa"),
        "the United States|the Netherlands|the United Kingdom|the Philippines",
        "French|Spanish|Dutch|Chinese|Portuguese|Japanese|Irish|English|Vietnamese",
        "German|Italian|Russian|Norwegian|Hungarian|Greek",
        "Americans|Germans|Italians|Russians|Norwegians|Hungarians|Greeks|Canadians|Australians",
        "American|Canadian|Brazilian|Mexican|African|Australian|European",
        "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
        "January|July|August|October|December",
        "April|June|September|November|February",
        "Christians|Muslims|Buddhists|Hindus",
        "Mars|Venus|Jupiter|Saturn",
    )
]
_ENTITY = re.compile(
    rf"(?<![\w'-])({'|'.join(sorted((name for names in _ENTITIES for name in names), key=len, reverse=True))})(?![\w-]|'[^s])"
)
#: Words that may be capitalised before an entity because they begin the sentence.
_STARTS = _words(
    "in at on from for to with when if and but or the a an while after before since as is was did does do has have are were "
    "where what why who how because although both that this our his her their your my so then today yesterday like unlike "
    "about of by until can will would should could must may might let i he she they we you"
)


def _entities(text: str) -> Iterator[Edit]:
    for match in _ENTITY.finditer(text):
        before = re.search(r"([\w'.]+)\s+$", text[: match.start()])
        if before and before[1][0].isupper() and before[1].lower() not in _STARTS:
            continue  # a part of a longer name
        longer = re.match(r"'?s?[ ]+(?:[A-Z](?!\b)|[A-Z]\.|and [A-Z])|-", text[match.end() :])
        if longer and match[1] not in ("Tom", "Mary"):
            continue
        names = next(names for names in _ENTITIES if match[1] in names)
        at = names.index(match[1])
        for other in (*names[at + 1 :], *names[:at]):
            if other not in text:
                yield Edit(*match.span(), other)


# Negation

_AUXILIARY = re.compile(
    r"\b(?<=[\w,] )(is|are|was|were|will|would|can|could|should|must|may|might|has been|have been|had been)(?= [a-z]+)"
)
_SHORT = re.compile(r"\b(I'm|[Yy]ou're|[Ww]e're|[Tt]hey're|[Ii]t's|[Hh]e's|[Ss]he's|[Tt]hat's)(?= [a-z]+)")
_SHALL = re.compile(r"\b(I|[Yy]ou|[Ww]e|[Tt]hey|[Ii]t|[Hh]e|[Ss]he)'ll(?= [a-z]+)")
#: Words that have a negated sentence already, or that do not stand in one.
_POLAR = (
    r"not|no|never|nor|neither|none|nothing|nobody|nowhere|without|\w+n't|cannot|hardly|barely|rarely|seldom|scarcely|"
    r"only|also|already|still|too|either|just|some\w*|both|unless|even|so|rather|ever|yet|any\w*|at all|whether|ought|how|"
    r"lest|as well|once"
)
_NOT_VERBS = _words("a an the his her my their your our its free good no this that any some")
_NEGATED = {
    r"\b(is|are|was|were|will|would|could|should|must|does|did|has|have|had)(?:n't| not)(?= [a-z])": r"\1",
    r"\b([Cc])an(?:not|'t| not)(?= [a-z])": r"\1an",
    r"\b([Ww])on't(?= [a-z])": r"\1ill",
    r"\b(?<=I |u |e |y )(?:don't|do not) (?=[a-z])": "",
    r"\b([Hh]as|[Hh]ave|[Hh]ad|I|[Hh]e|[Ss]he|[Ww]e|[Tt]hey|[Yy]ou) never(?= [a-z])": r"\1 always",
}
_POSITIVE_ONLY = (
    r"any\w*|ever|yet|either|neither|nor|at all|until|much|many|but|than|mind|matter|long|bother|have to|need|so|such|"
    r"even|only|why|because|more|whether|if|would rather|else|one|worry|be|let|least|too|seem|think|nothing|other|"
    r"believe|before|again"
)


def _negation(text: str) -> Iterator[Edit]:
    if text.rstrip("\"'”’ ").endswith("?"):
        return
    negative = re.findall(r"\b(?:not|never|no|\w+n't|cannot)\b", text)
    if len(negative) == 1 and not _has(text, _POSITIVE_ONLY):
        for pattern, replacement in _NEGATED.items():
            if match := re.search(pattern, text):
                yield Edit(*match.span(), match.expand(replacement))
    elif not negative and not _has(text, _POLAR) and not _INVERTED.match(text):
        yield from _negated(text)


def _negated(text: str) -> Iterator[Edit]:
    """Negations of the verbs of a positive sentence."""
    for match in _AUXILIARY.finditer(text):
        first = match[1].partition(" ")[0]
        if _before(text, match.start()) not in _NOT_VERBS and _after(text, match.end()) not in _NOT_NEGATED:
            at = match.start() + len(first)
            yield Edit(at, at, "not" if first == "can" else " not")
    for match in _SHORT.finditer(text):
        if _after(text, match.end()) not in _NOT_NEGATED:
            yield Edit(match.end(), match.end(), " not")
    for match in _SHALL.finditer(text):
        yield Edit(*match.span(), f"{match[1]} won't")


_INVERTED = re.compile(r"(?:Here|There|So|Such|Only|Nor|What|Had|Were|Should|May|If)\b")
#: Words after an auxiliary verb that do not follow "not".
_NOT_NEGATED = _words(
    "why because one what when where who about better certainly probably perhaps always often usually sometimes i you he she "
    "we they it to and or as but if than all clearly likely definitely surely"
)


# Comparisons

_OPPOSITES = _pairs(
    "bigger=smaller smaller=bigger larger=smaller higher=lower lower=higher older=younger younger=older "
    "worse=better faster=slower slower=faster stronger=weaker weaker=stronger cheaper=dearer heavier=lighter lighter=heavier "
    "richer=poorer poorer=richer taller=shorter hotter=colder colder=hotter warmer=cooler easier=harder harder=easier "
    "happier=unhappier earlier=later later=earlier shorter=longer wider=narrower "
    "biggest=smallest smallest=biggest largest=smallest highest=lowest lowest=highest oldest=youngest youngest=oldest "
    "worst=best fastest=slowest tallest=shortest richest=poorest poorest=richest longest=shortest shortest=longest "
    "strongest=weakest easiest=hardest hardest=easiest heaviest=lightest hottest=coldest coldest=hottest "
    "increased=decreased decreased=increased increase=decrease decrease=increase increases=decreases majority=minority "
    "minority=majority maximum=minimum minimum=maximum"
)
_DEGREES = _pairs("better=worse best=worst more=less less=more most=least least=most")
_TIME = re.compile(r"(?:minute|hour|day|week|month|year|decade|centur)\w*$|much$")
_OPPOSITE = re.compile(rf"(?<![\w'-])({'|'.join(_OPPOSITES)})(?![\w'-])", re.IGNORECASE)
_BETTER = re.compile(r"\bbetter(?= than)|\b(?<=the )best(?= [a-z]+)")
_MORE = re.compile(
    r"(?<![\w'-])([Mm]ore|[Ll]ess)(?= (than|\w+(?:f[u]l|ous|ive|able|ible|ant|ent|ical|ular|ing|ed|icult)\b))"
)
_MOST = re.compile(r"\b(?<=the )(most|least)(?= \w+(?:f[u]l|ous|ive|able|ible|ant|ent|ical|ular|ing|ed|icult)\b)")


def _comparison(text: str) -> Iterator[Edit]:
    for pattern in (_OPPOSITE, _MORE, _MOST, _BETTER):
        for match in pattern.finditer(text):
            word, before = match[0].lower(), _before(text, match.start())
            alone = word in ("later", "earlier") and not _after(text, match.end()) and not _TIME.match(before)
            liked = pattern is _BETTER and _has(text, "like[sd]?|love[sd]?|know[s]?|prefer[s]?|had")
            if not (alone or liked or _idiom(text, match.start(), match.end())):
                yield Edit(*match.span(), _like((_OPPOSITES | _DEGREES)[word], match[0]))


def _idiom(text: str, start: int, end: int) -> bool:
    """Whether a comparison is part of a fixed phrase."""
    before = _before(text, start)
    fixed = before in _BEFORE_IDIOMS and text[start:end].lower() not in _SUPERLATIVES
    return fixed or before.endswith(("n't", "'d")) or _after(text, end) in ("and", "or", "likely", "often")


_BEFORE_IDIOMS = _words("the its no any or and once had you sooner one nothing can never an to")
_SUPERLATIVES = frozenset(word for word in _OPPOSITES | _DEGREES if word.endswith(("st", "ity", "mum")))


# Cause and effect

_CONTRARY = {
    "because of": "despite",
    "because": "although",
    "thanks to": "despite",
    "due to": "despite",
    "therefore": "nevertheless",
    "despite": "because of",
    "although": "because",
}
_BECAUSE = re.compile(rf"(?<![\w'-])({'|'.join(_CONTRARY)})(?![\w'-])", re.IGNORECASE)
_SO = re.compile(
    r"(?<=\w), so (?=(?:I|you|he|she|it|we|they|there|the|this|these|those|my|his|her|our|their|your|let's)\b)"
)
_IF = re.compile(r"^If(?= (?:you|it|he|she|we|they|I|the|your|his|her|my) [^,]{3,}, )")
_CAUSED = re.compile(r"(?<=\w )(caused)(?= (?:by|the|a|an|this|that|his|her|their|serious|severe|great)\b)")
_PARTLY = _words(
    "is are was were be been it's that's just simply only partly mainly largely mostly precisely especially perhaps maybe "
    "probably possibly and or not merely primarily this reason but"
)


def _cause(text: str) -> Iterator[Edit]:
    found = [match for match in _BECAUSE.finditer(text) if match[1] != "therefore"]
    for match in found if len(found) == 1 else ():
        fragment = match.start() == 0 and "," not in text
        word, before, after = match[1].lower(), _before(text, match.start()), _after(text, match.end())
        noun = word == "due to" and match.start() > 0 and not before.endswith("ed")
        if before not in _PARTLY and not fragment and not noun and after and not after.endswith("ing"):
            yield Edit(*match.span(), _like(_CONTRARY[word], match[1]))
    for match in _SO.finditer(text) if not _has(text, "as|whether|if|when|according") else ():
        yield Edit(*match.span(), ", but ")
    for match in _IF.finditer(text):
        if "?" not in text and not _has(
            text, r"not|\w+n't|never|cannot|then|were|had|would|could|no|nothing|unless|any\w*"
        ):
            yield Edit(*match.span(), "Unless")
    for match in _CAUSED.finditer(text):
        if not _has(text[match.end() :], "to"):
            yield Edit(*match.span(), "prevented")


#: Rules by the kind of their change.
KINDS: dict[str, Callable[[str], Iterator[Edit]]] = {
    "number": _numbers,
    "entity": _entities,
    "negation": _negation,
    "comparison": _comparison,
    "cause": _cause,
}
