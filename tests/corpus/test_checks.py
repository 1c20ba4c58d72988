import json
import random
import re
from dataclasses import replace

import pytest
from datasets import Dataset

from metaphrase.cli import main
from metaphrase.corpus import checks
from metaphrase.corpus.checks import (
    by_language,
    check_corpus,
    check_languages,
    check_leakage,
    check_pairs,
    errors,
    read_corpus,
)
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.exceptions import CorpusError
from metaphrase.io.files import PACKAGED_DATA as DATA

LANGUAGES = ("et", "fi", "ml", "sw", "te", "th", "tl", "vi")
LINES = 60


@pytest.fixture(scope="module")
def demo():
    sets, _ = read_corpus(str(DATA / "demo"))
    assert tuple(sets) == LANGUAGES
    return sets


@pytest.fixture(scope="module")
def tests_of_demo():
    return load_parallel_folder(DATA / "demo", split="test")


def codes(findings, severity="error"):
    return [finding.code for finding in findings if finding.severity == severity]


def shifted(pairs, *, first=0, by=1):
    """The targets from `first` on stand `by` lines lower."""
    targets = pairs.targets[:first] + ("An extra line.",) * by + pairs.targets[first:]
    return replace(pairs, targets=targets[: len(pairs.sources)])


def test_nothing_is_wrong_with_the_demo(demo, tests_of_demo):
    findings = check_corpus(demo, tests_of_demo, lines=LINES)
    assert codes(findings) == codes(findings, "warning") == []


NEAR = (
    "af",
    "ar",
    "bg",
    "bn",
    "bs",
    "cs",
    "da",
    "gl",
    "hi",
    "hr",
    "id",
    "mk",
    "mr",
    "no",
    "pt",
    "sk",
    "sr",
    "xh",
    "zh-Hant",
)


