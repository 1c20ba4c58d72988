import gzip
import json

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from metaphrase.corpus.code_switching import NLI, PARAPHRASES
from metaphrase.evaluation.transfer import data
from metaphrase.evaluation.transfer.data import (
    NOWHERE,
    QUESTIONS,
    digest,
    pairs_format,
    read_languages,
    treebank_format,
)
from metaphrase.evaluation.transfer.planning import split_items, with_originals
from metaphrase.exceptions import DataError
from tests.evaluation.transfer.conftest import LABELS

XNLI = pairs_format(NLI, LABELS)
PAWSX = pairs_format(PARAPHRASES, ("0", "1"))


def test_reads_a_folder_in_every_language(nli):
    sets = read_languages(f"{nli}@dev", XNLI, split="test")
    assert list(sets) == ["en", "sw"]
    assert sets["sw"].column_names == ["item", "premise", "hypothesis", "label"]
    assert sets["sw"]["item"][:2] == ["0", "1"]
    assert set(sets["en"]["label"]) == {0, 1, 2}
    assert sets["sw"]["premise"][0].endswith("sw")


def test_a_path_may_have_an_at_sign(nli, tmp_path):
    (tmp_path / "me@home").mkdir()
    folder = tmp_path / "me@home" / "nli"
    folder.symlink_to(nli)
    for source in (str(folder), f"{folder}@dev"):
        assert "en" in read_languages(source, XNLI, split="dev")


def test_only_the_asked_languages(nli):
    assert list(read_languages(str(nli), XNLI, split="test", languages=["sw"])) == ["sw"]
    with pytest.raises(FileNotFoundError, match=r"no test data for de. It has: sw"):
        read_languages(str(nli), XNLI, split="test", languages=["sw", "de"])
    with pytest.raises(FileNotFoundError, match="no validation files"):
        read_languages(f"{nli}@validation", XNLI, split="test")


def test_items_have_the_same_numbers_with_and_without_a_header(tmp_path):
    rows = "one\ttwo\tneutral\nthree\tfour\tentailment\n"
    (tmp_path / "dev-en.tsv").write_text(rows)
    (tmp_path / "dev-sw.tsv").write_text(f"premise\thypothesis\tlabel\n{rows}")
    english, swahili = (list(XNLI.read(tmp_path / f"dev-{code}.tsv", code)) for code in ("en", "sw"))
    assert english == swahili


