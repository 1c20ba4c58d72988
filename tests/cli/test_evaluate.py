import gzip
import io
import json
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from metaphrase.cli import evaluate as evaluate_command
from metaphrase.cli import main
from metaphrase.cli.tables import models_table
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import find_folder, name_parts, split_vectors
from metaphrase.evaluation.compare import compare, verdict_shown
from metaphrase.evaluation.encoding import encode_texts
from metaphrase.evaluation.result import Measurement, Result, mean_of
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.suites import SUITES, Benchmark, DataUnavailable, Sample, Suite, benchmarks, running
from metaphrase.evaluation.suites.folders import in_each_folder, text_size
from metaphrase.evaluation.suites.running import Evaluations, ModelScore
from metaphrase.io.digests import encoder_digest, model_hash
from metaphrase.merging import TaskVector
from metaphrase.publishing.report import render_summary, render_table


def measured(*args, **options):
    """The JSON form of a result."""
    return evaluate_retrieval(*args, **options).to_dict()


class EchoModel:
    """Finds the translation of the first ``found`` sentences of each language."""

    def __init__(self, found, prompts=None):
        self.found = found
        self.prompts = prompts or {}
        self.prompted = []

    def parameters(self):
        return iter(())

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
def loaded(monkeypatch, tmp_path):
    models = {
        "weak": EchoModel(10, prompts={"query": "query: "}),
        "strong": EchoModel(35),
    }
    prepared = []

    def prepare(model, **options):
        prepared.append(options)
        return model

    monkeypatch.setattr(running, "load_encoder", models.__getitem__)
    monkeypatch.setattr(running, "find_folder", lambda name: (name, models[name]))
    monkeypatch.setattr(running, "name_parts", lambda name: (name, []) if name in models else name_parts(name))
    monkeypatch.setattr(running, "prepare", prepare)
    for digest in ("model_hash", "encoder_digest"):
        monkeypatch.setattr(benchmarks, digest, lambda model, *precision: 16 * f"{model.found:02d}")
    monkeypatch.setattr(running, "encoding_speed", lambda model, **options: 1e-6)
    monkeypatch.chdir(tmp_path)
    return models, prepared


def test_writes_the_contract(data, loaded, tmp_path, capsys):
    output = tmp_path / "out" / "result.json"
    arguments = ["evaluate", "strong", "--suite", "retrieval", "--data", str(data), "--output", str(output)]
    assert main([*arguments, "--languages", "sw,te", "--resamples", "200", "--seed", "3"]) == 0
    result = json.loads(output.read_text())
    assert result["suite"] == "retrieval"
    assert result["model"] == "strong"
    assert list(result["scores"]) == ["data", "data xsim"]
    one = result["scores"]["data"]
    assert list(one["languages"]) == ["sw", "te"]
    assert one["languages"]["sw"]["source_to_target"]["accuracy"] == 87.5
    assert one["average"]["score"] == one["average"]["mean"]["accuracy"]
    assert one["settings"]["data"] == str(data / "xx-en.tsv.gz")
    for settings in (result["settings"], one["settings"]):
        assert settings["resamples"] == 200
        assert settings["seed"] == 3
    assert list(result["parts"]) == ["data"]
    assert json.loads((tmp_path / "runs" / "evaluation" / "results.json").read_text()) == result
    printed, notes = capsys.readouterr()
    assert "87.5" in printed
    assert "Wrote" not in printed
    assert "Wrote" in notes


@pytest.mark.parametrize("languages", [["sw,te"], ["sw", "te"], ["sw,", "te"], []])
def test_languages_by_comma_or_space(data, loaded, tmp_path, languages):
    output = tmp_path / "result.json"
    arguments = ["evaluate", "--model", "strong", "--data", str(data), "--output", str(output)]
    assert main(arguments + (["--languages", *languages] if languages else [])) == 0
    assert list(json.loads(output.read_text())["scores"]["data"]["languages"]) == (
        ["sw", "te"] if languages else ["sw", "te", "vi"]
    )


def test_baseline_is_measured_with_its_stored_prompt_and_without(data, loaded, tmp_path, capsys):
    models, prepared = loaded
    output = tmp_path / "result.json"
    arguments = ["evaluate", "strong", "--data", str(data), "--baseline", "weak", "--output", str(output)]
    assert main([*arguments, "--prompt", "none", "--pooling", "cls", "--layer", "7", "--max-length", "32"]) == 0
    assert models["weak"].prompted == ["query: ", ""]
    assert models["strong"].prompted == [""]
    assert prepared == [{"max_length": 32}, {"pooling": "cls", "layer": 7, "max_length": 32}]
    result = json.loads(output.read_text())
    assert result["baseline"]["model"] == "weak"
    assert list(result["comparisons"]) == ["data", "data xsim"]
    comparison = result["comparisons"]["data"]
    assert comparison["languages"]["sw"]["verdict"] == "better"
    assert comparison["pooled"]["difference"] == pytest.approx(62.5)
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
    assert models["weak"].prompted == ["query: ", "", "passage: "]  # an empty prompt is none, whose result is cached
    assert models["strong"].prompted == [""]


