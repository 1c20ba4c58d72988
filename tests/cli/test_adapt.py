import gzip
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer

import metaphrase.cli.adapt as command_module
import metaphrase.training.adaptation as adapt
import metaphrase.training.planning as planning
import metaphrase.training.run as run_module
from metaphrase.checkpoints.folders import checkpoint_folders, verify
from metaphrase.cli import main
from metaphrase.corpus.report import CorpusReport
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.publishing.provenance import PACKAGED
from metaphrase.training.planning import step_seconds
from metaphrase.training.results import RunResult
from metaphrase.training.run import TrainingRun
from metaphrase.training.trainer import AlignmentTrainer
from tests.contracts.conftest import contract  # noqa: F401 - a fixture
from tests.faults.children import holder
from tests.training.test_planning import PLAN

DATA = adapt.PACKAGED_DATA
DEMO = DATA / "demo"


def lines_of(language, n):
    lines = gzip.decompress((DEMO / f"{language}-en.train.tsv.gz").read_bytes()).decode().split("\n")
    return ["\t".join(line.split("\t")[:2]) for line in lines[1 : n + 1]]


def write(path: Path, lines):
    path.write_text("source\ttarget\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def sentences_of(folder: Path):
    rows = [line for path in folder.iterdir() for line in gzip.decompress(path.read_bytes()).decode().splitlines()[1:]]
    return {side for row in rows for side in row.split("\t")}


@pytest.fixture
def loaded(monkeypatch):
    """The encoders, corpora and folders that are loaded."""
    encoders, corpora, folders = [], [], []
    for module in (adapt, run_module):
        load = module.load_encoder
        monkeypatch.setattr(
            module, "load_encoder", lambda name, load=load, **k: encoders.append(str(name)) or load(name, **k)
        )
    corpus, folder = adapt.read_corpus, adapt.load_parallel_folder
    monkeypatch.setattr(adapt, "read_corpus", lambda *a, **k: corpora.append(a[0]) or corpus(*a, **k))
    monkeypatch.setattr(
        adapt, "load_parallel_folder", lambda path, **k: folders.append(path.name) or folder(path, **k)
    )
    for name in ("read_bitext", "read_dev", "read_test_sets"):
        monkeypatch.setattr(run_module, name, lambda *a, **k: pytest.fail("read again"))
    return encoders, corpora, folders


@pytest.mark.long
def test_a_few_hundred_pairs_become_a_model_and_a_verdict(
    tiny_encoder_dir,
    small_data,
    tmp_path,
    capsys,
    loaded,
    contract,  # noqa: F811
):
    """Encoder and corpus are loaded once; the release is loaded to be measured."""
    corpus = write(tmp_path / "my.tsv", lines_of("sw", 400))
    output = tmp_path / "out"
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "sw"]
    command += ["--minutes", "0.02", "--anchor", "1", "--output_dir", str(output), "--json"]
    command += ["--data_license", "cc-by-4.0"]
    assert main(command) == 0
    assert loaded == ([str(tiny_encoder_dir), str(output)], [[str(corpus)]], ["demo", "udhr", "dev", "held-out"])
    result = json.loads(capsys.readouterr().out)
    assert any(line.startswith("Swahili (sw): ") for line in result["verdict"])
    assert result["languages"]["sw"]["verdict"] in ("better", "tie", "worse")
    assert {row["language"] for row in result["retention"]["languages"]} == {"de"}
    assert json.loads((output / "verdict.json").read_text())["verdict"] == result["verdict"]
    assert (output / "report.html").is_file()
    assert {path.name[:2] for path in (output / "data" / "training").iterdir()} == {"sw", "et", "fi", "ml"}
    held = sentences_of(output / "data" / "dev") | sentences_of(output / "data" / "held-out")
    trained = sentences_of(output / "data" / "training")
    assert held
    assert held.isdisjoint(trained)
    assert result["read"]["read"] == 400
    SentenceTransformer(str(output), device="cpu")
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "anchor" in card
    licenses = {row["language"]: row.get("license") for row in ModelCard(card).data.to_dict()["metaphrase"]["data"]}
    assert licenses == {"sw": "cc-by-4.0"} | dict.fromkeys(("et", "fi", "ml"), PACKAGED["license"])
    assert "### Retention" in card
    assert contract("adapt.stdout", result) == []
    assert contract("adapt.verdict", json.loads((output / "verdict.json").read_text())) == []


