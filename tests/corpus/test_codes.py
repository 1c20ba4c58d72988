"""Codes of languages are checked where they enter, and every spelling of a code is the same language."""

import pytest

from metaphrase import RunConfig, load_corpus
from metaphrase.cli import main
from metaphrase.corpus.codes import language_code
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.exceptions import UsageError
from tests.corpus.samples import write


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *[("sw", "sw"), ("swh", "sw"), ("swa", "sw"), ("swh_Latn", "sw"), ("SW", "sw"), ("sw-KE", "sw")],
        *[
            ("eng_Latn", "en"),
            ("eus", "eu"),
            ("tgl", "tl"),
            ("fil", "tl"),
            ("tl", "tl"),
            ("cmn", "zh"),
            ("arb_Arab", "ar"),
        ],
        *[
            ("zh_CN", "zh"),
            ("zho_Hans", "zh"),
            ("zh_Hant", "zh-Hant"),
            ("sr_Latn", "sr-Latn"),
            ("ckb", "ckb"),
            ("no", "no"),
        ],
    ],
)
def test_spellings_of_a_code(name, code):
    assert language_code(name) == code


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("basque", r"\. Basque is 'eu'\. Pass a code"),
        ("Kiswahili", r"\. Swahili is 'sw'\. Pass a code"),
        ("norwegain", r"\. Norwegian is 'no'\. Pass a code"),
        *[
            (name, r"^'.*' is not the code of a language\. Pass a code")
            for name in ("xx", "und", "", "sw,te", "x-y", "中文")
        ],
    ],
)
def test_what_is_not_a_code_is_refused_with_a_suggestion(name, hint):
    with pytest.raises(UsageError, match=hint):
        language_code(name)


OPTIONS = {
    "train": ["--corpus", "c.tsv", "--output_dir", "out", "--languages"],
    "train --retention_languages": ["--corpus", "c.tsv", "--output_dir", "out", "--retention_languages"],
    "adapt": ["--corpus", "c.tsv", "--languages"],
    "diagnose": ["--corpus", "c.tsv", "--languages"],
    "diagnose --target_lang": ["--corpus", "c.tsv", "--target_lang"],
    "filter": ["c.tsv", "-o", "good.tsv", "--languages"],
    "filter --source_lang": ["c.tsv", "-o", "good.tsv", "--source_lang"],
    "align": ["c.tsv", "-o", "links.tsv", "--languages"],
    "mine": ["a.txt", "b.txt", "-o", "mined.tsv", "--target_lang", "en", "--source_lang"],
    "evaluate": ["model", "--data", ".", "--languages"],
    "export": ["model", "--output_dir", "out", "--languages"],
}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_checks_them_before_any_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("c.tsv", "a.txt", "b.txt"):
        write(tmp_path / name, "source\ttarget\na\tb\n")
    assert main([command.split()[0], *OPTIONS[command], "basque"]) == 2
    assert "'basque' is not the code of a language. Basque is 'eu'." in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "c.tsv"]


def test_python_raises_the_same(tmp_path):
    path = write(tmp_path / "c.tsv", "source\ttarget\na\tb\n")
    for call in (
        lambda: load_corpus(path, languages=["basque"]),
        lambda: RunConfig(corpus=[str(path)], languages=["basque"]),
    ):
        with pytest.raises(UsageError, match="Basque is 'eu'"):
            call()


@pytest.mark.parametrize("name", ["sw-en.tsv", "swh-eng.tsv", "swh_Latn-eng_Latn.tsv"])
@pytest.mark.parametrize("language", ["sw", "swh", "swa_Latn"])
def test_files_and_options_may_spell_a_code_differently(tmp_path, name, language):
    path = write(tmp_path / name, "source\ttarget\nmbwa analala\tthe dog sleeps\n")
    assert load_corpus(path, languages=[language]).dataset[0]["source_lang"] == "sw"
    assert load_corpus(tmp_path, languages=[language]).dataset[0]["target_lang"] == "en"


def test_test_sets_may_be_asked_for_by_another_spelling(tmp_path):
    write(tmp_path / "swh-en.tsv", "source\ttarget\nmbwa analala\tthe dog sleeps\n")
    assert list(load_parallel_folder(tmp_path, ["sw_Latn"])) == ["swh"]


def test_files_of_two_spellings_are_two_test_sets(tmp_path):
    for name in ("prs", "pes"):
        write(tmp_path / f"{name}-en.tsv", f"source\ttarget\n{name}\tword\n")
    assert {code: one.sources for code, one in load_parallel_folder(tmp_path).items()} == {
        "pes": ("pes",),
        "prs": ("prs",),
    }
    assert list(load_parallel_folder(tmp_path, ["pes"])) == ["pes"]
