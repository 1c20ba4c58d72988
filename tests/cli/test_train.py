import gzip
import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import AutoModel, AutoTokenizer

import metaphrase.training.arguments as arguments_module
from metaphrase.cli import main
from metaphrase.cli.output import emit
from metaphrase.cli.runs import parse_run, summary
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.guards import AlphaCurve
from metaphrase.exceptions import UsageError
from metaphrase.publishing.examples import usage_lines
from metaphrase.training.configuration import RunConfig
from metaphrase.training.results import RunResult
from metaphrase.training.run import TrainingRun
from tests.hub_server import reach, serve_hub
from tests.processes import run_python
from tests.training.test_baseline import write_sets

ROOT = Path(__file__).parents[2]
CANARY = "hf_CANARYcanaryCANARYcanary0123456789"
#: A token of a Hub whose tokens look like nothing in particular.
OTHER_CANARY = "tweety-in-his-cage"


@pytest.fixture
def bitext_file(tmp_path, bitext):
    """The bitext as people have it: packed TSV, language in the file's name."""
    path = tmp_path / "de-en.train.tsv.gz"
    with gzip.open(path, "wt", encoding="utf-8", newline="\n") as out:
        out.write("source\ttarget\n" + "".join(f"{row['source']}\t{row['target']}\n" for row in bitext))
    return path


@pytest.fixture
def held_out(tmp_path, bitext):
    folder = tmp_path / "held-out"
    folder.mkdir()
    with gzip.open(folder / "de-en.tsv.gz", "wt", encoding="utf-8", newline="\n") as out:
        out.write("source\ttarget\n" + "".join(f"{row['source']}\t{row['target']}\n" for row in bitext[:15]))
    return folder


@pytest.fixture
def run(tiny_encoder_dir, bitext_file, tmp_path):
    def run(*more, output="out", recipe="dap", retention=("--retention", "none")):
        options = [
            "--model",
            str(tiny_encoder_dir),
            "--corpus",
            str(bitext_file),
            "--output_dir",
            str(tmp_path / output),
        ]
        small = ["--recipe", recipe, "--max_length", "24", "--max_steps", "4", "--per_device_train_batch_size", "8"]
        status = main(["train", *options, *small, "--use_cpu", "--report_to", "none", *retention, *more])
        return status, tmp_path / output

    return run


@pytest.mark.long
def test_several_seeds_are_trained_and_compared(run, held_out, tmp_path, capsys):
    command = ("--languages", "de", "--test", str(held_out), "--seeds", "1", "2")
    status, output = run(*command, "--json", recipe="tr")
    assert status == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["runs"] == [str(output / "seed-1"), str(output / "seed-2")]
    (row,) = printed["rows"]
    assert (row["configuration"], row["test"], row["seeds"]) == ("tr", "held-out", [1, 2])
    assert [json.loads((output / f"seed-{n}" / "run.json").read_text())["seed"] for n in (1, 2)] == [1, 2]
    assert run(*command, "--push_to_hub", "true", output="b")[0] == 2
    assert run("--languages", "de", "--seeds", "1", output="c")[0] == 2
    said = capsys.readouterr().err
    assert "omit --push_to_hub" in said
    assert "--seeds compares runs" in said
    assert not {"b", "c"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("left", "more", "message"),
    [
        ("thesis.txt", (), "seed-2 holds thesis.txt, which metaphrase did not write"),
        ("checkpoint-3/manifest.json", (), "seed-2 holds checkpoint-3 of an earlier run"),
        (
            "_metaphrase",
            ("--resume_from_checkpoint", "a/checkpoint-3"),
            "is true or false: a checkpoint belongs to one",
        ),
    ],
)
def test_a_folder_of_a_later_seed_is_checked_before_the_first_is_trained(
    run, held_out, tmp_path, capsys, left, more, message
):
    path = tmp_path / "out" / "seed-2" / left
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert run("--languages", "de", "--test", str(held_out), "--seeds", "1", "2", *more)[0] == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "seed-1").exists()


