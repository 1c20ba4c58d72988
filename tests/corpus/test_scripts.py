"""A language named with a script selects this script; one without a script selects all of them."""

import json

import pytest

from metaphrase import RunConfig, load_corpus
from metaphrase.corpus.checks import read_corpus
from metaphrase.corpus.codes import split_languages
from metaphrase.exceptions import CorpusError, MissingFileError, UsageError
from tests.corpus.samples import write

TEXTS = {"zh-Hans": "马", "zh-Hant": "馬", "sw": "farasi"}


def sources(corpus, languages, **options):
    return set(load_corpus(corpus, languages=languages, **options).dataset["source"][:])


def pair(source):
    return f"source\ttarget\n{source}\thorse\n"


SELECTIONS = [
    (["zh-Hant"], {"馬"}),
    (["zh-Hans"], {"马"}),
    (["zho_Hant", "sw"], {"馬", "farasi"}),
    (["zh"], {"马", "馬"}),
    (["zh", "zh-Hant"], {"马", "馬"}),
    (["zh-Hans", "zh-Hant"], {"马", "馬"}),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    for code, text in TEXTS.items():
        write(tmp_path / "files" / f"{code}-en.tsv", pair(text))
    return tmp_path / "files"


@pytest.fixture
def rows(tmp_path):
    lines = [f"{text}\thorse\t{code.replace('-', '_')}" for code, text in TEXTS.items()]
    return write(tmp_path / "rows.tsv", "\n".join(["source\ttarget\tsource_lang", *lines]) + "\n")


@pytest.fixture
def tmx(tmp_path):
    segments = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in TEXTS.items())
    unit = f'<tu>{segments}<tuv xml:lang="en"><seg>horse</seg></tuv></tu>'
    return write(tmp_path / "units.tmx", f"<tmx><body>{unit}</body></tmx>")


@pytest.mark.parametrize(("languages", "wanted"), SELECTIONS)
def test_files_are_selected_by_script(folder, languages, wanted):
    assert sources(folder, languages) == wanted
    assert {text for one in read_corpus(folder, languages=languages)[0].values() for text in one.sources} == wanted
    assert {row["source"] for row in load_corpus(folder, languages=languages, streaming=True).dataset} == wanted


@pytest.mark.parametrize(("languages", "wanted"), SELECTIONS)
def test_rows_are_selected_by_script(rows, languages, wanted):
    assert sources(rows, languages) == wanted


@pytest.mark.parametrize(("languages", "wanted"), [one for one in SELECTIONS if one[0] != ["zh"] and len(one[1]) == 1])
def test_units_and_columns_are_selected_by_script(tmp_path, tmx, languages, wanted):
    assert sources(tmx, languages) == wanted
    columns = write(tmp_path / "columns.tsv", "zh-Hans\tzh-Hant\ten\n马\t馬\thorse\n")
    keys = write(tmp_path / "keys.jsonl", json.dumps({"translation": {**TEXTS, "en": "horse"}}) + "\n")
    for path in (columns, keys):
        assert sources(path, languages) == wanted


def test_a_code_without_script_is_in_the_usual_one_or_that_of_its_region(tmp_path):
    for name, text in {"zh": "马", "zh_TW": "馬"}.items():
        write(tmp_path / f"{name}-en.tsv", pair(text))
    assert sources(tmp_path, ["zh-Hans"]) == {"马"}
    assert sources(tmp_path, ["zh-Hant"]) == {"馬"}
    assert sources(tmp_path, ["zh"]) == {"马", "馬"}


def test_each_script_has_its_own_splits(tmp_path):
    write(tmp_path / "zh-Hans-en.train.tsv", pair("马"))
    write(tmp_path / "zh-Hant-en.tsv", pair("馬"))
    assert sources(tmp_path, ["zh-Hant"]) == {"馬"}
    assert sources(tmp_path, ["zh"]) == {"马", "馬"}


def test_a_missing_script_is_reported(tmp_path):
    path = write(tmp_path / "zh-Hans-en.tsv", pair("马"))
    with pytest.raises(MissingFileError, match=r"no pairs for zh-Hant\. Its languages: zh-Hans\."):
        load_corpus(path, languages=["zh-Hant"])
    columns = write(tmp_path / "columns.tsv", "zh-Hans\ten\n马\thorse\n")
    with pytest.raises(CorpusError, match="no columns"):
        load_corpus(columns, languages=["zh-Hant"])


def test_rows_may_state_the_script_that_the_name_lacks_and_lack_the_one_that_it_states(tmp_path):
    header = "source\ttarget\tsource_lang\n"
    mixed = write(tmp_path / "zh-en.tsv", header + "马\thorse\tzh_Hans\n馬\thorse\tzh_Hant\n")
    assert sources(mixed, ["zh-Hant"]) == {"馬"}
    assert sources(write(tmp_path / "zh-Hant-en.tsv", header + "馬\thorse\tzh\n"), ["zh-Hant"]) == {"馬"}


def test_targets_are_not_selected_by_script(tmp_path):
    path = write(tmp_path / "zh-sw.tsv", "source\ttarget\n马\tfarasi\n")
    assert load_corpus(path, target_lang="zh").dataset["target"][:] == ["马"]
    with pytest.raises(UsageError, match=r"cannot be selected by script: zh_Hant\. Pass zh as the target language"):
        load_corpus(path, target_lang="zh_Hant")


def test_options_keep_a_usual_script():
    assert RunConfig(languages=["zho_Hans,sw"]).languages == ["zh-Hans", "sw"]
    assert split_languages(["zh_Hans"]) == ["zh"]
