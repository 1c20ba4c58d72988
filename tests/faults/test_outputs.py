"""Outputs that would replace inputs, models or files of the user; and refused runs, which change nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from metaphrase import AlignmentLoss, AlignmentTrainer, AlignmentTrainingArguments, RunConfig, TrainingRun, release
from metaphrase.aligners.options import AlignOptions
from metaphrase.aligners.statistical import StatisticalAligner
from metaphrase.aligners.workflow import align_files
from metaphrase.checkpoints.folders import MANIFEST
from metaphrase.cli import main
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.diagnosis_workflow import DiagnoseOptions, diagnose_files
from metaphrase.evaluation.suites.running import EvaluateOptions, evaluate
from metaphrase.evaluation.transfer.options import FineTuningArguments
from metaphrase.evaluation.transfer.translation import TranslationOptions, finetune_translation
from metaphrase.exceptions import CheckpointError, MissingFileError, UsageError
from metaphrase.io.outputs import MARK
from metaphrase.mining.filtering import filter_corpus
from metaphrase.mining.options import FilterOptions, MiningOptions
from metaphrase.mining.shards import encode_shards
from metaphrase.mining.workflow import mine_files
from metaphrase.publishing.run_report import ReportOptions, report_run
from metaphrase.training.adaptation import Adaptation, AdaptationConfig
from metaphrase.training.recipe import Recipe
from tests.cli.test_mine import counting, embedder
from tests.faults.children import Child, holder


def tree(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder; links and folders have their names only."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def refused(action, *, said, error=(UsageError, CheckpointError)) -> bool:
    """Whether a call raises an error with certain words, or a command prints them."""
    with pytest.raises(error, match=said):
        action()
    return True


@pytest.fixture
def command(capsys):
    """Run a command that is expected to be refused with certain words."""

    def command(*arguments, said) -> bool:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert said in printed
        return True

    return command


@pytest.fixture
def corpus(tmp_path, bitext_path) -> Path:
    return Path(shutil.copy(bitext_path, tmp_path / "de-en.tsv"))


@pytest.fixture
def base(tmp_path, tiny_encoder_dir) -> Path:
    return Path(shutil.copytree(tiny_encoder_dir, tmp_path / "models" / "base"))


@pytest.fixture
def settings(corpus, base):
    """Options of a short training run."""
    return {
        "model": str(base),
        "corpus": [str(corpus)],
        "languages": ["de"],
        "recipe": "tr",
        "max_length": 24,
        "max_steps": 2,
        "save_steps": 1,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "report_to": "none",
        "retention": ["none"],
    }


def flags(settings) -> list[str]:
    return [
        word
        for name, value in settings.items()
        for word in (f"--{name}", *(value if type(value) is list else [value]))
    ]


# ------------------------------------------------------------------------------------------- the model is no output


def names_of(base: Path) -> list[Path]:
    """Names of the folder of a model, and the folder around it."""
    link = base.parent.parent / "link"
    link.symlink_to(base)
    return [base, base / ".", link, Path(os.path.relpath(base)), base.parent / "other" / ".." / "base", base.parent]


@pytest.mark.long
def test_a_run_does_not_write_into_its_model(settings, base, corpus, command, tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    (base / MARK).touch()  # also if this library wrote it
    before, tried, survived = tree(tmp_path / "models"), 0, 0
    for output in names_of(base):
        words, said = [*flags(settings), "--output_dir", output], "is, or contains, the folder of the model"
        config = RunConfig(**settings, output_dir=str(output))
        adapted = {"corpus": [str(corpus)], "languages": ["de"], "model": str(base), "output_dir": str(output)}
        survived += (
            command("train", *words, said=said)
            + command("demo", *words, said=said)
            + command("adapt", *flags(adapted), said=said)
            + refused(lambda config=config: TrainingRun(config).execute(), said=said)
            + refused(lambda adapted=adapted: Adaptation(AdaptationConfig(**adapted)), said=said)
        )
        tried += 5
        assert tree(tmp_path / "models") == before
    fault("A9", "the output folder of a run is its model, or around it", tried=tried, survived=survived)


def test_neither_trainer_nor_release_nor_export_write_into_the_model(base, bitext, command, tmp_path, fault):
    before, said = tree(tmp_path / "models"), "is, or contains, the folder of the model"
    encoder = load_encoder(base, device="cpu")
    loss = AlignmentLoss(encoder, Recipe.load("tr"), max_length=24)
    arguments = AlignmentTrainingArguments(output_dir=str(base), use_cpu=True, report_to="none")
    survived = (
        refused(
            lambda: AlignmentTrainer(encoder, arguments, train_dataset=Dataset.from_list(bitext), loss=loss), said=said
        )
        + refused(lambda: release(encoder, base, recipe=None), said=said)
        + refused(lambda: release(encoder, base / ".." / "base", recipe=None), said=said)
        + command("export", base, "--layers", 1, "--output_dir", base, said="exists. Nothing is overwritten")
    )
    assert tree(tmp_path / "models") == before
    fault("A9", "trainer, release and export to the model's folder", tried=4, survived=survived)


def test_a_folder_inside_the_model_may_be_an_output(settings, base):
    before = tree(base)
    assert main(["train", *map(str, flags(settings)), "--output_dir", str(base / "next")]) == 0
    assert {name: digest for name, digest in tree(base).items() if not name.startswith("next")} == before
    assert main(["train", *map(str, flags(settings)), "--output_dir", str(base / "1_Pooling")]) == 2
    assert {name: digest for name, digest in tree(base).items() if not name.startswith("next")} == before


# ------------------------------------------------------------------------------------------- files of the user


@pytest.fixture
def own(tmp_path) -> Path:
    """A folder with files of the user that have names of a release, a run, a report, an evaluation and an aligner."""
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("README.md", "config.json", "report.html", "results.json", "before.json", "aligner.json"):
        (folder / name).write_text("my own", encoding="utf-8")
    return folder


def test_a_folder_of_the_user_is_no_output(
    settings, own, base, corpus, tiny_encoder, bitext, command, tmp_path, fault
):
    run = tmp_path / "run"
    release(tiny_encoder, run, recipe=None)
    (run / "run.json").write_text('{"model": "starter", "files": [], "corpus": {"languages": []}}')
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(corpus, tests / "de-en.tsv")
    before, said = tree(own), r"own holds README\.md, aligner\.json, before\.json and 3 more, which metaphrase did not"
    shown = said.replace("\\", "")
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"), max_length=24)
    arguments = AlignmentTrainingArguments(output_dir=str(own), use_cpu=True, report_to="none")
    aligner = StatisticalAligner()
    aligner.train([(row["source"].split(), row["target"].split()) for row in bitext], show_progress=False)
    adapted = {"corpus": [str(corpus)], "languages": ["de"], "model": str(base), "output_dir": str(own)}
    aligned = {"files": [str(corpus)], "source_lang": "de", "output": str(tmp_path / "links.tsv"), "save": str(own)}
    translated = {"model": str(base), "train": str(corpus), "test": str(corpus), "language": "de"}
    words = [*flags(settings), "--output_dir", own]
    assert all(command(name, *words, said=shown) for name in ("train", "demo"))
    assert command("adapt", *flags(adapted), said=shown)
    assert command("align", *flags(aligned), said=shown)
    assert command("evaluate", base, "--data", tests, "--output_dir", own, said=shown)
    assert command("report", run, "--output_dir", own, said=shown)
    actions = [
        lambda: TrainingRun(RunConfig(**settings, output_dir=str(own))).execute(),
        lambda: AlignmentTrainer(tiny_encoder, arguments, train_dataset=Dataset.from_list(bitext), loss=loss),
        lambda: release(tiny_encoder, own, recipe=None),
        lambda: Adaptation(AdaptationConfig(**adapted)),
        lambda: evaluate(EvaluateOptions(model=str(base), data=str(tests), output_dir=str(own))),
        lambda: report_run(ReportOptions(str(run), output_dir=str(own))),
        lambda: align_files(AlignOptions(**aligned)),
        lambda: aligner.save(own),
        lambda: finetune_translation(TranslationOptions(**translated), FineTuningArguments(output_dir=str(own))),
    ]
    assert all(refused(action, said=said) for action in actions)
    assert tree(own) == before
    tried = 6 + len(actions)
    fault("A9", "an output folder that holds files of the user", tried=tried, survived=tried)


def test_the_folder_of_several_seeds_is_no_output(tiny_encoder, tmp_path):
    seeds = tmp_path / "seeds"
    for seed in (1, 2):
        release(tiny_encoder, seeds / f"seed-{seed}", recipe=None)
    assert refused(
        lambda: release(tiny_encoder, seeds, recipe=None),
        said=r"seeds holds the runs of several seeds: seed-1, seed-2\. Train further seeds with --seeds, or choose another",
    )
    (seeds / "notes.txt").touch()
    assert refused(lambda: release(tiny_encoder, seeds, recipe=None), said="which metaphrase did not write")


def test_a_report_does_not_replace_that_of_its_run(tiny_encoder, command, tmp_path):
    run = release(tiny_encoder, tmp_path / "run", recipe=None)
    (run / "run.json").write_text('{"model": "starter", "files": [], "corpus": {"languages": []}}')
    (run / "report.json").write_text("{}")
    before = tree(run)
    assert command("report", run, "--output_dir", run, said="is, or contains, the folder of the model")
    assert tree(run) == before


@pytest.mark.slow
def test_folders_of_earlier_runs_are_written_again(settings, tiny_encoder, tmp_path):
    """As long as they have their mark, a checkpoint or a release; hidden files and a stale lock belong to nobody."""
    new = tmp_path / "new"
    new.mkdir()
    (new / ".gitignore").touch()
    (new / "_lock").touch()
    words = ["train", *map(str, flags(settings | {"save_strategy": "no"}))]
    for output in (new, new, release(tiny_encoder, tmp_path / "released", recipe=None)):
        assert main([*words, "--output_dir", str(output)]) == 0
    release(tiny_encoder, new, recipe=None)
    (corpus,) = map(Path, settings["corpus"])
    for pairs in (24, 20):
        corpus.write_text("".join(corpus.read_text(encoding="utf-8").splitlines(True)[: pairs + 1]), encoding="utf-8")
        assert main([*words, "--on_disk", "--output_dir", str(new)]) == 0
    assert len(list((new / "corpus").iterdir())) == 2  # those of the other corpus are deleted
    config = RunConfig(**settings | {"corpus": ["missing.tsv"]}, output_dir=str(tmp_path / "never"))
    with pytest.raises(FileNotFoundError):
        TrainingRun(config).execute()
    assert not (tmp_path / "never").exists()


def test_the_recipe_of_a_run_is_not_replaced(settings, command, tmp_path):
    output = tmp_path / "out"
    words = flags(settings | {"save_strategy": "no"})
    assert main(["train", *map(str, words), "--output_dir", str(output)]) == 0
    (output / "recipe.yaml").write_text("# mine\n" + (output / "recipe.yaml").read_text())
    before = tree(output)
    words += ["--recipe", output / "recipe.yaml", "--output_dir", output]
    assert command("train", *words, said="recipe.yaml. Choose another output.")
    assert tree(output) == before


# ------------------------------------------------------------------------------------------- inputs


def links_to(path: Path, suffix: str) -> list[Path]:
    """Names of a file: its own, a symbolic and a hard link."""
    symbolic, hard = path.with_name(f"symbolic{suffix}"), path.with_name(f"hard{suffix}")
    symbolic.symlink_to(path)
    hard.hardlink_to(path)
    return [path, symbolic, hard]


def test_no_output_file_replaces_an_input(corpus, base, bitext, command, tmp_path, monkeypatch, fault):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, side in (("news.tsv", "source"), ("news.en", "target")):
        (folder / name).write_text("".join(f"{row[side]}\n" for row in bitext))
    shutil.copy(folder / "news.en", folder / "out.tsv.sample.txt")
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(corpus, tests / "de-en.tsv")
    result = tmp_path / "kept" / "results.json"
    assert main(["evaluate", str(base), "--data", str(tests), "--output_dir", str(result.parent)]) == 0
    model = [base, "--corpus", corpus, "--languages", "de"]
    mined = ["mine", folder / "news.tsv", folder / "news.en", "--source_lang", "de", "--target_lang", "en", "-o"]
    aligned = ["align", corpus, "--source_lang", "de"]
    measured = ["evaluate", base, "--data", tests, "--baseline", result]
    (config,) = [tmp_path / "align.yaml"]
    config.write_text(f"files: [{corpus}]\nsource_lang: de\n")
    cases = [
        *([*mined, name] for name in links_to(folder / "news.tsv", ".tsv")),
        ["mine", folder / "news.tsv", folder / "out.tsv.sample.txt", *mined[3:], folder / "out.tsv"],
        *(["filter", corpus, "--source_lang", "de", "-o", name] for name in links_to(corpus, ".tsv")),
        ["filter", tests, "--languages", "de", "-o", tests / "de-en.tsv"],
        *([*aligned, "-o", tmp_path / name] for name in ("de-en.tsv", "symbolic.tsv", "hard.tsv")),
        [*aligned, "-o", tmp_path / "links.tsv", "--summary", corpus],
        [*aligned, "-o", tmp_path / "links.tsv", "--phrase_table", tmp_path / "hard.tsv"],
        ["align", "--config", config, "-o", tmp_path / "links.tsv", "--summary", config],
        [*measured, "--output", result],
        [*measured, "--output_dir", result.parent],
        [*measured, "--output_dir", tmp_path / "again", "--output", tests / "de-en.tsv"],
        [*measured, "--output_dir", tmp_path / "again", "--output", base / "config.json"],
        ["diagnose", *model, "--output", corpus],
        ["diagnose", *model, "--output", tmp_path / "symbolic.tsv"],
        ["diagnose", *model, "--output", base / "1_Pooling" / "config.json"],
        ["diagnose", *model, "--output", base / "README.md"],
        ["diagnose", *model, "--test", tests, "--output", tests / "de-en.tsv"],
    ]
    before = tree(tmp_path)
    for case in cases:
        assert command(*case, said="would overwrite the input ")
    assert tree(tmp_path) == before
    said, own = "would overwrite the input", str(corpus)
    actions = [
        lambda: mine_files(
            MiningOptions(
                str(folder / "news.tsv"),
                str(folder / "news.en"),
                str(folder / "news.tsv"),
                source_lang="sw",
                target_lang="en",
            )
        ),
        lambda: filter_corpus(FilterOptions([own], own, source_lang="de")),
        lambda: align_files(AlignOptions([own], own, source_lang="de")),
        lambda: evaluate(
            EvaluateOptions(
                model=str(base), data=str(tests), output_dir=str(tmp_path / "again"), output=str(tests / "de-en.tsv")
            )
        ),
        lambda: diagnose_files(DiagnoseOptions([own], languages=["de"], output=own)),
    ]
    assert all(refused(action, said=said) for action in actions)
    assert tree(tmp_path) == before
    tried = len(cases) + len(actions)
    fault("A9", "an output file that is an input, or a link to one", tried=tried, survived=tried)


def test_two_outputs_are_two_files(corpus, command, tmp_path):
    aligned = ["align", corpus, "--source_lang", "de", "-o"]
    assert command(*aligned, tmp_path / "a.tsv", "--summary", tmp_path / "a.tsv", said="a.tsv is written twice")
    (tmp_path / "b.tsv").mkdir()
    assert command(*aligned, tmp_path / "b.tsv", said="b.tsv exists and is not a file")
    assert command("align", "-o", "/dev/null", said="/dev/null exists and is not a file")


def test_lines_of_a_file_do_not_replace_it(corpus, tmp_path):
    before = corpus.read_bytes()

    def work():
        with corpus.open("rb") as stdin:
            os.dup2(stdin.fileno(), 0)
        raise SystemExit(main(["align", "-o", str(corpus)]))

    child = Child(work, tmp_path / "log")
    assert child.wait() == 2
    assert "would overwrite the input " in child.said()
    assert corpus.read_bytes() == before


# ------------------------------------------------------------------------------------------- refused runs


@pytest.fixture
def finished(settings, tmp_path) -> Path:
    """The folder of a run of two steps whose process died while it wrote a third checkpoint."""
    output = tmp_path / "out"
    words = ["train", *map(str, flags(settings)), "--output_dir", str(output), "--on_disk"]
    assert main(words) == 0
    shutil.copytree(output / "checkpoint-2", output / "_partial" / "checkpoint-3")
    (output / "_partial" / "checkpoint-3" / MANIFEST).unlink()
    (output / "_deleted").mkdir()
    (output / "_deleted" / "leftover").touch()
    return output


@pytest.mark.long
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_refused_run_changes_nothing(step, settings, finished, tiny_xlmr, bitext, command, tmp_path, fault):
    other = tmp_path / "other.tsv"
    other.write_text("".join(f"{row['source']} ja\t{row['target']}\n" for row in bitext), encoding="utf-8")
    tiny_xlmr.save_pretrained(str(tmp_path / "xlmr"))
    broken = Path(shutil.copytree(finished / "checkpoint-1", tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"")
    differs = "belongs to another run, which differs in:"
    resumed = {"resume_from_checkpoint": "true"}
    cases = [
        ({}, "holds checkpoint-2 of an earlier run. Resume it with --resume_from_checkpoint true"),
        ({"recipe": "ppa"} | resumed, f"{differs} batch_sampler"),  # and terms
        ({"recipe": "wacse"} | resumed, differs),  # stores word links
        ({"corpus": [str(other)]} | resumed, f"{differs} corpus"),  # stores the corpus
        ({"per_device_train_batch_size": 4} | resumed, f"{differs} per_device_train_batch_size"),
        ({"seed": 1} | resumed, f"{differs} seed"),
        ({"model": str(tmp_path / "xlmr")} | resumed, f"{differs} base_model"),
        ({"model": "missing/folder"} | resumed, "no folder missing/folder"),
        ({"corpus": ["missing.tsv"]} | resumed, "No such file, folder or Moses pair"),
        ({"per_device_train_batch_size": 4000} | resumed, "fewer than a batch of 4000"),
        ({"resume_from_checkpoint": str(broken)}, "model.safetensors has 0 bytes"),
        ({"report_to": "nonsense"} | resumed, "Unknown tracker"),
        ({"clean": "nonsense"} | resumed, "--clean is one of"),
        ({"max_step": 3} | resumed, "Unknown option --max_step"),
    ][::step]
    before = tree(finished)
    for changes, said in cases:
        words = flags(settings | changes)
        assert command("train", *words, "--on_disk", "--output_dir", finished, said=said)
        assert tree(finished) == before, changes
        if "max_step" not in changes:
            config = RunConfig(**settings | changes, on_disk=True, output_dir=str(finished))
            with pytest.raises((ValueError, OSError)):
                TrainingRun(config).execute()
            assert tree(finished) == before, changes
    with pytest.raises(UsageError, match="Unknown option 'max_step'"):
        RunConfig(**settings | {"max_step": 3})
    (path,) = map(Path, settings["corpus"])
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace("the", "teh"), encoding="utf-8")
    assert command(
        "train", *flags(settings | resumed), "--on_disk", "--output_dir", finished, said=f"{differs} corpus"
    )
    assert tree(finished) == before
    path.write_text(content, encoding="utf-8")
    fault("A9", "a refused `train` in the folder of another run", tried=2 * len(cases), survived=2 * len(cases))
    words = flags(settings | resumed | {"max_steps": 3})
    assert main(["train", *map(str, words), "--on_disk", "--output_dir", str(finished)]) == 0
    assert not [name for name in tree(finished) if name.startswith(("_partial", "_deleted"))]
    assert (finished / "checkpoint-3" / MANIFEST).is_file()


@pytest.mark.long
def test_a_complete_checkpoint_is_recovered_by_its_own_run_only(settings, finished, command):
    shutil.rmtree(finished / "_partial")
    shutil.rmtree(finished / "checkpoint-1")
    (finished / "_partial").mkdir()
    (finished / "checkpoint-2").rename(finished / "_partial" / "checkpoint-2")
    before = tree(finished)
    words = [*flags(settings | {"max_steps": 3}), "--output_dir", finished]
    assert command("train", *words, said="holds checkpoint-2 of an earlier run")
    resumed = [*words, "--resume_from_checkpoint", "true"]
    assert command("train", *resumed, "--seed", 1, said="belongs to another run, which differs in: seed")
    assert tree(finished) == before
    assert main(["train", *map(str, resumed), "--save_strategy", "no"]) == 0
    assert (finished / "checkpoint-2" / MANIFEST).is_file()
    assert json.loads((finished / "run.json").read_text())["steps"] == 3


@pytest.mark.long
def test_a_trainer_that_is_refused_changes_nothing(make_trainer, tmp_path):
    make_trainer().train()
    (tmp_path / "run" / "_partial").mkdir()
    (tmp_path / "run" / "_partial" / "leftover").touch()
    before = tree(tmp_path / "run")
    with pytest.raises(CheckpointError, match="differs in: seed"):
        make_trainer(seed=1).train(resume_from_checkpoint=True)
    assert tree(tmp_path / "run") == before
    make_trainer().train(resume_from_checkpoint=True)
    assert not (tmp_path / "run" / "_partial").exists()


def test_the_demo_deletes_no_run(settings, finished, command):
    before = tree(finished)
    assert command("demo", *flags(settings), "--output_dir", finished, said="holds checkpoint-2 of an earlier run")
    assert tree(finished) == before


# ------------------------------------------------------------------------------------------- two processes


@pytest.mark.parametrize("name", ["mine", "filter", "align", "lines"])
def test_a_second_process_with_the_same_output_is_refused(
    name, tiny_encoder, bitext, tmp_path, monkeypatch, capsys, fault
):
    """The first is stopped while it works, then killed; the command then resumes."""
    encode = embedder(bitext)
    counting(tiny_encoder, encode, monkeypatch)
    texts = [tmp_path / "news.de", tmp_path / "news.en"]
    for path, side in zip(texts, ("source", "target"), strict=True):
        path.write_text("".join(f"{row[side]}\n" for row in bitext[:8]), encoding="utf-8")
    pairs = tmp_path / "de-en.tsv"
    pairs.write_text("".join(f"{row['source']}\t{row['target']}\n" for row in bitext[:8]), encoding="utf-8")
    output = tmp_path / "out.tsv"
    search = ["--shard_size", "4", "--k", "2"]
    arguments = {
        "mine": ["mine", *texts, *search],
        "filter": ["filter", pairs, *search],
        "align": ["align", pairs, "--iterations", "1"],
        "lines": ["align", "--iterations", "1"],
    }[name]
    words = [*map(str, arguments), "-o", str(output)]
    read, ready = os.pipe()

    def stop(*args, **kwargs):
        os.write(ready, b".")
        signal.pause()

    def work():
        tiny_encoder.encode = stop
        monkeypatch.setattr(StatisticalAligner, "train", stop)
        if name == "lines":
            with pairs.open("rb") as stdin:
                os.dup2(stdin.fileno(), 0)
                monkeypatch.setattr("sys.stdin", os.fdopen(0))
        main(words)

    child = Child(work, tmp_path / "log")
    assert os.read(read, 1) == b"."
    stdin = pairs.open()
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"is in use by process {child.pid} on {os.uname().nodename}. Wait for it or stop it" in said
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert main(words) == 0
    stdin.close()
    os.close(read)
    os.close(ready)
    assert not (tmp_path / "out.tsv.partial").exists()
    what = {"lines": "align (lines)"}.get(name, name)
    fault("A7", f"two processes of `{what}` with one output", tried=1, survived=output.is_file())


@pytest.mark.long
def test_two_evaluations_do_not_fine_tune_in_one_folder(base, bitext, tmp_path, monkeypatch, capsys, fault):
    data = tmp_path / "xnli"
    data.mkdir()
    rows = [
        f"{row['target']}\t{row['source']}\t{('entailment', 'neutral')[at % 2]}\n" for at, row in enumerate(bitext)
    ]
    for language in ("en", "de"):
        (data / f"dev-{language}.tsv").write_text("".join(rows), encoding="utf-8")
    words = ["evaluate", str(base), "--data", str(tmp_path), "--suite", "nli", "--output_dir", str(tmp_path / "kept")]
    read, ready = os.pipe()

    def work():
        def stop(*args, **kwargs):
            os.write(ready, b".")
            signal.pause()

        monkeypatch.setattr(Trainer, "train", stop)
        main(words)

    child = Child(work, tmp_path / "log")
    assert os.read(read, 1) == b"."
    assert main(words) == 2
    assert f"is in use by process {child.pid} on {os.uname().nodename}." in " ".join(capsys.readouterr().err.split())
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    os.close(read)
    os.close(ready)
    assert main([*words, "--languages", "de"]) == 0
    fault("A7", "two evaluations that fine-tune in one folder", tried=1, survived=1)


@pytest.mark.parametrize("name", ["mine", "filter", "align"])
def test_a_read_only_folder_is_refused_at_the_start(name, corpus, disk, command, fault):
    output = disk(1 << 20, "ro") / "out.tsv"
    languages = ["--source_lang", "de"]
    texts = [corpus, corpus, "--target_lang", "en", "--model", "missing/folder"]
    arguments = {"mine": texts, "filter": [corpus, "--model", "missing/folder"], "align": [corpus]}[name]
    said = "disk is not writable: Read-only file system"
    assert command(name, *arguments, *languages, "-o", output, said=said)
    fault("A8", f"`{name}` to a read-only disk", tried=1, survived=1)


def test_shards_of_another_process_are_not_written(tmp_path, fault):
    child = holder(tmp_path / "shards", tmp_path / "log")
    with pytest.raises(CheckpointError, match=rf"in use by process {child.pid} on \S+\."):
        encode_shards(["a"], tmp_path / "shards", lambda texts: torch.ones(len(texts), 2).numpy())
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    fault("A7", "two processes that encode into one folder", tried=1, survived=1)


# ------------------------------------------------------------------------------------------- threads


@pytest.mark.long
def test_another_number_of_threads_is_reported(make_trainer, caplog, fault):
    threads = torch.get_num_threads()
    make_trainer(max_steps=2, save_steps=2).train()
    caplog.set_level(logging.WARNING, "metaphrase")
    make_trainer(max_steps=2).train(resume_from_checkpoint=True)
    assert "may differ in the last digits" not in caplog.text
    torch.set_num_threads(threads + 1)
    try:
        make_trainer(max_steps=2).train(resume_from_checkpoint=True)
    finally:
        torch.set_num_threads(threads)
    said = f"so results may differ in the last digits: threads ({threads} → {threads + 1})."
    fault("A5", "resumed with another number of threads: a warning", tried=1, survived=said in caplog.text)


def test_an_empty_name_is_not_the_current_folder(tiny_encoder_dir, monkeypatch, fault):
    monkeypatch.chdir(tiny_encoder_dir)
    with pytest.raises(UsageError, match="The name of a model is empty"):
        load_encoder("")
    with pytest.raises(MissingFileError, match="'' is not a folder"):
        load_parallel_folder("")
    fault("A9", "an empty name instead of a folder", tried=2, survived=2)
