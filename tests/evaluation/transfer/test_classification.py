import pytest
import torch

from metaphrase.corpus.code_switching import NLI
from metaphrase.evaluation.transfer import classification
from metaphrase.evaluation.transfer.classification import collate_pairs
from tests.evaluation.transfer.conftest import program, read_json


def test_pairs_are_cut_at_the_longer_text(tokenizer):
    row = {"premise": "the dog drinks water the dog drinks water", "hypothesis": "the cat", "label": 2}
    batch = collate_pairs(tokenizer, NLI, 8, [row, row | {"premise": "the", "label": 0}])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [8, 6]
    assert batch["labels"].tolist() == [2, 0]
    whole = tokenizer(row["premise"], row["hypothesis"])["input_ids"]
    assert batch["input_ids"][0].tolist()[-4:] == whole[-4:]  # the short text is there


def test_zero_shot_from_the_command_line(nli, common, tmp_path, capsys):
    assert program("finetune_nli").main([*common, "--halves", f"{nli}@dev", "--dev_share", "0.2"]) == 0
    printed = capsys.readouterr().out
    assert "sw" in printed
    assert "without English" in printed
    results = read_json(tmp_path / "out" / "results.json")
    assert results["task"] == "xnli"
    assert list(results["languages"]) == ["en", "sw"]
    for score in results["languages"].values():
        assert score["n"] == len(score["items"]) == 30
        assert score["metrics"]["accuracy"] == pytest.approx(100 * sum(score["items"]) / 30)
        assert score["interval"][0] <= score["metrics"]["accuracy"] <= score["interval"][1]
    mean = sum(score["metrics"]["accuracy"] for score in results["languages"].values()) / 2
    assert results["average"]["accuracy"] == pytest.approx(mean)
    assert results["average_without_english"] == results["languages"]["sw"]["metrics"]
    assert results["runs"]["en"]["steps"] == 8
    assert [entry["step"] for entry in results["runs"]["en"]["dev"]] == [4, 8]
    assert set(results["data"]) == {"train", "dev", "test"}
    assert results["data"]["train"] == {"en": {"n": 18, "sha256": results["data"]["train"]["en"]["sha256"]}}
    assert len(results["model_sha256"]) == 64
    assert results["seconds"] > 0


@pytest.mark.slow
def test_learns(nli, common, tmp_path):
    """The class is told by the words of the hypothesis."""
    program("finetune_nli").main(
        [
            *common,
            "--train",
            str(nli),
            "--test",
            str(nli),
            "--selection",
            "last",
            "--max_steps",
            "80",
            "--dropout",
            "0",
        ]
    )
    results = read_json(tmp_path / "out" / "results.json")
    assert results["languages"]["en"]["metrics"]["accuracy"] > 90
    assert results["languages"]["sw"]["metrics"]["accuracy"] > 90
    losses = [loss for _, loss in results["runs"]["en"]["loss"]]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.long
def test_training_data_of_the_modes(nli, common, tmp_path, monkeypatch):
    seen = []

    def recorded(tokenizer, columns, max_length, rows):
        if torch.is_grad_enabled():
            seen.append([(row["premise"].split()[-1], row["item"]) for row in rows])
        return collate_pairs(tokenizer, columns, max_length, rows)

    monkeypatch.setattr(classification, "collate_pairs", recorded)
    arguments = [*common, "--halves", f"{nli}@dev", "--dev_share", "0.2", "--max_steps", "2", "--eval_steps", "2"]

    def trained(mode):
        seen.clear()
        program("finetune_nli").main([*arguments, "--mode", mode, "--output_dir", str(tmp_path / mode)])
        return list(seen), read_json(tmp_path / mode / "results.json")

    batches, results = trained("translate-train")
    assert list(results["runs"]) == ["en", "sw"]
    languages = [{language for language, _ in batch} for batch in batches]
    assert languages == sorted(languages, key=[{"en"}, {"sw"}].index)  # first English, then Swahili, never both
    assert {"en"} in languages
    assert {"sw"} in languages
    batches, results = trained("translate-train-all")
    assert list(results["runs"]) == ["all"]
    assert results["runs"]["all"]["items"] == 36
    assert {language for batch in batches for language, _ in batch} == {"en", "sw"}
    assert list(results["languages"]) == ["en", "sw"]
    batches, results = trained("code-switching")
    english = [batch for batch in batches if {language for language, _ in batch} == {"en"}]
    assert batches[: len(english)] == english != []
    coupled = batches[len(english) :]
    assert coupled
    for batch in coupled:  # eight rows: four items, each with the premise in Swahili and in English
        assert len(batch) == 8
        assert [language for language, _ in batch] == ["sw", "en"] * 4
        assert [item for _, item in batch[::2]] == [item for _, item in batch[1::2]]
    assert {code: score["checkpoint"] for code, score in results["languages"].items()} == {"en": 2, "sw": 2}


def test_linear_head(nli, common, tmp_path):
    arguments = ["--halves", f"{nli}@dev", "--head", "linear", "--selection", "last", "--max_steps", "1"]
    program("finetune_nli").main([*common, *arguments])
    assert read_json(tmp_path / "out" / "results.json")["settings"]["head"] == "linear"