@pytest.mark.long
def test_language_identity_is_removed_from_the_release(run, bitext, monkeypatch, capsys):
    texts = {str(place): [row["source"]] for place, row in enumerate(bitext[:12])}
    monkeypatch.setattr("metaphrase.training.finishing.parallel_texts", lambda **_: texts)
    plain, debiased = (
        run("--languages", "de", *more, output=name)[1] for name, more in (("a", ()), ("b", ("--debias", "5")))
    )
    before, after = (SentenceTransformer(str(folder), device="cpu") for folder in (plain, debiased))
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, after.state_dict()[name])
    (dense,) = (module for module in after if isinstance(module, Dense))
    rank = torch.linalg.matrix_rank(dense.linear.weight.double(), atol=1e-4)
    assert int(rank) == dense.linear.in_features - 5
    assert (
        "the 5 directions in which the mean embeddings of 12 languages differ most"
        in (debiased / "README.md").read_text()
    )
    assert json.loads((debiased / "run.json").read_text())["debias"]["directions"] == 5
    assert run("--languages", "de", "--debias", "5", recipe="wacse-language", output="c")[0] == 2
    assert "Omit --merge, --debias and --guard" in capsys.readouterr().err


@pytest.mark.long
def test_the_release_is_merged_with_the_start_and_keeps_its_prompts_for_search(run, tiny_encoder, tmp_path):
    start = tmp_path / "start"
    tiny_encoder.prompts = {"query": "ask: ", "passage": "tell: "}
    tiny_encoder.save_pretrained(str(start))
    folders = [
        run("--languages", "de", "--model", str(start), *more, output=name)[1]
        for name, more in (("a", ()), ("b", ("--merge", "0.25")))
    ]
    trained, merged = (SentenceTransformer(str(folder), device="cpu") for folder in folders)
    for name, before in tiny_encoder.state_dict().items():
        wanted = torch.lerp(before, trained.state_dict()[name], 0.25)
        torch.testing.assert_close(merged.state_dict()[name], wanted, rtol=0, atol=1e-6)
    assert not any(trained.prompts.values())
    uses = ("sentence", "question", "passage")
    assert [resolve_prompt(merged, "auto", use) for use in uses] == ["", "ask: ", "tell: "]
    assert "`query` (`ask: `)" in (folders[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_alpha_is_chosen_under_guards(run, held_out, bitext, tmp_path, capsys):
    """The curve is written, and the card, the report and the console say how alpha was chosen."""
    pairs = [("one", "two"), ("three", "four"), *((row["source"], row["target"]) for row in bitext)] * 2
    guard = tmp_path / "sts"
    guard.mkdir()
    rows = "".join(f'"{a}","{b}",{at % 5}\n' for at, (a, b) in enumerate(pairs))
    (guard / "de-dev.csv").write_text(rows, encoding="utf-8")
    options = (
        "--languages",
        "de",
        "--merge",
        "auto",
        "--guard",
        str(guard),
        "--learning_rate",
        "0.05",
    )
    assert run(*options)[0] == 2
    assert "pass --dev" in capsys.readouterr().err
    assert run(*options, "--merge", "2")[0] == 2
    assert "'merge' must be a number from 0 to 1 or 'auto', but is 2" in capsys.readouterr().err
    status, output = run(*options, "--dev", str(held_out), "--test", str(held_out))
    assert status == 0
    curve = json.loads((output / "alpha.json").read_text())
    assert (output / "alpha.png").is_file()
    assert [point["alpha"] for point in curve["points"]] == [0, 0.1, 0.25, 0.5, 0.75, 1]
    assert curve["points"][0]["guards"].keys() == {"similarity structure", "sts"}
    assert not curve["gains"]  # at this learning rate
    facts = json.loads((output / "run.json").read_text())["merge"]
    assert facts["alpha"] == curve["alpha"]
    printed, card = capsys.readouterr().out, (output / "README.md").read_text(encoding="utf-8")
    assert f"plus {curve['alpha']:g} times the weight changes from training" in card
    assert "| other abilities: sts |" in card
    assert "Other abilities, sts, 1 language: " in printed
    assert str(AlphaCurve(**curve)) in printed
    assert "Gain and cost by alpha" in (output / "report.html").read_text(encoding="utf-8")


def test_from_a_file_to_a_release(run, bitext, capsys):
    status, output = run("--languages", "de", "--vocabulary", "english", "--freeze_word_embeddings")
    assert status == 0
    names = {path.name for path in output.iterdir()}
    assert {"modules.json", "model.safetensors", "recipe.yaml", "README.md", "run.json", "config.json"} <= names
    assert "heads" not in names
    assert "training_args.bin" not in names
    from safetensors import safe_open

    with safe_open(output / "model.safetensors", "pt") as tensors:
        assert not [key for key in list(tensors.keys()) if "pooler" in key or "head" in key]
    model = SentenceTransformer(str(output), device="cpu")
    texts = [row["source"] for row in bitext]
    encoder, tokenizer = AutoModel.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    with torch.no_grad():
        states = encoder(**tokenizer(texts, padding=True, return_tensors="pt")).last_hidden_state[:, 0]
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), states, rtol=1e-5, atol=1e-5)
    facts = json.loads((output / "run.json").read_text())
    assert facts["steps"] == 4
    assert facts["transforms"] == {"rtl": "fresh"}
    assert facts["files"][0]["pairs"] == 24
    assert facts["command"].startswith("metaphrase train --model")
    card = (output / "README.md").read_text()
    assert f'SentenceTransformer("{output}")' in card
    assert "a fresh dense-GELU-LayerNorm transform" in card
    assert "--max_steps 4" in card
    printed = "".join(capsys.readouterr())
    assert printed.count("Released to") == 1
    assert "step 4, epoch 1.333: train loss" in printed
    assert "{'" not in printed
    assert "de-en.train.tsv.gz" in card


