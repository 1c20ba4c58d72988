import gzip
import json

import numpy as np
import pytest

from metaphrase.cli import evaluate, main


class EchoModel:
    """Finds the translation of the first ``found`` sentences of each language."""

    def __init__(self, found, prompts=None):
        self.found = found
        self.prompts = prompts or {}
        self.prompted = []

    def encode(self, texts, *, prompt, **kwargs):
        self.prompted.append(prompt)
        table = np.random.default_rng(0).normal(size=(40, 12))
        rows = [int(text.split()[1]) for text in texts]
        shift = [not text.startswith("en") and row >= self.found for text, row in zip(texts, rows, strict=True)]
        return np.array([table[(row + moved) % 40] for row, moved in zip(rows, shift, strict=True)])


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for language in ("sw", "te", "vi"):
        for split in ("", ".dev"):
            with gzip.open(folder / f"{language}-en{split}.tsv.gz", "wt") as file:
                file.write("source\ttarget\n" + "".join(f"{language} {i}\ten {i}\n" for i in range(40)))
    return folder


@pytest.fixture
def loaded(monkeypatch):
    models = {
        "weak": EchoModel(10, prompts={"query": "query: "}),
        "strong": EchoModel(35),
    }
    prepared = []

    def prepare(model, **options):
        prepared.append(options)
        return model

    monkeypatch.setattr(evaluate, "load_encoder", models.__getitem__)
    monkeypatch.setattr(evaluate, "prepare", prepare)
    return models, prepared


def test_writes_the_contract(data, loaded, tmp_path, capsys):
    output = tmp_path / "out" / "result.json"
    arguments = ["evaluate", "strong", "--suite", "retrieval", "--data", str(data), "--output", str(output)]
    assert main([*arguments, "--languages", "sw,te", "--resamples", "200", "--seed", "3"]) == 0
    result = json.loads(output.read_text())
    assert result["suite"] == "retrieval"
    assert result["model"] == "strong"
    assert list(result["languages"]) == ["sw", "te"]
    assert result["languages"]["sw"]["source_to_target"]["accuracy"] == 87.5
    assert result["settings"]["resamples"] == 200
    assert result["settings"]["seed"] == 3
    assert result["settings"]["data"] == str(data / "xx-en.tsv.gz")
    printed = capsys.readouterr().out
    assert "87.5" in printed
    assert "Wrote" in printed


@pytest.mark.parametrize("languages", [["sw,te"], ["sw", "te"], ["sw,", "te"], []])
def test_languages_by_comma_or_space(data, loaded, tmp_path, languages):
    output = tmp_path / "result.json"
    arguments = ["evaluate", "--model", "strong", "--data", str(data), "--output", str(output)]
    assert main(arguments + (["--languages", *languages] if languages else [])) == 0
    assert list(json.loads(output.read_text())["languages"]) == (["sw", "te"] if languages else ["sw", "te", "vi"])


def test_baseline_model_is_measured_at_its_best(data, loaded, tmp_path, capsys):
    models, prepared = loaded
    output = tmp_path / "result.json"
    arguments = ["evaluate", "strong", "--data", str(data), "--baseline", "weak", "--output", str(output)]
    assert main([*arguments, "--prompt", "none", "--pooling", "cls", "--layer", "7", "--max-length", "32"]) == 0
    assert models["weak"].prompted == ["query: "]
    assert models["strong"].prompted == [""]
    assert prepared == [{"max_length": 32}, {"pooling": "cls", "layer": 7, "max_length": 32}]
    result = json.loads(output.read_text())
    assert result["baseline"]["model"] == "weak"
    assert result["comparison"]["languages"]["sw"]["verdict"] == "better"
    assert result["comparison"]["pooled"]["difference"] == pytest.approx(62.5)
    printed = capsys.readouterr().out
    assert "25.0 → 87.5" in printed
    assert "better" in printed


def test_auto_prompt_is_the_stored_one(data, loaded):
    models, _ = loaded
    main(["evaluate", "weak", "--data", str(data)])
    main(["evaluate", "weak", "--data", str(data), "--prompt", "none"])
    main(["evaluate", "weak", "--data", str(data), "--prompt", ""])
    main(["evaluate", "weak", "--data", str(data), "--prompt", "passage: "])
    main(["evaluate", "strong", "--data", str(data)])
    assert models["weak"].prompted == ["query: ", "", "", "passage: "]
    assert models["strong"].prompted == [""]


def test_baseline_from_a_file(data, loaded, tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert main(["evaluate", "weak", "--data", str(data), "--output", str(before)]) == 0
    arguments = ["evaluate", "strong", "--data", str(data), "--output", str(after), "--languages", "te"]
    assert main([*arguments, "--baseline", str(before)]) == 0
    result = json.loads(after.read_text())
    assert list(result["comparison"]["languages"]) == ["te"]
    assert result["baseline"] == json.loads(before.read_text())


def test_split_and_text_equality(data, loaded, tmp_path):
    output = tmp_path / "result.json"
    arguments = ["evaluate", "strong", "--data", str(data), "--output", str(output)]
    assert main([*arguments, "--split", "dev", "--text_equality", "true", "--batch_size", "5"]) == 0
    settings = json.loads(output.read_text())["settings"]
    assert settings["data"].endswith("xx-en.dev.tsv.gz")
    assert settings["text_equality"] is True
    assert settings["batch_size"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strong"], "--data"),
        (["--data", "{data}"], "--model"),
        (["strong", "--data", "{data}", "--languages", "fr"], "no pairs for fr. It has: sw, te, vi"),
        (["strong", "--data", "{data}/nowhere"], "is no folder"),
        (["strong", "--data", "{data}", "--split", "test"], "Its splits are: dev, none"),
        (["strong", "--data", "{data}", "--suite", "mining"], "retrieval"),
        (["strong", "--data", "{data}", "--layers", "3"], "--layer"),
        (["strong", "--data", "{data}", "--baseline", "{data}/none.json"], "none.json"),
        (["strong", "--data", "{data}", "--baseline", "{data}/other.json"], "no result of"),
        (["strong", "--data", "{data}", "--baseline", "{data}/broken.json"], "not JSON"),
    ],
)
def test_mistakes_are_one_clear_line(data, loaded, capsys, arguments, message):
    (data / "other.json").write_text('{"suite": "mining"}')
    (data / "broken.json").write_text("{")
    assert main(["evaluate", *(argument.format(data=data) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_nothing_is_written_when_the_comparison_is_refused(data, loaded, tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    main(["evaluate", "weak", "--data", str(data), "--output", str(before)])
    arguments = ["evaluate", "strong", "--data", str(data), "--split", "dev", "--output", str(after)]
    with gzip.open(data / "sw-en.dev.tsv.gz", "wt") as file:
        file.write("source\ttarget\nsw 1\ten 1\n")
    assert main([*arguments, "--baseline", str(before)]) == 2
    assert "'sw' are over different pairs (40 before, 1 after)" in capsys.readouterr().err
    assert not after.exists()


def test_help_reads_well(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "--model",
        "--data",
        "--languages",
        "--baseline",
        "--prompt",
        "--pooling",
        "--layer",
        "--max_length",
    ):
        assert option in text