def test_baseline_from_a_file(data, loaded, tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert main(["evaluate", "weak", "--data", str(data), "--output", str(before)]) == 0
    arguments = ["evaluate", "strong", "--data", str(data), "--output", str(after), "--languages", "te"]
    assert main([*arguments, "--baseline", str(before)]) == 0
    result = json.loads(after.read_text())
    assert list(result["comparisons"]["data"]["languages"]) == ["te"]
    assert result["baseline"] == json.loads(before.read_text())


@pytest.mark.parametrize("damage", [None, {"statistic": 3}, {"languages": {"te": {"n": 40, "score": 1.0}}}])
def test_damaged_scores_of_a_baseline_are_skipped_before_anything_is_measured(data, loaded, tmp_path, capsys, damage):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert main(["evaluate", "weak", "--data", str(data), "--output", str(before)]) == 0
    content = json.loads(before.read_text())
    content["scores"]["data"] = damage and content["scores"]["data"] | damage
    before.write_text(json.dumps(content))
    arguments = ["evaluate", "strong", "--data", str(data), "--output", str(after), "--baseline", str(before)]
    capsys.readouterr()
    assert main(arguments) == 0
    notes = capsys.readouterr().err
    assert notes.count("Not compared: data. ") == 1
    assert notes.index("Not compared: data. ") < notes.index("Estimate for strong")
    result = json.loads(after.read_text())
    assert list(result["comparisons"]) == list(result["baseline"]["scores"]) == ["data xsim"]


@pytest.mark.parametrize(("before", "after"), [(["--bf16"], []), ([], ["--bf16"]), ([], [])])
def test_a_baseline_in_another_precision_is_noted(data, loaded, tmp_path, capsys, monkeypatch, before, after):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    file = str(tmp_path / "before.json")
    assert main(["evaluate", "weak", "--data", str(data), "--output", file, *before]) == 0
    capsys.readouterr()
    assert main(["evaluate", "strong", "--data", str(data), "--baseline", file, *after]) == 0
    this, that = ("bfloat16", "float32") if after else ("float32", "bfloat16")
    said = f"this evaluation is in {this}, but the baseline of data was measured in {that}, which changes"
    assert (said in " ".join(capsys.readouterr().err.split())) == (before != after)


def test_bfloat16_is_ignored_where_it_is_slow(tiny_encoder_dir, sets, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert command(tiny_encoder_dir, sets / "tatoeba", tmp_path, "--bf16") == 0
    assert "bf16 is disabled" in caplog.text
    first = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert first["settings"]["bf16"] is False
    monkeypatch.setattr(running, "describe_protocol", None)  # nothing is measured again
    assert command(tiny_encoder_dir, sets / "tatoeba", tmp_path) == 0
    assert json.loads((tmp_path / "kept" / "results.json").read_text())["scores"] == first["scores"]


def test_a_single_folder_is_cached_as_one_benchmark(tiny_encoder_dir, sets, tmp_path, monkeypatch, capsys):
    assert command(tiny_encoder_dir, sets / "tatoeba", tmp_path) == 0
    (cached,) = (path for path in (tmp_path / "kept").rglob("*.json") if path.name != "results.json")
    first = json.loads((tmp_path / "kept" / "results.json").read_text())["scores"]
    monkeypatch.setattr(running, "describe_protocol", None)  # nothing is measured again
    assert command(tiny_encoder_dir, sets / "tatoeba", tmp_path) == 0
    assert json.loads((tmp_path / "kept" / "results.json").read_text())["scores"] == first
    assert cached.name.startswith("tatoeba-")
    monkeypatch.undo()
    assert command(tiny_encoder_dir, sets / "tatoeba", tmp_path, "--margin_k", "4") == 0
    by_margin = json.loads((tmp_path / "kept" / "results.json").read_text())["scores"]
    assert by_margin["tatoeba"]["settings"]["margin_k"] == 4
    assert by_margin["tatoeba xsim"]["languages"] == first["tatoeba xsim"]["languages"]


def test_a_folder_alone_and_in_a_folder_of_folders_has_the_same_results(tiny_encoder_dir, sets, tmp_path):
    found = []
    for folder, output in ((sets, "all"), (sets / "tatoeba", "one")):
        assert (
            main(["evaluate", str(tiny_encoder_dir), "--data", str(folder), "--output_dir", str(tmp_path / output)])
            == 0
        )
        found.append(json.loads((tmp_path / output / "results.json").read_text())["scores"])
    for name in ("tatoeba", "tatoeba xsim"):
        for key in ("languages", "groups", "average", "measure", "statistic", "protocol"):
            assert found[0][name][key] == found[1][name][key]


def test_split_and_text_equality(data, loaded, tmp_path):
    output = tmp_path / "result.json"
    arguments = ["evaluate", "strong", "--data", str(data), "--output", str(output)]
    assert main([*arguments, "--split", "dev", "--text_equality", "true", "--batch_size", "5"]) == 0
    settings = json.loads(output.read_text())["scores"]["data"]["settings"]
    assert settings["data"].endswith("xx-en.dev.tsv.gz")
    assert settings["text_equality"] is True
    assert settings["batch_size"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strong"], "--data"),
        (["--data", "{data}"], "--model"),
        (["strong", "--data", "{data}", "--languages", "fr"], "no pairs for fr. It has: sw, te, vi"),
        (["strong", "--data", "{data}/nowhere"], "is not a folder"),
        (["strong", "--data", "{data}", "--split", "test"], "Its splits are: dev, none"),
        (["strong", "--data", "{data}", "--suite", "minig"], "retrieval"),
        (["strong", "--data", "{data}", "--suite", "mining"], "mining needs a folder of BUCC files"),
        (["strong", "--suite", "mteb"], "--suite sts (STS22) and --suite mteb --tasks read the Hub without it"),
        (["strong", "--data", "{data}", "--k", "3"], "--k applies to --suite mining and has no effect"),
        (["strong", "--data", "{data}", "--tasks", "udhr"], "--tasks applies to --suite mteb"),
        (
            ["strong", "--data", "{data}", "--suite", "quick", "--transfer", "finetune"],
            "--suite quick does not fine-tune encoders",
        ),
        (["strong", "--data", "{data}", "--suite", "sts", "--protocols", "train_oracle"], "--protocols applies to"),
        (
            ["strong", "--data", "{data}", "--suite", "sts", "--split", "dev"],
            "--split applies to --suite mteb, retrieval",
        ),
        (
            ["strong", "--data", "{data}", "--suite", "mining", "--margin_k", "4"],
            "--margin_k applies to --suite retrieval",
        ),
        (
            ["strong", "--data", "{data}", "--suite", "nli", "--pooling", "cls"],
            "--pooling applies to --suite answer-retrieval, mining",
        ),
        (["strong", "--data", "{data}", "--suite", "word-alignment", "--prompt", "x"], "--prompt applies to"),
        (["strong", "--data", "{data}", "--layers", "3"], "--layer"),
        (["strong", "--data", "{data}", "--pooling", "men"], "invalid choice: 'men' (did you mean 'mean'?)"),
        (
            ["strong", "--data", "{data}", "--baseline", "{data}/none.json"],
            "The file {data}/none.json does not exist.",
        ),
        (["strong", "--data", "{data}", "--baseline", "{data}/other.json"], "is not a result of"),
        (
            ["strong", "--data", "{data}", "--baseline", "{data}/broken.json"],
            "broken.json is damaged, or is another kind of file",
        ),
        (
            ["strong", "--data", "{data}", "--baseline", "{data}/mining.json"],
            "must be a result of the suite retrieval, but {data}/mining.json is one of mining",
        ),
        (
            ["strong", "--data", "{data}", "--baseline", "{data}/news.json"],
            "must have a result of data, but {data}/news.json has news. Evaluate the baseline on the same data.",
        ),
    ],
)
def test_mistakes_are_one_clear_line(data, loaded, capsys, arguments, message):
    (data / "other.json").write_text('{"suite": "mining"}')
    (data / "broken.json").write_text("{")
    for suite, part in (("mining", "data"), ("retrieval", "news")):
        earlier = {"suite": suite, "scores": {part: {}}, "parts": {part: {}}}
        (data / f"{part if suite == 'retrieval' else suite}.json").write_text(json.dumps(earlier))
    assert main(["evaluate", *(argument.format(data=data) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message.format(data=data) in error
    assert len(error.strip().splitlines()) == 1


def test_a_baseline_on_other_data_is_refused_before_anything_is_measured(data, loaded, tmp_path, capsys):
    models, _ = loaded
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    main(["evaluate", "weak", "--data", str(data), "--output", str(before)])
    arguments = ["evaluate", "strong", "--data", str(data), "--split", "dev", "--output", str(after)]
    assert main([*arguments, "--baseline", str(before)]) == 2
    error = capsys.readouterr().err
    assert f"No result of {before} can be compared: data, whose baseline was measured on other files" in error
    assert models["strong"].prompted == []
    assert not after.exists()


def test_results_of_several_encoders_are_no_baseline(data, loaded, tmp_path, capsys):
    both = tmp_path / "both.json"
    assert main(["evaluate", "weak", "strong", "--data", str(data), "--output", str(both)]) == 0
    assert main(["evaluate", "strong", "--data", str(data), "--baseline", str(both)]) == 2
    assert f"{both} has the results of several encoders. Evaluate the baseline alone" in capsys.readouterr().err


def test_a_baseline_with_a_sample_is_refused_before_anything_is_measured(data, loaded, tmp_path, capsys):
    """As one of --suite all, for a data set of which --suite all measures a sample."""
    models, _ = loaded
    before = tmp_path / "before.json"
    main(["evaluate", "weak", "--data", str(data), "--output", str(before)])
    content = json.loads(before.read_text())
    content["parts"]["data"]["protocol"] += "; sample: the first 5 items of each language"
    before.write_text(json.dumps(content | {"suite": "all"}))
    assert main(["evaluate", "strong", "--data", str(data), "--baseline", str(before)]) == 2
    assert "the first 5 items of each language, and this evaluation all items" in capsys.readouterr().err
    assert models["strong"].prompted == []


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(data, loaded, tmp_path, capsys):
    (tmp_path / "file").touch()
    arguments = ["evaluate", "strong", "--data", str(data), "--output", str(tmp_path / "file" / "results.json")]
    assert main(arguments) == 2
    assert f"The output folder {tmp_path / 'file'} is not writable" in capsys.readouterr().err
    _, prepared = loaded
    assert not prepared


@pytest.mark.parametrize(
    "others", [["./weka"], ["--baseline", "./weka"], ["strong + weka.safetensors"], ["--baseline", "weak + weka"]]
)
def test_a_misspelt_encoder_is_refused_before_anything_is_measured(data, loaded, monkeypatch, capsys, others):
    models, prepared = loaded
    monkeypatch.setattr(running, "name_parts", split_vectors)
    monkeypatch.setattr(running, "find_folder", lambda name: name in models or find_folder(name))
    assert main(["evaluate", "strong", *others, "--data", str(data)]) == 2
    assert "weka" in capsys.readouterr().err
    assert not prepared


def test_a_vector_without_its_base_is_refused_before_anything_is_measured(
    data, loaded, tiny_encoder_dir, tmp_path, capsys
):
    model = load_encoder(tiny_encoder_dir, device="cpu")
    folder = tmp_path / "vector"
    folder.mkdir()
    TaskVector.between(model, model, base_name=str(tmp_path / "weka")).save(folder / "task_vector.safetensors")
    assert main(["evaluate", "strong", str(folder), "--data", str(data)]) == 2
    assert "weka" in capsys.readouterr().err
    assert not loaded[1]


def test_scores_that_cannot_be_compared_are_written(data, loaded, tmp_path, capsys):
    """Which languages changed is known only after the measurement, if the baseline has more languages."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    main(["evaluate", "weak", "--data", str(data), "--output", str(before)])
    with gzip.open(data / "te-en.tsv.gz", "wt") as file:
        file.write("source\ttarget\nte 1\ten 1\n")
    arguments = ["evaluate", "strong", "--data", str(data), "--languages", "te", "--output", str(after)]
    capsys.readouterr()
    assert main([*arguments, "--baseline", str(before)]) == 0
    printed = capsys.readouterr()
    assert "Not compared: data. The two results for 'te' are over different items (40 before, 1 after)" in " ".join(
        printed.err.split()
    )
    assert "difference" not in printed.out
    result = json.loads(after.read_text())
    assert result["scores"]["data"]["languages"]["te"]["n"] == 1
    assert (result["comparisons"], result["baseline"]["scores"]) == ({}, {})


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
    assert "default: None" not in text
    words = " ".join(text.split())
    assert "Default: all in the folder. --split" in words  # and not once more
    assert "(default: retrieval)" in words
    assert "all suites except nli, qa, mteb, in minutes" in words


def test_retrieval_by_margin(data, loaded, tmp_path):
    output = tmp_path / "result.json"
    assert main(["evaluate", "strong", "--data", str(data), "--margin_k", "4", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    one = result["scores"]["data"]
    assert one["settings"]["margin_k"] == 4
    assert one["average"]["mean"]["accuracy"] > 50
    assert result["scores"]["data xsim"]["average"]["score"] == 100 - one["average"]["score"]


def test_quotation_marks_are_stripped_on_request(data, loaded, tmp_path):
    output = tmp_path / "result.json"
    with gzip.open(data / "sw-en.tsv.gz", "wt") as file:
        file.write('source\ttarget\nsw 1"\ten 1\nsw 2\t"en" 2\n')
    arguments = ["evaluate", "strong", "--data", str(data), "--languages", "sw", "--output", str(output)]
    assert main([*arguments, "--strip_quotes"]) == 0
    result = json.loads(output.read_text())
    assert result["settings"]["strip_quotes"] is True
    assert result["scores"]["data"]["average"]["score"] == 100


# --- Suites ---


@pytest.fixture
def sets(bitext, tmp_path):
    """A folder of data sets: retrieval and STS."""
    root = tmp_path / "sets"
    for folder, language, rows in (
        ("tatoeba", "de", bitext[:12]),
        ("tatoeba", "sw", bitext[12:]),
        ("udhr", "de", bitext),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        with gzip.open(root / folder / f"{language}-en.tsv.gz", "wt") as file:
            file.write("source\ttarget\n" + "".join(f"{row['source']}\t{row['target']}\n" for row in rows))
    (root / "stsb").mkdir()
    (root / "stsb" / "stsb-de-test.csv").write_text(
        "".join(f"{bitext[i]['source']},{bitext[i + 1]['source']},{i % 5}\n" for i in range(20))
    )
    return root


@pytest.fixture
def other_dir(tiny_encoder, tmp_path):
    """Another checkpoint of the tiny encoder."""
    with torch.no_grad():
        for layer in tiny_encoder[0].auto_model.encoder.layer:
            layer.output.dense.weight.normal_(std=0.3)
    tiny_encoder.save_pretrained(str(tmp_path / "other"))
    return tmp_path / "other"


def command(model, sets, tmp_path, *options):
    output = ["--output_dir", str(tmp_path / "kept"), "--resamples", "50"]
    return main(["evaluate", str(model), "--data", str(sets), *output, *options])


def test_a_folder_of_folders_is_measured_one_by_one(tiny_encoder_dir, sets, tmp_path, capsys):
    assert command(tiny_encoder_dir, sets, tmp_path) == 0
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert list(results["parts"]) == ["tatoeba", "udhr"]
    encoder = load_encoder(str(tiny_encoder_dir))
    assert results["model_hash"] == model_hash(encoder)
    expected = measured(encoder, load_parallel_folder(sets / "tatoeba"), resamples=50)
    found = results["scores"]["tatoeba"]
    assert found["average"]["score"] == pytest.approx(expected["average"]["mean"]["accuracy"])
    assert results["parts"]["tatoeba"]["data"]["sha256"] != results["parts"]["udhr"]["data"]["sha256"]
    assert results["settings"]["resamples"] == 50
    folder = tmp_path / "kept" / encoder_digest(encoder)[:12]
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["tatoeba", "udhr"]
    table, printed = capsys.readouterr()
    estimate, rest = printed.split("[1/2]")
    assert "Estimate for" in estimate
    assert "top-1 by cosine" in estimate
    assert "Wrote" in rest
    assert "tatoeba xsim" in table
    assert "xsim error ↓" in table
    assert "languages" in table.rpartition("tatoeba xsim")[0]  # in the summary, instead of numbers of pairs


def test_an_interrupted_command_resumes(tiny_encoder_dir, sets, tmp_path, monkeypatch, capsys):
    measured = []
    run_benchmark = running.run_benchmark

    def interrupted(part, subject):
        if part.name == "udhr" and len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(part.name)
        return run_benchmark(part, subject)

    monkeypatch.setattr(running, "run_benchmark", interrupted)
    assert command(tiny_encoder_dir, sets, tmp_path) == 130
    assert not (tmp_path / "kept" / "results.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("tatoeba-*.json")}
    assert len(kept) == 1
    capsys.readouterr()
    measured.append("again")
    assert command(tiny_encoder_dir, sets, tmp_path) == 0
    _, printed = capsys.readouterr()
    assert "done" in printed.split("[1/2]")[0]
    assert "(cached)" in " ".join(printed.split())
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert list(json.loads((tmp_path / "kept" / "results.json").read_text())["parts"]) == ["tatoeba", "udhr"]


def test_a_baseline_adds_verdicts(tiny_encoder_dir, other_dir, sets, tmp_path, capsys):
    assert command(other_dir, sets, tmp_path, "--baseline", str(tiny_encoder_dir), "--suite", "sts") == 0
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    compared = results["comparisons"]["stsb"]
    assert compared["languages"]["de"]["verdict"] in ("better", "tie", "worse")
    assert compared["languages"]["de"]["after"] == results["scores"]["stsb"]["languages"]["de"]["score"]
    assert compared["languages"]["de"]["before"] == results["baseline"]["scores"]["stsb"]["average"]["score"]
    assert results["baseline"]["model_hash"] != results["model_hash"]
    printed = capsys.readouterr().out
    assert "higher is better" in printed
    assert f"1 {verdict_shown(compared['languages']['de'])}" in printed


def test_a_baseline_from_earlier_results(tiny_encoder_dir, other_dir, sets, tmp_path):
    before = tmp_path / "before.json"
    assert command(tiny_encoder_dir, sets, tmp_path, "--output", str(before)) == 0
    assert command(other_dir, sets, tmp_path, "--baseline", str(before)) == 0
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert results["baseline"] == json.loads(before.read_text())
    assert list(results["comparisons"]) == ["tatoeba", "tatoeba xsim", "udhr", "udhr xsim"]


def rows_of(table):
    return [line.split()[0] for line in table.splitlines() if line.strip()]


@pytest.mark.long
def test_each_language_is_shown(tiny_encoder_dir, other_dir, sets, tmp_path, capsys):
    options = ["--suite", "mteb", "--tasks", "tatoeba", "--languages", "de", "sw"]
    assert command(tiny_encoder_dir, sets, tmp_path, *options) == 0
    alone = capsys.readouterr().out
    assert {"de-en", "en-de", "sw-en", "en-sw"} <= set(rows_of(alone))
    assert "f1 (higher is better); MTEB bitext mining" in " ".join(alone.split())
    assert command(other_dir, sets, tmp_path, *options, "--baseline", str(tiny_encoder_dir)) == 0
    compared = capsys.readouterr().out
    assert " → " in compared.split("de-en")[1].splitlines()[0]
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    for side in (results, results["baseline"]):
        assert f"{side['scores']['mteb tatoeba']['languages']['de-en']['score']:.1f}" in compared
    assert command(tiny_encoder_dir, sets, tmp_path, "--languages", "de") == 0
    tables = capsys.readouterr().out
    assert rows_of(tables).count("de") == 4  # two folders, accuracy and error


def test_the_mean_of_a_baseline_is_over_the_same_languages(data, loaded, tmp_path, capsys):
    before = tmp_path / "before.json"
    assert main(["evaluate", "weak", "--data", str(data), "--output", str(before)]) == 0
    results = json.loads(before.read_text())
    results["scores"]["data"]["average"]["score"] = 1.0  # of all languages
    before.write_text(json.dumps(results))
    capsys.readouterr()
    assert main(["evaluate", "strong", "--data", str(data), "--baseline", str(before), "--languages", "te"]) == 0
    summary = capsys.readouterr().out.rpartition("verdicts")[2]
    assert f"{results['scores']['data']['languages']['te']['score']:.1f} → " in summary
    assert "1.0 →" not in summary


def test_a_classifier_that_predicts_one_class_is_marked():
    row = {"n": 300, "score": 55.0, "interval": [49.7, 60.7], "majority": 55.0, "learned": False}
    scores = {
        "model": "m",
        "statistic": "items",
        "measure": "accuracy",
        "lower_is_better": False,
        "protocol": "p",
        "groups": {},
    }
    scores |= {"languages": {"de": row, "en": row | {"learned": True}}, "average": {"n": 2, "score": 55.0}}
    results = {"model": "m", "scores": {"pawsx accuracy": scores}}
    console = Console(width=150, record=True, file=io.StringIO())
    for table in (render_table(scores), render_summary(results)):
        console.print(table)
    text = console.export_text()
    assert "de (not learned: the largest class is 55.0 %)" in text
    assert "en (not" not in text
    assert "pawsx accuracy (not learned in 1 of 2)" in text


@pytest.mark.parametrize(("runs", "verdict"), [(1, "one run"), (3, "better")])
def test_a_difference_after_one_fine_tuning_is_marked(runs, verdict):
    def result(name, items):
        details = {"items": items, "run_scores": [float(np.mean(items))] * runs}
        english = Measurement(len(items), 100 * float(np.mean(items)), details=details)
        return Result(
            "nli", name, "accuracy", {"en": english}, Measurement(1, english.score), statistic="items"
        ).to_dict()

    before, after = result("a", [0, 1] * 100), result("b", [1] * 200)
    comparison = compare(before, after)
    baseline = {"model": "a", "scores": {"xnli accuracy": before}}
    results = {"model": "b", "scores": {"xnli accuracy": after}, "baseline": baseline}
    results["comparisons"] = {"xnli accuracy": comparison}
    row = ModelScore("xnli accuracy", "b", "accuracy", False, 100.0, 50.0, **_tested(comparison["pooled"]))
    several = Evaluations([results], [row], baseline)
    for table in (render_table(after, before, comparison), render_summary(results), models_table(several)):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(table)
        text = console.export_text()
        assert verdict in text.partition("one run: fine-tuned once")[0]
        assert ("--finetuning_runs 3" in text) is (runs == 1)
    tie = compare(before, before)
    assert "finetuning_runs" not in str(render_table(before, before, tie).caption)


def _tested(row):
    return {key: row[key] for key in ("difference", "interval", "verdict", "n", "runs")}


def test_a_tie_on_sentences_that_languages_share_is_too_few_to_tell():
    row = {"difference": 0.0, "interval": [-1.0, 1.0], "verdict": "tie", "n": 240, "clusters": 60}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(
        models_table(Evaluations([], [ModelScore("few", "b", "accuracy", False, 50.0, 50.0, **row)], {"model": "a"}))
    )
    assert "too few to tell" in console.export_text()


def test_all_names_suites_without_an_option(tiny_encoder_dir, sets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running, "find_benchmarks", lambda *args, **options: ([], {}))
    assert command(tiny_encoder_dir, sets, tmp_path, "--suite", "all", "--pooling", "mean") == 2
    notes = " ".join(capsys.readouterr().err.split())
    assert (
        "Note: --pooling applies only to answer-retrieval, mining, mteb, paraphrase, retrieval, sib200, sts, xsim++."
        in notes
    )


def test_all_suites_with_data_are_measured(tiny_encoder_dir, sets, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    assert command(tiny_encoder_dir, sets, tmp_path, "--suite", "all") == 0
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    pairs = ["tatoeba xsim++", "udhr xsim++", "mteb tatoeba", "mteb udhr"]
    assert list(results["parts"]) == ["tatoeba", "udhr", "stsb", *pairs]
    assert set(results["skipped"]) == set(SUITES) - {"retrieval", "sts", "xsim++", "mteb"} | {"sts22"}
    assert results["failed"] == {}
    assert len(list((tmp_path / "kept" / "mteb").rglob("*-bitext.json"))) == 2
    _, printed = capsys.readouterr()
    assert "Skipped: nli, which needs xnli/dev-xx.tsv.gz" in printed
    assert "Skipped: sts22" in printed


def test_a_failed_benchmark_does_not_stop_the_others(tiny_encoder_dir, sets, tmp_path, monkeypatch, capsys):
    (sets / "stsb" / "stsb-de-test.csv").write_text("broken\n")

    def nothing(part, subject):
        if part.name == "sts22":
            raise DataUnavailable("no Hub")
        if part.name == "udhr":
            raise RuntimeError("out of memory")
        return run_benchmark(part, subject)

    run_benchmark = running.run_benchmark
    monkeypatch.setattr(running, "run_benchmark", nothing)
    assert command(tiny_encoder_dir, sets, tmp_path, "--suite", "sts") == 2
    assert ": sts22: no Hub; stsb:" in capsys.readouterr().err
    assert command(tiny_encoder_dir, sets, tmp_path, "--suite", "all", "--tasks", "udhr") == 2
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert "row 1 must be two sentences" in results["failed"]["stsb"]
    assert results["failed"]["udhr"] == "out of memory"
    assert list(results["parts"]) == ["tatoeba", "tatoeba xsim++", "udhr xsim++", "mteb udhr"]
    notes = capsys.readouterr().err
    assert "Failed: stsb" in notes
    assert "Failed: udhr: out of memory" in notes


@in_each_folder
def find_closeness(folder, settings):
    """Another suite: the share of pairs whose cosine is above the median."""
    file = folder / "pairs.tsv"

    def measure(subject):
        rows = [line.split("\t") for line in file.read_text().splitlines()][: settings.first]
        sides = (encode_texts(subject.model, side, **subject.encoding()) for side in zip(*rows, strict=True))
        first, second = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
        cosines = (first * second).sum(axis=1)
        one = Measurement.of_items(cosines > np.median(cosines), "0" * 64)
        return {"pairs": Result("closeness", subject.name, "share", {"de": one}, mean_of([one]), statistic="items")}

    if file.exists():
        yield Benchmark("pairs", "closeness", "cosine above the median", (file,), text_size([file]), measure)


def test_a_suite_is_one_entry_of_the_table(tiny_encoder_dir, other_dir, bitext, tmp_path, monkeypatch, capsys):
    """The choices and the help of --suite, the options, the sample of quick and the comparisons follow from it."""
    reads, further = ("prompt", "bf16", "split"), ("tasks",)
    suite = Suite("closeness", "close pairs", "pairs.tsv", find_closeness, reads, further, Sample(6, 0.5))
    monkeypatch.setitem(SUITES, suite.name, suite)
    for module in (running, evaluate_command):  # which read the table when they are imported
        monkeypatch.delitem(sys.modules, module.__name__)
        parent, _, name = module.__name__.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], name, module)
    (tmp_path / "data").mkdir()
    pairs = "".join(f"{row['source']}\t{row['target']}\n" for row in bitext[:12])
    (tmp_path / "data" / "pairs.tsv").write_text(pairs)

    def run(*options):
        status = command(other_dir, tmp_path / "data", tmp_path, "--baseline", str(tiny_encoder_dir), *options)
        return status, " ".join(capsys.readouterr().err.split())

    for name, n in (("closeness", 12), ("quick", 6)):
        status, notes = run("--suite", name, "--split", "dev")
        assert status == 0
        results = json.loads((tmp_path / "kept" / "results.json").read_text())
        assert results["scores"]["pairs"]["languages"]["de"]["n"] == n
        assert results["comparisons"]["pairs"]["languages"]["de"]["verdict"] == "tie"
    assert "--split applies only to closeness, mteb, retrieval, xsim++." in notes
    assert "--k applies to --suite mining and has no effect" in run("--suite", "closeness", "--k", "3")[1]
    assert "--tasks applies to --suite closeness, mteb" in run("--suite", "mining", "--tasks", "pairs")[1]
    assert "'closenes' (did you mean 'closeness'?)" in run("--suite", "closenes")[1]
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    assert "closeness: close pairs; quick: " in " ".join(capsys.readouterr().out.split())


def test_several_encoders_are_compared_with_one_baseline(data, loaded, tmp_path, capsys):
    arguments = [
        "--data",
        str(data),
        "--languages",
        "sw,te",
        "--baseline",
        "weak",
        "--output",
        str(tmp_path / "all.json"),
    ]
    assert main(["evaluate", "weak", "strong", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert json.loads((tmp_path / "all.json").read_text()) == printed
    assert [one["model"] for one in printed["models"]] == ["weak", "strong"]
    assert printed["baseline"]["model"] == "weak"
    rows = [row for row in printed["rows"] if row["data"] == "data"]
    assert [(row["model"], row["score"], row.get("verdict")) for row in rows] == [
        ("strong", 87.5, "better"),
        ("weak", 25.0, "tie"),
    ]
    assert "too few to tell" in err
    assert main(["evaluate", "strong", *arguments, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone.pop("baseline")["model"] == "weak"
    assert alone.keys() == printed["models"][1].keys()
    assert alone["comparisons"] == printed["models"][1]["comparisons"]
    assert main(["evaluate", "strong", "weak", *arguments[:2], "-q"]) == 0
    assert "difference" not in capsys.readouterr().out


def test_stdout_contains_only_json(data, loaded, capsys):
    assert main(["evaluate", "strong", "--json", "--data", str(data), "--languages", "sw", "--baseline", "weak"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["comparisons"]["data"]["languages"]["sw"]["verdict"] == "better"
    assert "25.0 → 87.5" in err
    assert main(["evaluate", "strong", "--data", str(data), "--languages", "sw", "-q"]) == 0
    out, err = capsys.readouterr()
    assert "87.5" in out
    assert err == ""


def test_a_failure_of_the_baseline_is_reported(tiny_encoder_dir, other_dir, sets, tmp_path, monkeypatch):
    run_benchmark = running.run_benchmark

    def fails(part, subject):
        if part.name == "udhr" and subject.name == str(tiny_encoder_dir):
            raise RuntimeError("out of memory")
        return run_benchmark(part, subject)

    monkeypatch.setattr(running, "run_benchmark", fails)
    assert command(other_dir, sets, tmp_path, "--baseline", str(tiny_encoder_dir)) == 2
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert results["baseline"]["failed"] == {"udhr": "out of memory"}
    assert results["failed"] == {}


def test_a_truncated_file_fails_alone(tiny_encoder_dir, sets, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (sets / "stsb" / "stsb-de-test.csv").unlink()
    content = gzip.compress("".join(f"a {at},b {at},{at % 5}\n" for at in range(999)).encode())
    (sets / "stsb" / "stsb-de-test.csv.gz").write_bytes(content[: len(content) // 2])
    assert command(tiny_encoder_dir, sets, tmp_path, "--suite", "all") == 2
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert "damaged or truncated" in results["failed"]["stsb"]
    assert "tatoeba" in results["parts"]