def test_the_printed_python_can_be_pasted(capsys):
    usage = usage_lines(f"/a folder{'/with a long name' * 9}", ["sw"])
    emit({}, *summary(RunResult(Path("out"), "starter", {}, report=Path("out/report.html"), usage=usage)))
    assert f"\nUse it:\n\n{usage}\n" in capsys.readouterr().out


@pytest.mark.long
def test_test_sets_are_measured_before_and_after(run, held_out, capsys):
    status, output = run("--test", str(held_out))
    assert status == 0
    report = json.loads((output / "report.json").read_text())
    assert report["comparisons"]["held-out"]["languages"]["de"]["verdict"] in ("better", "tie", "worse")
    assert report["before"]["held-out"]["languages"]["de"]["n"] == 15
    page = (output / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "held-out" in (output / "README.md").read_text()
    printed = capsys.readouterr().out
    assert "SentenceTransformer(" in printed
    before = (output / "before.json").stat().st_mtime_ns
    run("--test", str(held_out), "--resume_from_checkpoint", "true", "--max_steps", "5")
    assert (output / "before.json").stat().st_mtime_ns == before


def retained(output):
    report = json.loads((output / "report.json").read_text())
    return {
        name: [row["language"] for row in one["languages"]] for name, one in report["analysis"]["retention"].items()
    }


def rows_after(output, heading):
    section = (output / "README.md").read_text(encoding="utf-8").split(heading)[1].split("\n#")[0]
    return [line.split(" | ")[:2] for line in section.splitlines() if line.startswith("| ")][2:]


@pytest.mark.long
def test_languages_that_are_not_trained_on_show_what_was_kept(run, held_out, bitext, tmp_path, capsys):
    write_sets(held_out, sw=bitext[:12], fi=bitext[:10])
    far = write_sets(tmp_path / "far", fi=bitext[:9])
    more = ("--test", str(held_out), "--learning_rate", "0.05")
    status, output = run(*more, retention=("--retention", str(far)))
    assert status == 0
    report = json.loads((output / "report.json").read_text())
    assert report["comparisons"]["held-out"]["languages"].keys() == {"de"}
    assert report["after"]["held-out"]["languages"].keys() == {"de"}
    assert {name: sorted(languages) for name, languages in retained(output).items()} == {
        "held-out": ["fi", "sw"],
        "far": ["fi"],
    }
    assert rows_after(output, "## Results") == [["| held-out", "de"], ["| held-out", "all"]]
    assert rows_after(output, "### Retention") == [
        ["| other languages: held-out", "2"],
        ["| other languages: far", "1"],
        ["| other abilities: similarity structure", "9"],
    ]
    assert "Retention: far" in (output / "report.html").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "held-out, 2 languages not trained on: " in printed
    assert "Other abilities, similarity structure, 9 languages: 100.0 → " in printed
    abilities, verdict = report["analysis"]["abilities"], report["analysis"]["verdict"]
    assert abilities["similarity structure"]["verdict"] == "lost"  # at this learning rate
    assert "have collapsed" in verdict  # as those of an encoder with random weights
    assert "kept" not in verdict
    for page in ("README.md", "report.html"):
        assert verdict.split(";")[0] in (output / page).read_text(encoding="utf-8")
    assert verdict in printed
    assert [row["pairs"] for row in report["run"]["leakage"]] == [15 + 12 + 10, 9]


def test_retention_goes_with_test_sets(run, capsys):
    status, _ = run(retention=("--retention", "somewhere"))
    assert status == 2
    assert "pass --test" in capsys.readouterr().err


@pytest.mark.long
def test_the_card_says_what_is_known_of_licences(run, tiny_encoder_dir, tmp_path):
    base = shutil.copytree(tiny_encoder_dir, tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: cc-by-sa-4.0\n---\n# Base\n", encoding="utf-8")
    _, output = run("--model", str(base), "--data_license", "cc0-1.0")
    card = ModelCard.load(output / "README.md")
    assert card.data.license == "cc-by-sa-4.0"
    assert [row["license"] for row in card.data.metaphrase["data"]] == ["cc0-1.0"]
    assert "Files without a licence" not in card.text
    _, output = run("--model", str(base), "--license", "apache-2.0", output="other")
    card = ModelCard.load(output / "README.md")
    assert card.data.license == "apache-2.0"
    assert "Files without a licence" in card.text


def test_an_earlier_runs_checkpoints_are_not_mixed_in(run, capsys):
    run("--save_steps", "2")
    status, output = run()
    assert status == 2
    assert "holds checkpoint-4 of an earlier run" in capsys.readouterr().err
    (output / "checkpoint-4" / "trainer_state.json").unlink()  # as if a crash had cut it off
    from metaphrase.checkpoints.folders import checkpoints

    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]


def test_dev_is_measured_while_training(run, bitext_file):
    status, output = run("--dev", str(bitext_file), "--save_steps", "2")
    assert status == 0
    history = json.loads((output / "run.json").read_text())["log_history"]
    assert len([log for log in history if any("dev" in key and "accuracy" in key for key in log)]) == 2


def test_a_stream_trains_from_the_command_line(run):
    status, output = run("--streaming")
    assert status == 0
    assert (output / "modules.json").exists()


def parsed(*argv):
    return parse_run(argv, prog="metaphrase train", description="", examples=())[0]


def test_paper_settings_are_applied_only_where_asked(tmp_path):
    own = parsed("--recipe", "dap", "--output_dir", str(tmp_path))
    paper = parsed("--recipe", "dap", "--output_dir", str(tmp_path), "--paper_training", "true")
    assert (own.per_device_train_batch_size, own.head_learning_rate, own.max_steps) == (32, 5e-4, -1)
    assert (paper.per_device_train_batch_size, paper.head_learning_rate, paper.max_steps) == (128, None, 100_000)
    assert parsed("--recipe", "dap", "--paper_training", "true", "--max_steps", "7").max_steps == 7
    for found, config in ((own, RunConfig(recipe="dap")), (paper, RunConfig(recipe="dap", paper_training=True))):
        for name in (
            "per_device_train_batch_size",
            "head_learning_rate",
            "max_steps",
            "warmup_steps",
            "max_grad_norm",
        ):
            assert getattr(found, name) == getattr(config, name)


def test_paper_settings_of_a_recipe_without_a_paper_are_refused():
    with pytest.raises(UsageError, match="the recipe 'metaphrase' has none"):
        RunConfig(paper_training=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--corpus", "nowhere.tsv", "--output_dir", "x"], "nowhere.tsv"),
        (["--output_dir", "x"], "pass --corpus"),
        (["--corpus", "x.tsv"], "pass --output_dir"),
        (["--corpus", "x.tsv", "--output_dir", "x", "--streaming"], "pass --max_steps"),
        (["--corpus", "x.tsv", "--output_dir", "x", "--clean", "soap"], "--clean is one of"),
    ],
)
def test_what_is_missing_is_said(options, message, tiny_encoder_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--model", str(tiny_encoder_dir), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_the_files_of_a_run_follow_the_umask(assert_follows_umask, run, held_out):
    """safetensors creates files that only their owner can read: neither weights nor heads stay so, nor get readable by all."""
    status, output = run("--test", str(held_out), "--save_steps", "2", "--report_to", "tensorboard")
    assert status == 0
    assert len(list(output.rglob("*.safetensors"))) == 5
    assert_follows_umask(output)


def test_a_corpus_smaller_than_a_batch_is_refused(run, capsys):
    status, _ = run("--per_device_train_batch_size", "64")
    assert status == 2
    assert "24 pairs, fewer than a batch of 64" in capsys.readouterr().err


def test_the_tutorial_runs(tiny_encoder_dir, bitext_file, tmp_path):
    done = run_python(ROOT / "trainers" / "dap.py", bitext_file, tmp_path / "out", tiny_encoder_dir, 3)
    assert done.returncode == 0, done.stderr
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").encode("ja").shape == (32,)


@pytest.mark.parametrize("name", ["dap", pytest.param("amber", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("words", "status"), [([], 1), (["--help"], 0), (["a.tsv", "out", "-h"], 0)])
def test_a_tutorial_shows_its_usage(name, words, status):
    done = run_python(ROOT / "trainers" / f"{name}.py", *words)
    assert done.returncode == status
    assert f"python trainers/{name}.py sw-en.tsv.gz" in (done.stderr if status else done.stdout)
    assert "Traceback" not in done.stderr


def test_the_training_program_is_the_command():
    done = run_python(ROOT / "trainers" / "train.py", "--help")
    assert "usage: python trainers/train.py" in done.stdout
    assert "--per_device_train_batch_size" in done.stdout


@pytest.mark.long
def test_the_training_program_trains(run, tiny_encoder_dir, bitext_file, tmp_path):
    options = (
        f"--model {tiny_encoder_dir} --corpus {bitext_file} --output_dir {tmp_path}/program --recipe tr --use_cpu"
    )
    options += " --max_length 24 --max_steps 4 --per_device_train_batch_size 8 --report_to none"
    done = run_python(ROOT / "trainers" / "train.py", *options.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/program\n"
    assert run(recipe="tr")[0] == 0
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("program", "out")]
    assert weights[0] == weights[1]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve_hub() as server:
        reach(server, monkeypatch.setattr, tmp_path / "client")
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield server


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
class TestPush:
    PUSH = ("--push_to_hub", "true", "--hub_model_id", "acme/run")

    def card(self, hub) -> ModelCard:
        head = hub.repositories["model", "acme/run"].resolve("main")
        return ModelCard(hub.blobs[head.tree["README.md"].blob].decode())

    def assert_finished(self, card: ModelCard) -> None:
        assert "--max_steps 4" in card.data.metaphrase["command"]
        assert card.data.metaphrase["seed"] == 42
        assert card.data.metaphrase["data"][0]["file"] == "de-en.train.tsv.gz"
        (row,) = [line for line in card.text.splitlines() if line.startswith("| held-out | de |")]
        assert row.count("|") == 8  # test set, language, pairs, before, after, difference, verdict
        assert "Shared with the training data" in card.text
        assert 'SentenceTransformer("acme/run")' in card.text

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("strategy", "titles"),
        [
            ("every_save", ["Training in progress, step 2", "Training in progress, step 4"]),
            pytest.param("end", [], marks=pytest.mark.slow),
        ],
    )
    def test_the_finished_release_is_pushed(self, run, hub, held_out, capsys, strategy, titles):
        options = ["--hub_strategy", strategy, "--hub_private_repo", "true", "--save_steps", "2"]
        status, _ = run("--test", str(held_out), *self.PUSH, *options, "--json")
        assert status == 0
        repository = hub.repositories["model", "acme/run"]
        assert repository.private
        made = [commit.title for commit in repository.commits.values()]
        assert made == ["initial commit", *titles, "End of training"]
        self.assert_finished(self.card(hub))
        assert json.loads(capsys.readouterr().out)["pushed"].endswith(repository.branches["main"])

    @pytest.mark.long
    def test_where_the_hub_fails_all_else_is_there(self, run, hub, held_out, capsys, fault):
        hub.faults.append({"path": "/commit/", "status": 507, "times": 99})
        status, output = run("--test", str(held_out), *self.PUSH, "--hub_strategy", "end")
        out, err = capsys.readouterr()
        assert status == 2
        assert err.endswith(f"push it later with `metaphrase push {output} --repo acme/run`.\n")
        assert "held-out:" in out
        assert (output / "report.html").is_file()
        assert not hub.repositories["model", "acme/run"].resolve("main").tree
        hub.faults.clear()
        assert main(["push", str(output), "--repo", "acme/run"]) == 0
        self.assert_finished(self.card(hub))
        fault("G3", "the last push of a run fails", tried=1, survived=1)

    @pytest.mark.long
    @pytest.mark.parametrize("commit", ["step 2", pytest.param("the last", marks=pytest.mark.slow)])
    def test_a_private_repository_that_turns_public_is_told(self, run, hub, capsys, caplog, fault, commit):
        def publish() -> None:
            hub.repositories["model", "acme/run"].private = False

        hub.faults.append({"path": "/commit/", "then": publish, "skip": 0 if commit == "step 2" else 2})
        status, _ = run(*self.PUSH, "--hub_private_repo", "true", "--save_steps", "2")
        assert status == 2
        err = capsys.readouterr().err
        if commit == "step 2":  # told at once, and nothing more is pushed
            assert "acme/run became public during the push" in caplog.text
            assert "acme/run exists and is public" in err
        else:
            assert "acme/run became public during the push" in err
        assert len(hub.repositories["model", "acme/run"].commits) == (2 if commit == "step 2" else 4)
        fault("G2", f"a run's private repository becomes public during {commit}", tried=1, survived=1)

    def test_a_release_for_each_language_goes_to_no_single_repository(self, run, hub, capsys):
        status, output = run(*self.PUSH, recipe="wacse-language")
        assert status == 2
        assert "push the folders after training: metaphrase push" in capsys.readouterr().err
        assert not list(output.glob("checkpoint-*"))
        assert not hub.repositories

    @pytest.mark.parametrize("given", ["--hub_token", "HF_TOKEN"])
    def test_a_token_that_is_none_is_refused_before_training(self, run, hub, capfd, caplog, monkeypatch, given):
        token = f"{OTHER_CANARY}\n wörd"
        monkeypatch.setenv("HF_TOKEN", token if given == "HF_TOKEN" else CANARY)
        status, output = run(*self.PUSH, *([given, token] if given == "--hub_token" else []))
        assert status == 2
        said = "".join(capfd.readouterr()) + caplog.text
        assert "contains a space, a line break or a letter outside ASCII" in said
        assert "CANARY" not in said
        assert not list(output.glob("checkpoint-*"))
        assert hub.requests == []

    @pytest.mark.long
    def test_no_token_is_written_or_printed(self, run, hub, held_out, tmp_path, capfd, caplog, monkeypatch, fault):
        monkeypatch.setenv("HF_TOKEN", CANARY)
        hub.tokens = {OTHER_CANARY: {"name": "tester", "role": "write", "orgs": ["acme"]}}
        hub.faults.append({"path": "/commit/", "status": 503, "error": f"who is {OTHER_CANARY}, not {CANARY}?"})
        token = ["--hub_token", OTHER_CANARY]
        status, output = run("--test", str(held_out), *self.PUSH, *token, "--report_to", "tensorboard")
        assert status == 0
        said = "".join(capfd.readouterr()) + caplog.text
        assert "who is ***, not $HF_TOKEN?" in said
        self.assert_finished(self.card(hub))
        assert list(output.rglob("events.out.tfevents.*"))
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        for canary in (CANARY, OTHER_CANARY):
            assert canary not in said + json.dumps(hub.requests)
            assert not [content for content in [*written, *hub.blobs.values()] if canary.encode() in content]
        fault("H6", "a training run under two tokens, one of them on the command line", tried=1, survived=1)


@pytest.mark.parametrize("given", [["--hub_token", OTHER_CANARY], [f"--hub-token={OTHER_CANARY}"]])
def test_the_printed_config_has_no_token(given, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--output_dir", "x", *given, "--print-config"])
    out, err = capsys.readouterr()
    assert "output_dir: x" in out
    assert OTHER_CANARY not in out + err
    assert parsed("--output_dir", "x", *given).hub_token == OTHER_CANARY


def test_an_option_replaces_the_setting_of_the_recipe_that_would_override_it(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(
        "name: r\nterms: [{objective: tr}]\ntraining: {max_steps: 5, effective_batch_size: 16}\n"
    )
    (tmp_path / "c.yaml").write_text("num_train_epochs: 2\n")

    def settings(*words):
        with pytest.raises(SystemExit):
            main([*map(str, words), "--print-config"])
        return yaml.safe_load(capsys.readouterr().out)

    train = ["train", "--recipe", tmp_path / "r.yaml"]
    for given in (["--num_train_epochs", 2], ["--num-train-epochs=2"], ["--config", tmp_path / "c.yaml"]):
        found = settings(*train, *given)
        assert found["num_train_epochs"] == 2
        assert found.get("max_steps", -1) == -1
        assert found["effective_batch_size"] == 16
    found = settings(*train, "--per_device_train_batch_size", 100)
    assert (found["per_device_train_batch_size"], found.get("effective_batch_size")) == (100, None)
    assert (
        settings(*train)["max_steps"] == settings(*train, "--num_train_epochs", 2, "--max_steps", 5)["max_steps"] == 5
    )
    assert settings("demo", "--num_train_epochs", 2).get("max_steps", -1) == -1
    assert settings("train", "--recipe", "dap", "--warmup_ratio", 0.3)["warmup_steps"] == 0
    (tmp_path / "c.yaml").write_text("warmup_ratio: null\n")
    assert settings("train", "--recipe", "dap", "--config", tmp_path / "c.yaml")["warmup_steps"] == 0.1


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_no_traceback_has_a_token(error, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise error(f"{CANARY} {OTHER_CANARY} {sys.argv[0]}")

    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("METAPHRASE_DEBUG", "1")
    monkeypatch.setattr(TrainingRun, "execute", fail)
    assert main(["train", "--output_dir", "x", "--hub_token", OTHER_CANARY]) == (70 if error is KeyError else 2)
    said = "".join(capsys.readouterr())
    assert "Traceback" in said
    assert "$HF_TOKEN ***" in said
    assert CANARY not in said
    assert OTHER_CANARY not in said


def test_a_token_in_a_file_is_refused(tmp_path, capsys):
    config, recipe = tmp_path / "c.yaml", tmp_path / "r.yaml"
    config.write_text(f"hub_token: {OTHER_CANARY}\noutput_dir: x\n")
    recipe.write_text(f"name: r\nterms: [{{objective: tr}}]\ntraining: {{hub_token: {OTHER_CANARY}}}\n")
    for given in (["--config", str(config)], ["--recipe", str(recipe), "--output_dir", "x"]):
        assert main(["train", *given, "--print-config"]) == 2
        out, err = capsys.readouterr()
        assert "must not contain a token" in err or "'hub_token' in 'training' of" in err
        assert OTHER_CANARY not in out + err


def test_trackers_get_the_curves(run, tmp_path):
    status, output = run("--report_to", "tensorboard", "--logging_steps", "1")
    assert status == 0
    assert sum(path.stat().st_size for path in output.rglob("events.out.tfevents.*")) > 1000


def test_trackers_that_are_not_there_are_refused(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arguments_module, "get_available_reporting_integrations", lambda: ["tensorboard"])
    for given, message in (
        ("trackio", "pip install trackio"),
        ("wandb", "pip install wandb"),
        ("azure_ml", "pip install azureml-sdk"),
        ("flyte", "pip install flytekit"),
        ("wandbb", "Unknown tracker 'wandbb' (did you mean 'wandb'?); --report_to takes azure_ml,"),
    ):
        status, output = run("--report_to", given)
        assert status == 2
        assert message in capsys.readouterr().err
        assert not output.exists()
