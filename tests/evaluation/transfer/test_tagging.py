import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


TEXT = "the new newspaper is read by the new dog today"


def bpe_tokenizer(kind):
    """A tokenizer that marks spaces as those of RoBERTa, XLM-R or Gemma do: the last has none before the first word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = byte_level if kind == "roberta" else pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        special_tokens=["<unk>"], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    if kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")


@pytest.mark.parametrize("kind", ["roberta", "xlmr", "gemma"])
@pytest.mark.parametrize("max_length", [4, 48])
def test_words_have_the_pieces_of_the_text(kind, max_length):
    made = bpe_tokenizer(kind)
    row = {"words": TEXT.split(), "tags": ["X"] * 10}
    parts = list(Tagger(made, max_length).parts(row))
    assert [piece for part in parts for piece in part.inputs["input_ids"]] == made(TEXT)["input_ids"]
    assert sum(len(part.first) for part in parts) == 10


def test_pieces_of_wordpiece_and_sentencepiece_are_those_of_single_words(tokenizer):
    """So that results of BERT, XLM-R and E5 stay comparable."""
    words = [word for word in SENTENCE["words"] if word.isprintable()]
    for one in (tokenizer, bpe_tokenizer("xlmr")):
        (part,) = Tagger(one, 48).parts({"words": words, "tags": ["X"] * len(words)})
        encoded = one(words, is_split_into_words=True)
        assert part.inputs["input_ids"] == encoded["input_ids"]
        assert [encoded.word_ids()[at] for at in part.first] == [*range(len(words))]


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