def test_headers_identifiers_quotes_and_untranslated_rows(tmp_path):
    rows = ["id\tsentence1\tsentence2\tlabel", '1\t"quoted\tb\t1', "2\tNS\tb\t0", "3\ta\t \t0", "4\ta\tb\t0"]
    (tmp_path / "dev-de.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (german,) = read_languages(str(tmp_path), PAWSX, split="dev").values()
    assert german["item"] == ["1", "4"]
    assert german["sentence1"] == ['"quoted', "a"]
    assert german["label"] == [1, 0]


def test_machine_translated_training_data(tmp_path):
    (tmp_path / "multinli.train.sw.tsv").write_text("premise\thypo\tlabel\na\tb\tcontradictory\n", encoding="utf-8")
    (swahili,) = read_languages(str(tmp_path), XNLI, split="train").values()
    assert swahili["label"] == [2]


def test_no_file_is_read_twice(tmp_path, fault):
    line = "a\tb\tentailment\n"
    (tmp_path / "dev-en.tsv").write_text(line, encoding="utf-8")
    (tmp_path / "dev-en.tsv.gz").write_bytes(gzip.compress(line.encode()))
    with pytest.raises(ValueError, match=r"dev-en\.tsv and \S+/dev-en\.tsv\.gz contain the same text"):
        read_languages(str(tmp_path), XNLI, split="dev")
    fault("C12", "data of fine-tuning with and without compression", tried=1, survived=1)


def test_a_malformed_line_is_named(tmp_path):
    (tmp_path / "dev-en.tsv").write_text("a\tb\tentailment\na\tb\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"dev-en.tsv:2: a line must have two sentences"):
        read_languages(str(tmp_path), XNLI, split="dev")
    (tmp_path / "dev-en.tsv").write_text("a\tb\tperhaps\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"dev-en.tsv:1: .* one of entailment, neutral, contradiction"):
        read_languages(str(tmp_path), XNLI, split="dev")


def test_questions_of_squad_xquad_and_mlqa(questions, tmp_path):
    sets = read_languages(str(questions), QUESTIONS, split="test")
    assert list(sets) == ["en", "de"]
    for row in sets["de"]:
        (text,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][start : start + len(text)] == text
    content = (questions / "xquad.en.json").read_text()
    with gzip.open(tmp_path / "train-v1.1.json.gz", "wt") as file:
        file.write(content)
    (tmp_path / "test-context-de-question-de.json").write_text(content)
    (tmp_path / "test-context-de-question-en.json").write_text(content)  # no XLT
    assert list(read_languages(str(tmp_path), QUESTIONS, split="train")) == ["en"]
    assert list(read_languages(str(tmp_path), QUESTIONS, split="test")) == ["de"]
    assert list(read_languages(str(tmp_path / "train-v1.1.json.gz"), QUESTIONS, split="dev")) == ["en"]


def test_two_files_of_questions_in_one_language_are_refused(questions, tmp_path):
    """XQuAD consists of questions of SQuAD's dev set and has their ids."""
    content = (questions / "xquad.en.json").read_text()
    for name in ("xquad.en.json", "dev-v1.1.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"dev-v1\.1\.json and .*xquad\.en\.json are both dev data of 'en'"):
        read_languages(str(tmp_path), QUESTIONS, split="dev")
    assert list(read_languages(str(tmp_path), QUESTIONS, split="test")) == ["en"]
    assert list(read_languages(str(tmp_path / "dev-v1.1.json"), QUESTIONS, split="dev")) == ["en"]


def test_a_file_in_another_format_is_refused(tmp_path):
    (tmp_path / "dev-en.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="the key 'data' is missing"):
        read_languages(str(tmp_path), QUESTIONS, split="dev")


CONLLU = """\
# text = No va del tot, dímelo
1\tNo\tno\tADV\t_\t_\t2\tadvmod\t_\t_
2\tva\tir\tVERB\t_\t_\t0\troot\t_\t_
3-4\tdel\t_\t_\t_\t_\t_\t_\t_\t_
3\tde\tde\tADP\t_\t_\t5\tcase\t_\t_
4\tel\tel\tDET\t_\t_\t5\tdet\t_\t_
5\ttot\ttot\tNOUN\t_\t_\t2\tobl\t_\t_
5.1\tempty\tempty\tVERB\t_\t_\t_\t_\t_\t_
6-8\tdímelo\t_\t_\t_\t_\t_\t_\t_\t_
6\tdi\tdecir\tVERB\t_\t_\t2\tconj\t_\t_
7\tme\tyo\tPRON\t_\t_\t6\tobj\t_\t_
8\tlo\tél\tPRON\t_\t_\t6\tobj\t_\t_

1\t_\t_\tNOUN\t_\t_\t0\troot\t_\t_
2\t_\t_\tNOUN\t_\t_\t1\tdep\t_\t_

1\tFin\tfin\tNOUN\t_\t_\t0\troot\t_\t_"""


def test_syntactic_words_and_written_ones(tmp_path):
    (tmp_path / "es_x-ud-test.conllu").write_text(CONLLU, encoding="utf-8")
    (syntactic,) = read_languages(str(tmp_path), treebank_format(), split="test").values()
    assert syntactic["words"] == [["No", "va", "de", "el", "tot", "di", "me", "lo"], ["Fin"]]
    assert syntactic["tags"][0] == ["ADV", "VERB", "ADP", "DET", "NOUN", "VERB", "PRON", "PRON"]
    (fused,) = read_languages(str(tmp_path), treebank_format(fused=True), split="test").values()
    assert fused["words"] == [["No", "va", "del", "tot", "dímelo"], ["Fin"]]
    # "de" and "el" are equally high in the tree: the first of VERB … ADP DET; "di" is above the pronouns
    assert fused["tags"][0] == ["ADV", "VERB", "ADP", "NOUN", "VERB"]


def test_a_written_word_has_the_tag_of_its_highest_part(tmp_path):
    rows = ["1-2\tPeter's\t_\t_\t_\t_\t_\t_\t_\t_", "1\tPeter\t_\tPROPN\t_\t_\t0\troot\t_\t_"]
    rows += ["2\tis\t_\tVERB\t_\t_\t1\tdep\t_\t_", "3\tout\t_\tADV\t_\t_\t1\tdep\t_\t_"]
    (tmp_path / "en_x-ud-test.conllu").write_text("\n".join(rows), encoding="utf-8")
    (english,) = read_languages(str(tmp_path), treebank_format(fused=True), split="test").values()
    assert english.to_list()[0]["tags"] == ["PROPN", "ADV"]  # VERB would come first among equals


def test_treebanks_of_a_language_are_joined_and_need_tags(tmp_path):
    for name in ("es_x", "es_y"):
        (tmp_path / f"{name}-ud-test.conllu").write_text(CONLLU, encoding="utf-8")
    (joined,) = read_languages(str(tmp_path), treebank_format(), split="test").values()
    assert len(joined) == 4
    (tmp_path / "es_y-ud-test.conllu").write_text(CONLLU.replace("\tADV\t", "\t_\t"), encoding="utf-8")
    with pytest.raises(ValueError, match="have no tags"):
        read_languages(str(tmp_path), treebank_format(), split="test")


@pytest.fixture
def hub(monkeypatch):
    """Hub data sets by name and config; records what was asked for."""
    sets, asked = {}, []

    def load(path, config, split, revision):
        name = path.removeprefix("hf://datasets/")
        asked.append((name, config, split))
        return sets[name, config]

    def configurations(path, revision):
        return [config for name, config in sets if path == f"hf://datasets/{name}"]

    monkeypatch.setattr(data, "load_dataset", load)
    monkeypatch.setattr(data, "get_dataset_config_names", configurations)
    return sets, asked


def test_hub_sets_by_language(hub):
    sets, asked = hub
    features = Features(
        {"premise": Value("string"), "hypothesis": Value("string"), "label": ClassLabel(names=list(LABELS))}
    )
    for language in ("sw", "en", "all_languages"):
        rows = [
            {"premise": f"p {language}", "hypothesis": "h", "label": 1},
            {"premise": "", "hypothesis": "", "label": 2},
        ]
        sets["org/xnli", language] = Dataset.from_list(rows, features=features)
    read = read_languages("hf:org/xnli:{language}@validation", XNLI, split="dev")
    assert list(read) == ["en", "sw"]
    assert asked == [("org/xnli", "sw", "validation"), ("org/xnli", "en", "validation")]
    assert read["sw"].to_list() == [{"item": "0", "premise": "p sw", "hypothesis": "h", "label": 1}]
    assert list(read_languages("hf:org/xnli:{language}", XNLI, split="dev", languages=["sw"])) == ["sw"]
    assert asked[-1] == ("org/xnli", "sw", "dev")


@pytest.mark.parametrize("label", [-1, None])
def test_hub_rows_without_a_label_are_refused(hub, label):
    sets, _ = hub
    features = Features(
        {"premise": Value("string"), "hypothesis": Value("string"), "label": ClassLabel(names=list(LABELS))}
    )
    sets["org/xnli", None] = Dataset.from_list(
        [{"premise": "p", "hypothesis": "h", "label": label}], features=features
    )
    with pytest.raises(ValueError, match=rf"hf:org/xnli: row 1 has no label: label is {label}"):
        read_languages("hf:org/xnli", XNLI, split="test")


def test_hub_questions_and_treebanks(hub):
    sets, _ = hub
    answers = {"text": ["b"], "answer_start": [2]}
    sets["org/squad", None] = Dataset.from_list([{"id": "x", "question": "q", "context": "a b", "answers": answers}])
    (squad,) = read_languages("hf:org/squad", QUESTIONS, split="train").values()
    assert squad.to_list() == [{"question": "q", "context": "a b", "answers": answers, "item": "x"}]
    features = Features({"tokens": List(Value("string")), "upos": List(ClassLabel(names=["VERB", "NOUN"]))})
    sets["org/ud", "en_ewt"] = Dataset.from_list([{"tokens": ["a", "b"], "upos": [1, 0]}], features=features)
    (ewt,) = read_languages("hf:org/ud:en_ewt", treebank_format(), split="train").values()
    assert ewt.to_list() == [{"item": "0", "words": ["a", "b"], "tags": ["NOUN", "VERB"]}]


def test_halves_never_share_a_premise(nli):
    sets = read_languages(f"{nli}@dev", XNLI, split="dev")

    def split(seed):
        return split_items(sets, "premise", {"test": 0.5, "dev": 0.1, "train": 1.0}, seed=seed)

    def items(parts):
        return {part: found["en"]["item"] for part, found in parts.items()}

    parts = split(3)
    assert items(parts) == items(split(3)) != items(split(4))
    assert {part: len(found["sw"]) for part, found in parts.items()} == {"test": 30, "dev": 6, "train": 24}
    premises = [set(found["en"]["premise"]) for found in parts.values()]
    assert sum(map(len, premises)) == len(set.union(*premises)) == 20
    for found in parts.values():
        assert found["en"]["item"] == found["sw"]["item"]


def test_originals_are_joined_by_item(nli):
    sets = read_languages(str(nli), XNLI, split="train")
    joined = with_originals(sets["sw"].select([4, 1]), sets["en"], NLI)
    assert joined["premise_en"] == [sets["en"]["premise"][4], sets["en"]["premise"][1]]
    assert joined["premise"][0] != joined["premise_en"][0]
    with pytest.raises(ValueError, match="identifiers differ"):
        with_originals(sets["sw"].select([4]), sets["en"].select([1]), NLI)


def test_digest_tells_data_apart(nli):
    sets = read_languages(str(nli), XNLI, split="train")
    assert digest(sets["en"]) == digest(read_languages(str(nli), XNLI, split="train")["en"])
    assert len({digest(sets["en"]), digest(sets["sw"]), digest(sets["en"].select(range(59)))}) == 3


def read_all(folder, form, split="dev"):
    return read_languages(str(folder), form, split=split)


@pytest.mark.parametrize(
    ("name", "form", "line"),
    [
        ("dev-en.tsv", XNLI, "a\tb\tneutral\n"),
        ("en_ewt-ud-dev.conllu", treebank_format(), "1\tI\tI\tPRON\t_\t_\t0\troot\t_\t_\n\n"),
        ("dev-en.json", QUESTIONS, " \n"),
    ],
)
def test_files_that_are_damaged_or_not_utf_8_are_named(tmp_path, monkeypatch, name, form, line):
    path = tmp_path / name
    path.write_bytes(line.encode() * 3000 + b"caf\xe9\n" + line.encode())
    number = 3000 * line.count("\n") + 1
    with pytest.raises(DataError, match=rf"{name}:{number}: this is not UTF-8 \(byte 0xe9 at 3\)"):
        read_all(tmp_path, form)
    packed = path.rename(path.with_name(f"{name}.gz"))
    packed.write_bytes(gzip.compress(line.encode() * 3000)[:-20])
    with pytest.raises(DataError, match=rf"{name}\.gz: the gzip file is damaged or truncated"):
        read_all(tmp_path, form)
    monkeypatch.setattr("metaphrase.corpus.text.EXPANSION_AFTER", 1 << 16)
    packed.write_bytes(gzip.compress(line.encode() * (1 << 17)))
    with pytest.raises(DataError, match=r"expands to more than"):
        read_all(tmp_path, form)


def test_questions_that_are_no_json_are_named(tmp_path):
    (tmp_path / "dev-en.json").write_text('{"data": [', encoding="utf-8")
    with pytest.raises(DataError, match=r"dev-en\.json is not in SQuAD's JSON format: Expecting"):
        read_all(tmp_path, QUESTIONS)


@pytest.mark.parametrize(
    ("name", "form", "content"),
    [
        ("dev-en.json", QUESTIONS, '{"data": [{}]}'),
        ("dev-en.json", QUESTIONS, '{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1"}]}]}]}'),
        ("en_ewt-ud-dev.conllu", treebank_format(), "1 I I PRON _ _ 0 root _ _"),
        ("en_ewt-ud-dev.conllu", treebank_format(fused=True), "1 I I PRON _ _ 0 root _ _\n2\n"),
    ],
)
def test_files_with_another_content_are_named(tmp_path, name, form, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=rf"{name}:? (is damaged, or is another kind of file|sentence 1 has no words)"):
        read_all(tmp_path, form)


def test_questions_need_ids_of_their_own_and_answers_in_their_context(tmp_path, caplog):
    def write(*questions):
        found = [
            {"id": id, "question": "?", "answers": [{"text": text, "answer_start": at}]} for id, text, at in questions
        ]
        article = {"paragraphs": [{"context": "the cat sat", "qas": found}]}
        path = tmp_path / "test-en.json"
        path.write_text(json.dumps({"data": [article]}), encoding="utf-8")
        return path

    rows = [("1", " cat ", 3), ("2", "cat", 8), ("3", "", 0), ("4", "cat", -7), ("5", "sat", 8)]
    (read,) = read_languages(str(write(*rows)), QUESTIONS, split="test").values()
    assert [one["text"] for one in read["answers"]] == [["cat"], ["cat"], [""], ["cat"], ["sat"]]
    assert [one["answer_start"] for one in read["answers"]] == [[4], [NOWHERE], [NOWHERE], [NOWHERE], [8]]
    assert "3 questions have an answer that is not at its place" in caplog.text
    with pytest.raises(DataError, match="has two questions with the id '1'"):
        read_languages(str(write(rows[0], rows[0])), QUESTIONS, split="test")


def test_languages_have_scripts_and_regions(tmp_path):
    for code in ("en", "zh-Hant", "pt-BR"):
        (tmp_path / f"dev-{code}.tsv").write_text("one\ttwo\tneutral\n")
    assert set(read_languages(str(tmp_path), XNLI, split="dev")) == {"en", "zh-Hant", "pt-BR"}


def test_sentences_whose_words_are_withheld_are_left_out(tmp_path):
    """Also if one of them, such as its full stop, is there."""
    rows = [
        "1\t_\t_\tNOUN\t_\t_\t0\troot\t_\t_",
        "2\t_\t_\tVERB\t_\t_\t1\tdep\t_\t_",
        "3\t.\t.\tPUNCT\t_\t_\t1\tpunct\t_\t_",
    ]
    rows += ["", "1\tFin\tfin\tNOUN\t_\t_\t0\troot\t_\t_", "2\t_\t_\tSYM\t_\t_\t1\tdep\t_\t_"]
    rows += ["3\t!\t!\tPUNCT\t_\t_\t1\tpunct\t_\t_"]
    (tmp_path / "es_x-ud-test.conllu").write_text("\n".join(rows), encoding="utf-8")
    (spanish,) = read_languages(str(tmp_path), treebank_format(), split="test").values()
    assert spanish["words"] == [["Fin", "_", "!"]]
