import pytest
from datasets import Dataset

from metaphrase.evaluation.transfer.data import UPOS
from metaphrase.evaluation.transfer.options import FineTuningArguments
from metaphrase.evaluation.transfer.tagging import Tagger, TaggingOptions, TaggingTask
from metaphrase.modeling.views import UNSCORED
from tests.evaluation.transfer.conftest import program, read_json

SENTENCE = {
    "words": ["the", "newspaper", "\u200d", "is", "new", "10 000", "today"],
    "tags": ["DET", "NOUN", "X", "AUX", "ADJ", "NUM", "ADV"],
}


@pytest.mark.parametrize("max_length", [6, 8, 48])
def test_every_word_is_in_one_part(tokenizer, max_length):
    parts = list(Tagger(tokenizer, max_length).parts(SENTENCE))
    assert [tag for part in parts for tag in part.tags] == SENTENCE["tags"]
    assert all(len(part.first) == len(part.tags) > 0 for part in parts)
    assert all(len(part.inputs["input_ids"]) <= max_length for part in parts)
    if max_length == 48:
        assert len(parts) == 1


def test_labels_are_at_first_pieces(tokenizer):
    tagger = Tagger(tokenizer, 48)
    (part,) = tagger.parts(SENTENCE)
    batch = tagger([part, part])
    at = 1
    for word, tag in zip(SENTENCE["words"], SENTENCE["tags"], strict=True):
        pieces = tokenizer(word, add_special_tokens=False)["input_ids"] or [tokenizer.unk_token_id]
        assert batch["input_ids"][0, at : at + len(pieces)].tolist() == pieces
        assert batch["labels"][0, at] == UPOS.index(tag)
        assert (batch["labels"][0, at + 1 : at + len(pieces)] == UNSCORED).all()
        at += len(pieces)
    assert batch["labels"][1, 0] == batch["labels"][1, at] == UNSCORED


def test_a_word_longer_than_a_part_keeps_its_first_piece(tokenizer):
    row = {"words": ["a", "newspaperkatzegarten", "a"], "tags": ["DET", "X", "DET"]}
    parts = list(Tagger(tokenizer, 5).parts(row))
    assert [part.tags for part in parts] == [("DET",), ("X",), ("DET",)]
    assert all(len(part.inputs["input_ids"]) <= 5 for part in parts)


@pytest.mark.parametrize("max_length", [8, 48])
def test_parts_of_a_sentence_are_one_item(tiny_encoder_dir, tmp_path, max_length):
    options = TaggingOptions(model=str(tiny_encoder_dir), max_length=max_length)
    task = TaggingTask(options, FineTuningArguments(output_dir=str(tmp_path), use_cpu=True))
    short = {"words": ["the", "dog"], "tags": ["DET", "NOUN"]}
    score = task.score(task.build(), Dataset.from_list([SENTENCE, short, SENTENCE]), "en")
    assert [gold for _, _, gold in score.items] == [7, 2, 7]


@pytest.mark.long
def test_program_learns(treebanks, common, tmp_path, capsys):
    arguments = [*common, "--train", f"{treebanks}@dev", "--test", str(treebanks), "--max_steps", "120"]
    arguments += ["--learning_rate", "3e-3", "--dropout", "0"]
    assert program("finetune_tagging").main([*arguments, "--eval_steps", "60", "--max_length", "16"]) == 0
    assert "accuracy" in capsys.readouterr().out
    results = read_json(tmp_path / "out" / "results.json")
    assert results["task"] == "udpos"
    assert {part: list(data) for part, data in results["data"].items()} == {
        "train": ["en"],
        "dev": ["en"],
        "test": ["en", "es"],
    }
    score = results["languages"]["es"]
    assert score["metrics"]["accuracy"] > 90
    assert score["metrics"]["f1"] > 80
    assert score["interval"][0] <= score["metrics"]["f1"] <= score["interval"][1]
    assert len(score["items"]) == score["n"] == 30  # although a sentence may have parts
    correct, predicted, gold = map(sum, zip(*score["items"], strict=True))
    assert score["metrics"]["f1"] == pytest.approx(100 * 2 * correct / (predicted + gold))
    assert {entry["step"] for entry in results["runs"]["en"]["dev"]} == {60, 120}


def test_a_sentence_that_just_fits_has_one_part(tokenizer):
    (whole,) = Tagger(tokenizer, 48).parts(SENTENCE)
    size = len(whole.inputs["input_ids"])
    assert [len(list(Tagger(tokenizer, length).parts(SENTENCE))) for length in (size, size - 1)] == [1, 2]
