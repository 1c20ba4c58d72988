import pytest

from metaphrase.corpus import codes, identification
from metaphrase.corpus.identification import canonical, identify, knows, language_name, related
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.evaluation.diagnosis import UDHR
from metaphrase.exceptions import UsageError

#: Languages of the Declaration of Human Rights that the classifier has not learnt.
UNKNOWN = {"bo", "ceb", "su", "wo"}


@pytest.mark.slow
def test_a_text_of_every_known_language_of_the_declaration_is_told():
    sets = load_parallel_folder(UDHR)
    assert {language for language in sets if not knows(language)} == UNKNOWN
    for language, pairs in sets.items():
        found = identify(pairs.sources, lines=8)
        assert found.share(language) > 0.8 or language in UNKNOWN, language
    assert identify(sets["fi"].targets, lines=8).share("en") > 0.9


def test_shares_are_means_over_the_lines():
    finnish, swahili = "Kaikki ihmiset syntyvät vapaina.", "Watu wote wamezaliwa huru."
    alone = [identify([text]).shares for text in (finnish, swahili)]
    both = identify([finnish, swahili])
    assert both.best in ("fi", "sw")
    for language in ("fi", "sw"):
        mean = sum(shares.get(language, 0.0) for shares in alone) / 2
        assert both.shares[language] == pytest.approx(mean)
    assert [line.text for line in both.others("sw", sure=0.5)] == [finnish]


def test_the_sample_is_seeded_and_bounded():
    texts = [f"Watu wote wamezaliwa huru, hadhi na haki zao ni sawa {i}." for i in range(100)]
    assert identify(texts, lines=7) == identify(texts, lines=7)
    assert len(identify(texts, lines=7).lines) == 7
    assert identify(texts, lines=7, seed=1).lines != identify(texts, lines=7).lines


def test_a_single_text_is_refused():
    with pytest.raises(UsageError, match="a list of texts, but got a single text"):
        identify("Watu wote wamezaliwa huru.")


@pytest.mark.parametrize("texts", [[], ["", "123", "%%% --- 4"]])
def test_no_language_at_all(texts):
    found = identify(texts)
    assert found.best is None
    assert found.share("sw") == 0


def test_codes_and_names():
    assert canonical("zh-Hant") == "zh"
    assert canonical("nb_NO") == "no"
    assert related("ms") == {"id", "ms"}
    assert related("zsm") == {"id", "ms"}
    assert language_name("nb") == "Norwegian (nb)"
    assert all(map(knows, ("fil", "deu", "swh_Latn", "gn", "bik", "kik")))
    assert not knows("wo")
    assert set(identification._classifier().labels) - {"zxx"} <= set(codes.NAMES)
