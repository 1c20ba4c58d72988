"""Changed English sentences. `judged_distractors.tsv` holds 200 of them, each read and judged by a person."""

import re
from collections import Counter
from pathlib import Path

import pytest

from metaphrase.evaluation.distractors import KINDS, distractors

JUDGED = Path(__file__).with_name("judged_distractors.tsv")


def rows():
    header, *lines = JUDGED.read_text(encoding="utf-8").splitlines()
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


def test_the_rules_still_make_what_was_judged():
    """A changed rule requires that the changed sentences are read again."""
    assert [row for row in rows() if distractors(row["original"]).get(row["kind"]) != row["distractor"]] == []


def test_almost_all_judged_sentences_are_grammatical_and_mean_something_else():
    """Sentences of the packaged demo and Declaration, and of the World English Bible (public domain)."""
    judged = Counter((row["kind"], row["judgement"]) for row in rows())
    assert {kind: judged[kind, "changed"] + judged[kind, "broken"] for kind in KINDS} == dict.fromkeys(KINDS, 40)
    assert sum(judged[kind, "changed"] for kind in KINDS) == 199  # 99.5 % of 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There were 1,200 guests.", {"number": "There were 2,200 guests."}),
        ("He left in 1998.", {"number": "He left in 1988."}),
        ("A boy ate an 8 inch pizza.", {}),  # "an 9 inch"
        ("He is an 18th century painter.", {"negation": "He is not an 18th century painter."}),  # "a 17th"
        ("It is a 19th century house.", {"negation": "It is not a 19th century house."}),
        ("She read an 1805 novel.", {}),  # "a 1795 novel"
        ("It took 2 or 3 years.", {"number": "It took 2 or 4 years."}),
        ("It took 2 to 3 years.", {"number": "It took 2 to 4 years."}),
        ("Children between 2 and 3 sleep.", {"number": "Children between 2 and 4 sleep."}),
        ("It cost $2 million to $3 million.", {"number": "It cost $2 million to $4 million."}),
        ("It took 3 to 5 years.", {"number": "It took 4 to 5 years."}),
        ("It took two to three weeks.", {"number": "It took two to four weeks."}),
        ("It took two, three weeks.", {"number": "It took two, four weeks."}),
        ("He read the first and second book.", {}),
        ("He read the first and the third book.", {"number": "He read the second and the third book."}),
        ("In the 4th and 5th centuries it rained.", {}),
        ("One of us waits until 10:30.", {}),
        ("Version 1.2.3 costs nothing.", {}),
        ("She met Tom on Monday.", {"entity": "She met John on Monday."}),
        ("Queen Mary lived there.", {}),
        ("He bought an Italian car.", {}),  # of the adjectives, no other begins with a vowel
        ("He lives in a European country.", {"entity": "He lives in a Canadian country."}),
        ("An American and an African met an Australian.", {}),  # "an European"
        ("It is raining.", {"negation": "It is not raining."}),
        ("I can see it.", {"negation": "I cannot see it."}),
        ("I don’t like tea.", {"negation": "I like tea."}),
        ("Is it raining?", {}),
        ("It is also raining.", {}),
        ("He had a will of his own.", {}),
        ("I don't have any.", {}),
        (
            "My car is faster than his.",
            {"negation": "My car is not faster than his.", "comparison": "My car is slower than his."},
        ),
        ("Sooner or later it ends.", {}),
        ("You had better go.", {}),
        ("She slept because of the pills.", {"cause": "She slept despite the pills."}),
        ("I was tired, so I slept.", {"cause": "I was tired, but I slept."}),
        ("That is because he is ill.", {"negation": "That is because he is not ill."}),
        ("", {}),
    ],
)
def test_examples(text, expected):
    assert distractors(text) == expected


@pytest.mark.parametrize(
    "text", ["a" * 5000, "1" * 5000, "x, so " * 800, "Tom " * 900, "if the " * 700, "' s’ " * 700]
)
def test_long_and_odd_texts_are_changed_or_left_alone(text):
    for changed in distractors(text).values():
        assert changed != text
        assert not re.search(r"\ba [aeio]\w+ly\b", changed)