@pytest.mark.parametrize(
    "languages", [pytest.param(NEAR, id="near others"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def test_no_language_of_the_declaration_is_stopped(languages):
    for pairs in load_parallel_folder(DATA / "udhr", languages).values():
        findings = check_languages(pairs, lines=25)
        assert codes(findings) == [], pairs.language
        assert codes(findings, "warning") == ["unknown-language"] * (pairs.language in ("bo", "ceb", "su", "wo"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_swapped_sides(demo, language, fault):
    pairs = replace(demo[language], sources=demo[language].targets, targets=demo[language].sources)
    (finding,) = check_languages(pairs, lines=LINES)
    assert (finding.severity, finding.code, finding.language) == ("error", "swapped-sides", language)
    assert "The sides are swapped: the source side looks like English (en)" in finding.message
    assert finding.examples[0][0] == pairs.sources[0][:160]
    fault("C8", "swapped sides", tried=1, survived=1)


def test_swapped_sides_of_a_language_that_is_not_known(demo):
    pairs = ParallelSet("wo", demo["sw"].targets, demo["sw"].sources)
    assert codes(check_languages(pairs, lines=LINES)) == ["swapped-sides"]


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "fi"])
def test_finnish_is_no_other_language(demo, language, fault):
    (finding,) = check_languages(replace(demo["fi"], language=language), lines=LINES)
    assert (finding.severity, finding.code) == ("error", "wrong-language")
    if language == "sw":
        assert finding.message.startswith("The source side looks like Finnish (fi), not Swahili (sw), in ")
        assert "--languages fi" in finding.message
    assert finding.count > 0.9 * finding.of == 0.9 * LINES
    fault("C8", "sources in another language", tried=1, survived=1)


@pytest.mark.parametrize("language", ["sw", "wo"])
def test_pairs_of_which_half_are_swapped(demo, language):
    sides = list(zip(demo["sw"].sources[:100], demo["sw"].targets[:100], strict=True))
    sources, targets = zip(*(pair[::-1] if at % 2 else pair for at, pair in enumerate(sides)), strict=True)
    (finding,) = check_languages(ParallelSet(language, sources, targets))
    assert (finding.severity, finding.code) == ("warning", "swapped-pairs")
    assert "lines of the source side look like English (en)" in finding.message
    assert "Swap the two sides of these pairs." in finding.message
    assert 25 <= finding.count <= 50
    assert finding.examples[0] == list(sides[1][::-1])


def test_a_target_side_in_another_language(demo):
    pairs = replace(demo["sw"], targets=demo["fi"].sources[: len(demo["sw"].sources)])
    (finding,) = check_languages(pairs, lines=LINES)
    assert finding.code == "wrong-language"
    assert "The target side looks like Finnish (fi), not English (en)" in finding.message


def test_an_unknown_language_is_a_warning(demo):
    findings = check_languages(replace(demo["sw"], language="wo"), lines=LINES)
    assert codes(findings) == []
    assert codes(findings, "warning") == ["unknown-language"]


def test_a_related_language_is_a_warning():
    hindi = load_parallel_folder(DATA / "udhr", ["hi"])["hi"]
    findings = check_languages(replace(hindi, language="mr"), lines=LINES)
    assert codes(findings) == []
    assert codes(findings, "warning") == ["related-language"]


def test_few_lines_are_a_warning(demo):
    few = ParallelSet("sw", demo["fi"].sources[:10], demo["fi"].targets[:10])
    assert codes(check_languages(few), "warning") == ["wrong-language"]


def test_lines_of_another_language(demo):
    mixed = ParallelSet(
        "sw", demo["sw"].sources[:80] + demo["fi"].sources[:20], demo["sw"].targets[:80] + demo["fi"].targets[:20]
    )
    (finding,) = check_languages(mixed)
    assert (finding.severity, finding.code) == ("warning", "other-language-lines")
    assert "Finnish (fi)" in finding.message
    assert 10 < finding.count <= 22


@pytest.mark.parametrize(("share", "severity"), [(0.02, "info"), (0.2, "warning"), (0.6, "error")])
def test_identical_sides(demo, share, severity, fault):
    pairs = ParallelSet("sw", demo["sw"].sources[:200], demo["sw"].targets[:200])
    n = int(200 * share)
    copied = replace(pairs, targets=tuple(text.upper() for text in pairs.sources[:n]) + pairs.targets[n:])
    (finding,) = [finding for finding in check_pairs(copied) if finding.code == "identical-sides"]
    assert (finding.severity, finding.count, finding.of) == (severity, n, 200)
    fault("C8", "identical sides", tried=1, survived=1)


@pytest.mark.parametrize(("copies", "severity"), [(10, "info"), (100, "warning")])
def test_duplicates(demo, copies, severity, fault):
    pairs = ParallelSet("sw", demo["sw"].sources[:200], demo["sw"].targets[:200])
    doubled = ParallelSet("sw", pairs.sources + pairs.sources[:copies], pairs.targets + pairs.targets[:copies])
    (finding,) = [finding for finding in check_pairs(doubled) if finding.code == "duplicates"]
    assert (finding.severity, finding.count, finding.of) == (severity, copies, 200 + copies)
    assert finding.examples[0] == [doubled.sources[0], doubled.targets[0]]
    fault("C6", "repeated pairs, found by the check", tried=1, survived=1)


@pytest.mark.parametrize(("share", "severity"), [(0.05, None), (0.2, "warning"), (1.0, "error")])
@pytest.mark.parametrize("side", ["source", "target"])
def test_one_text_on_a_side(demo, share, severity, side, fault):
    pairs = ParallelSet("sw", demo["sw"].sources[:100], demo["sw"].targets[:100])
    texts, n = getattr(pairs, f"{side}s"), int(100 * share)
    pairs = replace(pairs, **{f"{side}s": texts[:1] * n + texts[n:]})
    found = [finding for finding in check_pairs(pairs) if finding.code == "repeated-side"]
    assert [(one.severity, one.count, one.of) for one in found] == [(severity, n, 100)] * bool(severity)
    assert all(one.message.startswith(f"One text is the {side} of {n} of 100 different pairs") for one in found)
    fault("C8", "one text on a side", tried=1, survived=1)


def test_uneven_lengths():
    even = [(f"neno moja na mbili {i}", f"one word and two {i}") for i in range(90)]
    uneven = [("neno", "a very long sentence that cannot be the translation of this one word")] * 10
    pairs = ParallelSet("sw", *map(tuple, zip(*even + uneven, strict=True)))
    (finding,) = [finding for finding in check_pairs(pairs) if finding.code == "uneven-lengths"]
    assert (finding.severity, finding.count, finding.of) == ("warning", 10, 100)


def window(pairs, first, n=60):
    return replace(pairs, sources=pairs.sources[first : first + n], targets=pairs.targets[first : first + n])


def the_shift(pairs):
    (finding,) = [finding for finding in check_pairs(pairs) if finding.code == "shifted-sides"]
    assert finding.severity == "error"
    return finding


@pytest.mark.parametrize("language", LANGUAGES)
def test_shifted_by_one_line(demo, language):
    finding = the_shift(shifted(demo[language]))
    assert "1 line below better than their own" in finding.message
    assert finding.count > 0.6 * finding.of
    assert finding.of > 0.9 * len(demo[language].sources)


@pytest.mark.parametrize("first", [0, 700, 1500, 2800])
def test_shifted_from_a_line_on(demo, fault, first):
    survived = 0
    for language in ("sw", "th"):
        message = the_shift(shifted(demo[language], first=first, by=2)).message
        start, end = (int(n.replace(",", "")) for n in re.findall(r"pair ([\d,]+) to ([\d,]+)", message)[0])
        survived += abs(start - first - 1) <= 5 and end >= 2990 and "2 lines below" in message
    assert survived == 2
    fault("C2", "sides of equal length that are shifted from a line on", tried=2, survived=survived)


def test_lines_above(demo):
    pairs = demo["sw"]
    moved = ParallelSet("sw", pairs.sources[:-1], pairs.targets[1:])
    assert "1 line above" in the_shift(moved).message


def test_a_part_that_is_shifted(demo):
    """A line is missing, and one too many further below."""
    pairs = demo["sw"]
    targets = (*pairs.targets[:500], *pairs.targets[501:900], "An extra line.", *pairs.targets[900:])
    message = the_shift(replace(pairs, targets=targets)).message
    start, end = map(int, re.findall(r"pair (\d+) to (\d+)", message)[0])
    assert abs(start - 501) <= 5
    assert abs(end - 900) <= 5


@pytest.mark.parametrize("language", LANGUAGES)
def test_sixty_pairs_are_enough_for_lengths_that_vary(demo, fault, language):
    """Of 60 good pairs none is called shifted; where lengths tell too little, that is said."""
    pairs, found = demo[language], 0
    for first in range(0, 2900, 100):
        codes = {finding.code for finding in check_pairs(window(shifted(pairs, by=1), first))}
        assert codes & {"shifted-sides", "shift-not-checked"}
        found += "shifted-sides" in codes
        assert "shifted-sides" not in {finding.code for finding in check_pairs(window(pairs, first))}
    assert found > 15
    fault("C2", "good samples of 60 pairs: none is called shifted", tried=29, survived=29)


def test_too_few_pairs_for_a_verdict(demo):
    (finding,) = [f for f in check_pairs(window(demo["sw"], 0, 10)) if f.code == "shift-not-checked"]
    assert finding.severity == "info"
    assert "metaphrase diagnose starter" in finding.message


def test_leakage_of_sides_and_pairs(fault):
    train = {"sw": ParallelSet("sw", ("Habari", "Jambo rafiki", "Asante"), ("Hello", "Hi friend", "Thanks"))}
    tested = ParallelSet("sw", ("HABARI ", "Kwa heri", "Karibu", "asante"), ("Hello", "ｈi  Friend", "Welcome", "Ta"))
    (finding,) = check_leakage(train, {"sw": tested})
    assert (finding.severity, finding.code, finding.count, finding.of) == ("error", "leakage", 3, 4)
    assert "2 sources, 2 targets, 1 whole pair." in finding.message
    assert finding.examples == [["HABARI ", "Hello"], ["Kwa heri", "ｈi  Friend"], ["asante", "Ta"]]
    fault("C7", "test sentences in the training text, in another form", tried=3, survived=finding.count)


def test_leakage_despite_another_code_of_the_language_and_invisible_characters():
    train = {"zh": ParallelSet("zh", ("謝\u200b謝 你", "\u202b你好嗎\u202c"), ("Any", "Other"))}
    tested = ParallelSet("zh-Hant", ("謝謝 你", "你好嗎"), ("Thank you", "How are you"))
    (finding,) = check_leakage(train, {"zh-Hant": tested})
    assert (finding.severity, finding.count) == ("error", 2)
    (finding,) = check_leakage({"zh-Hant": tested}, {"zh": train["zh"]})
    assert finding.count == 2


def test_leakage_of_english_through_another_language():
    train = {"te": ParallelSet("te", ("హలో",), ("Hello",))}
    (finding,) = check_leakage(train, {"sw": ParallelSet("sw", ("Habari",), ("hello",))})
    assert finding.language == "sw"


def test_little_leakage_is_a_warning(demo, tests_of_demo):
    tested, trained = tests_of_demo["sw"], demo["sw"]
    leaking = ParallelSet("sw", trained.sources + tested.sources[:1], trained.targets + tested.targets[:1])
    (finding,) = check_leakage({"sw": leaking}, {"sw": tested})
    assert (finding.severity, finding.count) == ("warning", 1)
    (finding,) = check_leakage({"sw": leaking}, {"sw": tested}, strict=True)
    assert (finding.severity, finding.count) == ("error", 1)


def test_a_strict_check_ends_at_one_leaked_sentence(demo, tests_of_demo, fault):
    survived = 0
    for language, tested in tests_of_demo.items():
        pairs = demo[language]
        leaking = replace(pairs, sources=(*pairs.sources, tested.sources[-1].upper()), targets=(*pairs.targets, "—"))
        found = [
            check_corpus({language: leaking}, {language: tested}, lines=1, strict=strict) for strict in (True, False)
        ]
        survived += [codes(findings) for findings in found] == [["leakage"], []]
    assert survived == len(tests_of_demo)
    fault("C7", "one test sentence in the training text", tried=len(tests_of_demo), survived=survived)


def test_the_command_fails_where_test_sentences_leak(tmp_path, capsys, fault):
    for split, path in (("train", tmp_path / "sw-en.tsv"), ("test", tmp_path / "sw-en.test.tsv")):
        rows = load_parallel_folder(DATA / "demo", ["sw"], split="test")["sw"]
        both = list(zip(rows.sources, rows.targets, strict=True))[: None if split == "test" else 20]
        path.write_text("source\ttarget\n" + "".join(f"{s}\t{t}\n" for s, t in both), encoding="utf-8")
    corpus = str(tmp_path / "sw-en.tsv")
    leaked = main(["diagnose", "--corpus", corpus, "--test", str(tmp_path), "--lines", "20", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    alone = main(["diagnose", "--corpus", corpus, "--lines", "20", "--json"])
    assert [finding["code"] for finding in found if finding["severity"] == "error"] == ["leakage"]
    fault("C7", "test sentences in the corpus of the command", tried=1, survived=(leaked, alone) == (1, 0))


def test_findings_are_sorted_and_are_data(demo, tests_of_demo):
    wrong = replace(shifted(demo["fi"]), language="sw")
    findings = check_corpus({"sw": wrong}, {"sw": tests_of_demo["sw"]}, lines=LINES)
    assert codes(findings) == [finding.code for finding in errors(findings)] == ["wrong-language", "shifted-sides"]
    assert [checks.SEVERITIES.index(finding.severity) for finding in findings] == sorted(
        checks.SEVERITIES.index(finding.severity) for finding in findings
    )
    assert findings[0].to_dict()["code"] == "wrong-language"
    assert check_corpus({"sw": wrong}, lines=LINES) == check_corpus({"sw": wrong}, lines=LINES)


def test_any_order_of_a_corpus_will_do(demo):
    pairs = list(zip(demo["sw"].sources, demo["sw"].targets, strict=True))
    for order in (
        sorted(pairs),
        sorted(pairs, key=lambda pair: len(pair[0])),
        random.Random(0).sample(pairs, len(pairs)),
    ):
        assert codes(check_pairs(ParallelSet("sw", *map(tuple, zip(*order, strict=True))))) == []


def test_rows_of_a_data_set():
    rows = [{"source": "a", "target": "b", "source_lang": "sw"}, {"source": "c", "target": "d", "source_lang": "te"}]
    assert by_language(Dataset.from_list(rows)) == by_language(rows)
    assert by_language(rows)["te"] == ParallelSet("te", ("c",), ("d",))


def test_reading_keeps_what_cleaning_would_take(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("source\ttarget\nHabari\tHello\nHabari\tHello\nOK\tOK\n\tempty\n", encoding="utf-8")
    sets, report = read_corpus(str(path), languages=["sw"])
    assert sets["sw"].sources == ("Habari", "Habari", "OK")
    assert report.dropped == {"empty side": 1}
    assert (report.read, report.languages) == (4, {"sw": 3})
    with pytest.raises(CorpusError, match="Cannot infer the language of"):
        read_corpus(str(path))
    path.write_text("source\ttarget\tsource_lang\nHabari\tHello\tsw\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"no pair for te\. Its languages: sw"):
        read_corpus(str(path), languages=["te"])


def test_one_of_a_kind_is_counted_as_one():
    """Numbers of things in messages have a plural only if there are several."""
    pairs = ParallelSet("sw", ("moja",) * 2, ("one",) * 2)
    (leak,) = check_leakage({"sw": pairs}, {"sw": pairs.rows([0])})
    messages = [finding.message for finding in (*check_pairs(pairs), leak)]
    assert any("which leaves 1 pair." in message for message in messages)
    assert "1 source, 1 target, 1 whole pair." in leak.message


def test_a_pair_that_is_often_repeated_is_no_repeated_side(demo):
    """Copies of one pair are duplicates; a side is repeated if its text has other translations."""
    pairs = demo["sw"].rows([0] * 50 + list(range(1, 51)))
    assert {"duplicates", "repeated-side"} & {finding.code for finding in check_pairs(pairs)} == {"duplicates"}


def test_one_text_on_a_side_of_few_pairs_is_a_warning(demo):
    pairs = ParallelSet("sw", demo["sw"].sources[:10], demo["sw"].targets[:1] * 10)
    (finding,) = [finding for finding in check_pairs(pairs) if finding.code == "repeated-side"]
    assert (finding.severity, finding.count, finding.of) == ("warning", 10, 10)


def test_lengths_are_uneven_relative_to_the_median_ratio():
    """Where every target is six times as long as its source, the pairs of equal lengths are the odd ones."""
    rows = [(f"neno {i:05}", "maneno mengi zaidi " * 3 + f"na moja {i:05}") for i in range(95)]
    rows += [("maneno mengi zaidi " * 3, "many more words of " * 3)] * 5
    pairs = ParallelSet("sw", *map(tuple, zip(*rows, strict=True)))
    (finding,) = [finding for finding in check_pairs(pairs) if finding.code == "uneven-lengths"]
    assert (finding.count, finding.examples[0]) == (5, list(rows[-1]))


def test_the_number_of_lines_and_their_seed_are_those_of_the_caller(demo):
    """Each problem of a language is found once, and both of its sides count."""
    wrong = ParallelSet("sw", demo["fi"].sources, demo["et"].sources)
    findings = [one for one in check_corpus({"sw": wrong}, lines=30, seed=1) if one.code == "wrong-language"]
    assert [one.of for one in findings] == [30, 30]
    assert ["source side" in one.message for one in findings] == [True, False]
    others = check_corpus({"sw": wrong}, lines=30, seed=2)
    assert findings[0].examples != next(one for one in others if one.code == "wrong-language").examples


def test_a_few_lines_of_the_other_language_beside_a_wrong_side_are_not_swapped_pairs(demo):
    """The numbers of swapped lines on both sides are alike."""
    sources = demo["sw"].sources[:85] + demo["sw"].targets[85:100]
    targets = demo["sw"].targets[:40] + demo["sw"].sources[40:100]
    assert "swapped-pairs" not in {one.code for one in check_languages(ParallelSet("sw", sources, targets))}
