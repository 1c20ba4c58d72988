import pytest

from metaphrase.evaluation.transfer.answer_scores import answer_f1, answer_scores, exact_match, normalise_answer


@pytest.mark.parametrize(
    ("language", "text", "normalised"),
    [
        ("en", "The U.S.A.", "usa"),  # points vanish, they do not part words
        ("en", "theatre", "theatre"),  # an article within a word is none
        ("en", "a b a", "b"),
        ("en", "$5 + 3", "5 3"),  # ASCII's symbols count as punctuation
        ("en", "5€ – ½", "5€ ½"),  # other symbols do not
        ("es", "«El Niño»", "niño"),  # punctuation of any script
        ("es", "él", "él"),
        ("de", "dem König des Landes", "könig landes"),
        ("vi", "những chiếc xe của tôi", "xe tôi"),
        ("hi", "एक घर।", "एक घर"),  # the danda is punctuation, Hindi has no articles
        ("ar", "الولايات المتحدة", "ولايات متحدة"),
        ("ar", "المسال", "مس"),  # … wherever the two letters stand
        ("ar", "ما هو؟", "ما هو"),
        ("zh", "在1990年，北京", "在 1990 年 北 京"),
        ("zh", "New York市", "new york 市"),
        (None, "The «Army»", "«army»"),  # SQuAD: ASCII punctuation only
        (None, "der König", "der könig"),
        (None, "北京市", "北京市"),  # … and no parting of Chinese
    ],
)
def test_normalises_as_the_official_script(language, text, normalised):
    assert normalise_answer(text, language) == normalised


@pytest.mark.parametrize(
    ("language", "prediction", "gold", "f1", "equal"),
    [
        ("en", "The U.S.A.", "usa", 1.0, True),
        ("en", "red red house", "red house", 0.8, False),  # a word counts as often as it is in both
        ("en", "a", "the", 0.0, True),  # nothing is left of either: equal, but no word in common
        ("en", "", "house", 0.0, False),
        ("de", "dem König", "den König", 1.0, True),
        ("en", "dem König", "den König", 0.5, False),  # the same answers, taken for English
        ("zh", "在1990年，北京", "1990年北京", 8 / 9, False),
        (None, "在1990年，北京", "1990年北京", 0.0, False),
    ],
)
def test_scores_as_the_official_script(language, prediction, gold, f1, equal):
    assert answer_f1(prediction, gold, language) == pytest.approx(f1)
    assert exact_match(prediction, gold, language) is equal


def test_best_gold_answer_counts_and_no_answer_counts_nothing():
    golds = {"q1": ["red house", "house"], "q2": ["a"], "q3": ["tree"]}
    scores, f1_n = answer_scores({"q1": "the house", "q3": "a tree stump", "unasked": "house"}, golds, "en")
    assert f1_n == pytest.approx([1.0, 0.0, 2 / 3])
    assert scores == pytest.approx({"f1": 100 * (1 + 0 + 2 / 3) / 3, "exact_match": 100 / 3})


def test_an_empty_answer_is_not_a_missing_one():
    assert answer_scores({"q": ""}, {"q": ["the"]}, "en")[0]["exact_match"] == 100
    assert answer_scores({}, {"q": ["the"]}, "en")[0]["exact_match"] == 0


def test_a_question_that_cannot_be_answered_scores_nothing():
    """SQuAD 2.0 has such questions."""
    assert answer_scores({"q": "the"}, {"q": []}, "en") == ({"f1": 0.0, "exact_match": 0.0}, [0.0])


def test_unknown_languages_are_refused():
    with pytest.raises(ValueError, match="not 'el'"):
        normalise_answer("το σπίτι", "el")
    with pytest.raises(ValueError, match="no questions"):
        answer_scores({}, {}, "en")