@pytest.mark.slow
def test_an_adaptation_that_has_ended_is_released_and_measured_again(command):
    assert main([*command, "--minutes", "0.02"]) == 0
    assert main([*command, "--minutes", "0.02"]) == 0


@pytest.mark.long
def test_a_plan_is_estimated_and_nothing_is_written(tiny_encoder_dir, tmp_path, capsys):
    corpus = write(tmp_path / "my.tsv", lines_of("sw", 400))
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "sw", "--plan_only"]
    assert main([*command, "--output_dir", str(tmp_path / "out"), "--minutes", "0.05", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "for measurements" not in err  # the log has it
    plan = json.loads(out)
    assert plan["measuring_minutes"] > 0
    assert plan["training_minutes"] < 1
    assert "for measurements" in plan["reasons"][-1]
    assert not (tmp_path / "out").exists()


def test_other_languages_are_a_sample_or_chosen():
    assert len(adapt.retention_sets([], ["sw"])) == 21
    assert len(adapt.retention_sets(["all"], ["sw"])) == 94
    assert list(adapt.retention_sets(["de,fr"], ["sw"])) == ["de", "fr", "sw"]
    assert list(adapt.retention_sets(["swh,deu"], ["te"])) == ["de", "sw", "te"]
    with pytest.raises(UsageError, match="--retention_languages: the Declaration of Human Rights has no xx"):
        adapt.retention_sets(["de", "xx"], ["sw"])
    with pytest.raises(UsageError, match=r"only languages that are trained on \(sw, de\)"):
        adapt.retention_sets(["sw", "de"], ["sw"], ["de"])


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (lambda: ["\t".join(line.split("\t")[1::-1]) for line in lines_of("sw", 400)], "swapped"),
        (lambda: lines_of("fi", 400), "looks like Finnish"),
    ],
)
def test_a_wrong_corpus_is_stopped_before_training(tiny_encoder_dir, tmp_path, capsys, monkeypatch, spoiled, said):
    monkeypatch.setattr(TrainingRun, "execute", lambda run: pytest.fail("it was trained"))
    corpus = write(tmp_path / "my.tsv", spoiled())
    output = tmp_path / "out"
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "sw"]
    assert main([*command, "--output_dir", str(output)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Nothing was trained" in error
    assert not output.exists()


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The configuration of each run, which is not trained. A run stops after a checkpoint if one is named."""

    class Calls(list):
        checkpoint = None

    def execute(run):
        calls.append(run.config)
        if checkpoint := calls.checkpoint:
            (tmp_path / "out" / checkpoint).mkdir(exist_ok=True)
            raise SystemExit(143)
        pooled = {"difference": 0.0, "interval": [-1.0, 1.0]}
        row = pooled | {"verdict": "tie", "before": 50.0, "after": 50.0, "n": 10}
        languages = dict.fromkeys(run.inputs.dev, row)
        return RunResult(run.output, run.config.model, {}, comparisons={adapt.HELD_OUT: {"languages": languages}})

    calls = Calls()
    monkeypatch.setattr(TrainingRun, "execute", execute)
    monkeypatch.setattr(command_module, "comparison_tables", lambda result: ())
    return calls


def test_a_language_that_cannot_be_identified_is_no_stop(
    tiny_encoder_dir, small_data, tmp_path, capsys, monkeypatch, trained
):
    monkeypatch.setattr(planning, "step_seconds", lambda *a, **k: 1.0)
    lines = gzip.decompress((DATA / "udhr" / "su-en.tsv.gz").read_bytes()).decode().split("\n")[1:]
    rows = ["\t".join(f"{side} {i}" for side in line.split("\t")[:2]) for i in range(3) for line in lines if line]
    corpus = write(tmp_path / "my.tsv", rows)
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "su"]
    assert main([*command, "--output_dir", str(tmp_path / "out")]) == 0
    assert "unknown-language" in capsys.readouterr().err
    assert len(trained) == 1


@pytest.fixture
def command(tiny_encoder_dir, small_data, tmp_path, monkeypatch):
    """The command, with steps that take a second each."""
    monkeypatch.setattr(planning, "step_seconds", lambda *a, **k: 1.0)
    corpus = write(tmp_path / "my.tsv", lines_of("sw", 400))
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "sw"]
    return [*command, "--output_dir", str(tmp_path / "out")]


def test_a_recipe_of_words_aligns_the_pairs_once(command, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "step_seconds", step_seconds)
    assert main([*command, "--recipe", "wacse", "--replay", "0"]) == 0
    assert len(trained) == 1
    (kept,) = (tmp_path / "out").glob("alignment-*.parquet")
    written = kept.stat().st_mtime_ns
    assert main([*command, "--recipe", "wacse", "--replay", "0"]) == 0
    assert (
        [kept.stat().st_mtime_ns] == [one.stat().st_mtime_ns for one in kept.parent.glob("alignment-*")] == [written]
    )


def with_corpus(command, corpus):
    """The command with another corpus."""
    at = command.index("--corpus") + 1
    return [*command[:at], str(corpus), *command[at + 1 :]]


def test_identical_sides_are_refused_even_if_forced(command, tmp_path, capsys):
    sources = [line.split("\t")[0] for line in lines_of("sw", 200)]
    copies = write(tmp_path / "copies.tsv", [f"{source}\t{source}" for source in sources])
    assert main([*with_corpus(command, copies), "--force"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Both sides are the same text in 200 of 200 pairs" in error
    assert error.endswith("Nothing was trained. Fix the corpus.")
    assert not (tmp_path / "out" / "data").exists()


def test_sides_that_differ_in_case_can_be_forced(command, tmp_path, capsys):
    sources = [line.split("\t")[0] for line in lines_of("sw", 200)]
    alike = write(tmp_path / "alike.tsv", [f"{source}\t{source.upper()}" for source in sources])
    assert main([*with_corpus(command, alike), "--plan_only"]) == 2
    assert "Fix the corpus, or pass --force." in " ".join(capsys.readouterr().err.split())
    assert main([*with_corpus(command, alike), "--plan_only", "--force"]) == 0


@pytest.mark.long
def test_what_an_earlier_run_mixed_in_is_gone(command, trained, tmp_path):
    training = tmp_path / "out" / "data" / "training"
    assert main([*command, "--replay", "1"]) == 0
    assert len(list(training.iterdir())) > 1
    assert main([*command, "--replay", "0"]) == 0
    assert [path.name for path in training.iterdir()] == ["sw-en.train.tsv.gz"]
    assert len(trained) == 2


def test_a_stopped_run_keeps_its_plan(command, trained, capsys, monkeypatch):
    trained.checkpoint = "checkpoint-5"
    with pytest.raises(SystemExit, match="143"):
        main(command)
    said = capsys.readouterr().err
    assert "The same `metaphrase adapt` command resumes from checkpoint-5." in said
    monkeypatch.setattr(planning, "step_seconds", lambda *a, **k: pytest.fail("it was timed again"))
    trained.checkpoint = None
    assert main(command) == 0
    before, now = trained
    assert (now.max_steps, now.eval_steps, now.learning_rate) == (
        before.max_steps,
        before.eval_steps,
        before.learning_rate,
    )


@pytest.mark.long
def test_another_adaptation_is_not_gone_on_with(command, trained, tmp_path, capsys, monkeypatch, fault):
    trained.checkpoint = "checkpoint-5"
    with pytest.raises(SystemExit):
        main(command)
    (tmp_path / "out" / "_partial").mkdir()
    (tmp_path / "out" / "_partial" / "leftover").touch()
    shown = sorted((tmp_path / "out").rglob("*"))
    training = {path: path.read_bytes() for path in shown if path.is_file()}
    other = write(tmp_path / "other.tsv", lines_of("sw", 390))
    changes = {
        "minutes (8.0 → 30.0)": ["--minutes", "30"],
        "replay (1.0 → 0.0)": ["--replay", "0"],
        "recipe (": ["--anchor", "1"],
        "seed (42 → 3)": ["--seed", "3"],
        "pairs (": [],
    }
    refused = 0
    for said, options in changes.items():
        assert main([*(command if options else with_corpus(command, other)), *options]) == 2
        error = capsys.readouterr().err
        assert "holds checkpoint-5 of a run that differs in:" in error
        assert "allow_changes" not in error
        assert "choose another --output_dir or delete that folder" in error
        refused += said in error
    fault("A5", "`adapt` resumed with other options or data", tried=len(changes), survived=refused)
    assert len(trained) == 1
    assert {path: path.read_bytes() for path in training} == training
    with monkeypatch.context() as patch:
        patch.setattr(adapt, "encoder_files", lambda name: [other])  # the folder holds another model now
        assert main(command) == 2
    assert 'of a run that differs in: weights ("' in capsys.readouterr().err
    (tmp_path / "out" / adapt.PLAN).write_text("{")
    assert main(command) == 2
    assert "plan.json, which describes its run, is missing or was damaged" in capsys.readouterr().err


def test_a_refused_adaptation_changes_no_data(command, trained, tmp_path, capsys):
    assert main(command) == 0
    data = {path: path.read_bytes() for path in (tmp_path / "out" / "data").rglob("*") if path.is_file()}
    assert main([*command, "--replay", "0", "--retention_languages", "xx"]) == 2
    assert main([*command, "--replay", "0", "--guard", str(tmp_path / "typo")]) == 2
    assert main(with_corpus(command, write(tmp_path / "other.tsv", lines_of("sw", 390)))) == 2
    assert "holds the release of a run on other pairs" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in data} == data


def test_the_limit_of_the_structure_reaches_the_run(command, trained):
    assert main([*command, "--max_structure_loss", "100"]) == 0
    assert [config.max_structure_loss for config in trained] == [100]


def test_a_folder_in_use_is_left_alone(command, trained, tmp_path, capsys, fault):
    child = holder(tmp_path / "out", tmp_path / "log")
    status = main(command)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert status == 2
    assert f"is in use by process {child.pid}" in capsys.readouterr().err
    assert not (tmp_path / "out" / "data").exists()
    fault("A7", "`adapt` on a folder in use", tried=1, survived=1)


def test_its_own_data_are_no_corpus(command, trained, tmp_path, capsys):
    assert main(command) == 0
    own = tmp_path / "out" / "data" / "training"
    assert main(with_corpus(command, own)) == 2
    assert "is in the folder of the run's own data" in capsys.readouterr().err
    assert list(own.iterdir())


@pytest.mark.slow
def test_it_ends_where_nothing_improves_and_goes_on_after_a_stop(command, tmp_path, monkeypatch, capsys, fault):
    make_plan, step = planning.make_plan, AlignmentTrainer.training_step

    def short(**facts):  # so slow a learner that nothing improves
        return replace(make_plan(**facts), max_steps=24, eval_steps=2, learning_rate=1e-7)

    def stopped(trainer, *args, **kwargs):
        if trainer.state.global_step == 4:  # one evaluation behind the best
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(planning, "make_plan", short)
    assert main(command) == 0
    output, whole = tmp_path / "out", tmp_path / "whole"
    run = json.loads((output / "run.json").read_text())
    scores = {
        log["step"]: log["eval_dev_mean_accuracy"]
        for log in run["log_history"]
        if "eval_loss" not in log and "eval_dev_mean_accuracy" in log
    }
    best = max(scores, key=scores.get)
    assert run["steps"] == best + 2 * adapt.PATIENCE < 24
    released = (output / "model.safetensors").read_bytes()
    assert [path.name for path in checkpoint_folders(output)] == [f"checkpoint-{best}", f"checkpoint-{run['steps']}"]
    monkeypatch.setattr(AlignmentTrainer, "training_step", lambda *args, **kwargs: pytest.fail("it was trained again"))
    assert main([*command, "--merge", "1"]) == 0
    output.rename(whole)
    monkeypatch.setattr(AlignmentTrainer, "training_step", stopped)
    with pytest.raises(SystemExit, match="143"):
        main(command)
    verify(output / "checkpoint-5")
    monkeypatch.setattr(AlignmentTrainer, "training_step", step)
    monkeypatch.setattr(planning, "make_plan", lambda **facts: pytest.fail("it was planned again"))
    assert main(command) == 0
    assert json.loads((output / "run.json").read_text())["steps"] == run["steps"]
    same = (output / "model.safetensors").read_bytes() == released
    fault("A3", "SIGTERM to `adapt`, then the same command again", tried=1, survived=same)


def test_the_verdict_has_a_line_for_each_sentence_and_commands_can_be_pasted(monkeypatch, capsys):
    result = SimpleNamespace(run=None, verdict=["Better. " * 20, "Kept."], seconds=60, to_dict=dict)
    done = SimpleNamespace(
        output=Path("my runs"), read=CorpusReport(), run=None, check=lambda: [], execute=lambda: result
    )
    monkeypatch.setattr(command_module, "Adaptation", lambda *args, **options: done)
    monkeypatch.setattr(command_module, "comparison_tables", lambda run: [])
    assert main(["adapt", "--corpus", "x.tsv", "--languages", "sw", "--output_dir", "my runs"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"\n{'Better. ' * 20}\nKept.\n\nFinished in ")
    assert "metaphrase report 'my runs'." in printed
    assert "metaphrase push 'my runs' --repo me/my-encoder" in printed


def test_a_plan_is_printed_once(monkeypatch, capsys):
    """By the log or, if that is quiet, as the result."""
    plan = planning.make_plan(**PLAN)
    done = SimpleNamespace(read=CorpusReport(), check=lambda: [], plan=lambda: plan)
    monkeypatch.setattr(command_module, "Adaptation", lambda *args, **options: done)
    for options, shown in (["--quiet"], list(plan.reasons)), ([], []):
        assert main(["adapt", "--corpus", "x.tsv", "--languages", "sw", "--plan_only", *options]) == 0
        assert capsys.readouterr().out.splitlines() == shown


def test_bad_options_are_refused(tmp_path, capsys):
    assert main(["adapt", "--corpus", "x.tsv", "--languages", "sw", "--minutes", "0"]) == 2
    assert "--minutes must be a number above 0" in capsys.readouterr().err
    for languages in ("", ","):
        assert main(["adapt", "--corpus", "x.tsv", "--languages", languages]) == 2
        assert "--languages names no language. Name those to adapt to, e.g. sw." in capsys.readouterr().err


def test_python_callers_get_the_same_errors(tmp_path, capsys):
    corpus = write(tmp_path / "my.tsv", lines_of("fi", 200))
    with pytest.raises(CorpusError) as error:
        adapt.Adaptation(adapt.AdaptationConfig([str(corpus)], ["sw"], output_dir=str(tmp_path / "out"))).execute()
    assert main(["adapt", "--corpus", str(corpus), "--languages", "sw", "--output_dir", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"metaphrase adapt: {error.value}"


def test_the_declaration_is_not_read_in_another_script_of_a_language():
    every = adapt.retention_sets(["all"], ["zh-Hant"])
    assert {"zh", "zh-Hant"} & set(every) == {"zh-Hant"}
    assert {"no", "zh-Hant"} <= set(adapt.retention_sets([], ["nb", "zh-Hant"]))
    assert "zh" in adapt.retention_sets(["all"], ["sw"])
