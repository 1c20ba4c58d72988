"""A run from Python: configuration in, result out."""

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import SchedulerType

from metaphrase import RunConfig, TrainingRun, load_corpus
from metaphrase.cli import main
from metaphrase.cli.runs import parse_run
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.guards import GuardEvaluator
from metaphrase.evaluation.retrieval import RetrievalEvaluator
from metaphrase.exceptions import CheckpointError, CorpusError, MetaphraseError, RecipeError, UsageError
from metaphrase.io.work_folders import read_part, write_part
from metaphrase.modeling import frozen as frozen_module
from metaphrase.publishing.provenance import PACKAGED
from metaphrase.publishing.release import verify
from metaphrase.training import baseline
from metaphrase.training import run as run_module
from metaphrase.training.configuration import configured_recipe
from metaphrase.training.corpora import leakage
from metaphrase.training.recipe import Recipe, Term
from metaphrase.training.run import Inputs
from tests.conftest import mostly_slow
from tests.training.test_baseline import write_sets


@pytest.fixture(scope="module")
def settings(tiny_encoder_dir, bitext, tmp_path_factory):
    """A small run, as settings of a configuration."""
    tmp_path = tmp_path_factory.mktemp("data")
    return {
        "model": str(tiny_encoder_dir),
        "corpus": [str(write_sets(tmp_path / "train", de=bitext))],
        "test": [str(write_sets(tmp_path / "test", de=bitext[:10], fi=bitext[:8]))],
        "recipe": "dap",
        "max_length": 24,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "report_to": "none",
    }


@pytest.fixture
def execute(settings, tmp_path):
    def execute(output="out", *, inputs=None, origins=None, **more):
        config = RunConfig(**settings | {"output_dir": str(tmp_path / output)} | more)
        return TrainingRun(config, inputs=inputs or Inputs(), origins=origins).execute()

    return execute


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """The result of the small run, with the losses of all steps."""
    torch.set_flush_denormal(True)
    folder = tmp_path_factory.mktemp("finished") / "out"
    return TrainingRun(RunConfig(**settings, output_dir=str(folder), logging_steps=1)).execute()


#: Facts that differ between two equal runs.
VARYING = {"command", "seconds", "training_seconds", "log_history"}


def comparable(result):
    losses = [log["loss"] for log in result["log_history"] if "loss" in log]
    facts = {key: value for key, value in result.items() if key not in VARYING} | {"losses": losses}
    return json.loads(json.dumps(facts).replace(result["output"], "OUTPUT"))


def argv(settings):
    return RunConfig(**settings).command()[1:]


@pytest.mark.long
def test_python_and_the_command_line_train_the_same(finished, settings, tmp_path, capsys):
    result = finished
    command = argv(settings | {"output_dir": str(tmp_path / "cli"), "logging_steps": 1})
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == result.to_dict().keys()
    assert comparable(printed) == comparable(result.to_dict())
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (result.output, tmp_path / "cli"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert shlex.split(json.loads((result.output / "run.json").read_text())["command"])[:2] == ["metaphrase", "train"]


def test_the_duration_includes_measurements(finished):
    run = json.loads((finished.output / "run.json").read_text())
    assert (
        run["seconds"]
        == finished.facts["seconds"]
        == json.loads(finished.report.with_suffix(".json").read_text())["run"]["seconds"]
    )
    assert run["seconds"] > run["training_seconds"] > 0


def test_a_result_is_typed_and_frozen(finished):
    result = finished
    assert result.output.is_dir()
    assert result.report == result.output / "report.html"
    assert result.comparisons["test"]["languages"].keys() == {"de"}
    assert [row["language"] for row in result.retention["test"]["languages"]] == ["fi"]
    assert result.before["test"]["languages"].keys() == result.after["test"]["languages"].keys() == {"de"}
    assert "SentenceTransformer(" in result.usage
    assert result.pushed is None
    assert repr(result.output) in repr(result)
    assert len(repr(result)) < 2000  # without the log and the items of the test sets
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.pushed = "x"


@pytest.mark.long
def test_loaded_inputs_are_not_loaded_again(
    execute, finished, settings, tiny_encoder_dir, tmp_path, monkeypatch, capsys
):
    """The same weights; only the release is loaded, to be measured. Nothing is printed."""
    first = finished
    inputs = Inputs(
        encoder=load_encoder(tiny_encoder_dir, device="cpu", default_pooling="cls"),
        corpus=load_corpus(settings["corpus"]),
        tests=baseline.read_test_sets(RunConfig(**settings)),
        baseline=baseline.Baseline(dict(first.before), read_retention(first)),
    )
    loaded, measured = [], []
    load, evaluate = run_module.load_encoder, baseline.evaluate_retrieval
    monkeypatch.setattr(run_module, "load_encoder", lambda name, **k: loaded.append(str(name)) or load(name, **k))
    monkeypatch.setattr(run_module, "read_bitext", lambda *a: pytest.fail("the corpus was read again"))
    monkeypatch.setattr(
        baseline, "evaluate_retrieval", lambda *a, **k: measured.append(k["name"]) or evaluate(*a, **k)
    )
    second = execute("again", inputs=inputs)
    assert capsys.readouterr().out == ""
    assert loaded == [str(tmp_path / "again")]
    assert set(measured) == {str(tmp_path / "again")}
    ours, theirs = (load_file(result.output / "model.safetensors") for result in (first, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
@pytest.mark.parametrize("recipe", mostly_slow(["dap", "wacse-language"], ["dap"]))
def test_bfloat16_is_trained_and_released(execute, settings, monkeypatch, recipe):
    """The encoder computes in float32 after training; without a GPU, bf16 alone trains on the CPU."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    dev = settings["test"]
    result = execute(
        recipe=recipe, bf16=True, use_cpu=False, dev=dev, save_steps=2, languages=["de"], retention=["none"]
    )
    folders = [result.output] if recipe == "dap" else [result.output / "de", result.output / "en"]
    assert [verify(folder, device="cpu") < 1e-5 for folder in folders] == [True] * len(folders)
    assert json.loads((folders[0] / "training_args.json").read_text())["bf16"] is True
    assert load_encoder(folders[0], device="cpu").dtype == torch.float32


@pytest.mark.parametrize("bf16", [False, True])
def test_the_frozen_copy_computes_in_the_precision_of_the_run(execute, monkeypatch, bf16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    token_states, seen = frozen_module.token_states, set()

    def spied(*args, **inputs):
        seen.add(torch.is_autocast_enabled("cpu"))
        return token_states(*args, **inputs)

    monkeypatch.setattr(frozen_module, "token_states", spied)
    execute(recipe="metaphrase", bf16=bf16, test=[])
    assert seen == {bf16}


def test_the_temperature_is_logged_once(execute, monkeypatch, caplog):
    """The trial steps of two precisions build the objectives too."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    with caplog.at_level("INFO", logger="metaphrase"):
        execute(recipe="metaphrase", bf16=None, test=[])
    assert caplog.text.count("The temperature of tr is") == 1


@pytest.mark.parametrize("faster", [torch.float32, torch.bfloat16])
def test_the_precision_is_chosen_and_kept_when_a_run_resumes(execute, monkeypatch, tmp_path, faster):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    sizes = []
    monkeypatch.setattr(
        run_module, "faster_precision", lambda *a, **k: sizes.append(k["micro_batch_size"]) or (faster, 1.0)
    )
    settings = {"bf16": None, "recipe": "tr", "test": [], "save_steps": 2, "micro_batch_size": 4}
    assert execute(**settings).facts["bf16"] is (faster == torch.bfloat16)
    assert sizes == [4]
    monkeypatch.setattr(run_module, "faster_precision", lambda *a, **k: pytest.fail("it was timed again"))
    checkpoint = tmp_path / "out" / "checkpoint-2"
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is not the last checkpoint in .*also holds checkpoint-3"):
        execute(**settings, resume_from_checkpoint=str(checkpoint))
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    resumed = execute(**settings, resume_from_checkpoint=str(checkpoint))
    assert resumed.facts["bf16"] is (faster == torch.bfloat16)


@pytest.mark.slow
def test_an_adapter_is_trained_and_merged(execute, settings, tiny_encoder_dir, tmp_path):
    result = execute(lora_rank=2, keep_adapter=True, save_steps=2)
    ours, theirs = (load_encoder(folder, device="cpu").state_dict() for folder in (result.output, tiny_encoder_dir))
    assert ours.keys() == theirs.keys()
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert changed == {
        name for name in ours if ".layer." in name and name.endswith("weight") and "LayerNorm" not in name
    }
    adapter = load_file(result.output / "adapter" / "adapter_model.safetensors")
    assert {value.shape[0] for name, value in adapter.items() if "lora_A" in name} == {2}
    assert "--lora_rank 2" in result.facts["command"]
    resumed = execute(lora_rank=2, keep_adapter=True, save_steps=2, resume_from_checkpoint="true")
    again = load_encoder(resumed.output, device="cpu").state_dict()
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_an_adapter_that_does_not_exist_cannot_be_kept(execute):
    with pytest.raises(UsageError, match="--keep_adapter requires an adapter: pass --lora_rank"):
        execute(keep_adapter=True)


@pytest.mark.parametrize("other", [{"merge": 0.5}, {"merge": "auto", "dev": ["dev"]}, {"debias": 5}])
def test_an_adapter_that_is_not_released_cannot_be_kept(execute, monkeypatch, other):
    monkeypatch.delattr(run_module, "load_encoder")
    with pytest.raises(
        UsageError, match="--keep_adapter keeps the adapter of the trained encoder, but with --merge or"
    ):
        execute(keep_adapter=True, **other)


@pytest.mark.long
def test_the_curve_and_the_report_of_an_earlier_run_are_deleted(execute):
    first = execute(recipe="tr", max_steps=1)
    (first.output / "report").mkdir()
    written = ("report/report.html", "report/report.json")
    for name in ("alpha.json", "alpha.png", *written, "report/mine.png"):
        (first.output / name).write_text("{}")
    earlier = ["alpha.json", "alpha.png", "report.json", "report.html", *written]
    assert all((first.output / name).is_file() for name in earlier)
    second = execute(recipe="tr", max_steps=1, test=[], merge=0.5, resume_from_checkpoint="true")
    assert [name for name in earlier if (second.output / name).exists()] == []
    assert (second.output / "report" / "mine.png").is_file()


@pytest.mark.long
def test_the_release_of_an_earlier_run_is_deleted_if_each_language_has_its_own(execute):
    options = {"max_steps": 1, "save_strategy": "no", "test": []}
    assert (execute(recipe="tr", **options).output / "modules.json").is_file()
    second = execute(recipe="wacse-language", **options).output
    assert sorted(path.parent.name for path in second.rglob("modules.json")) == ["de", "en"]


@pytest.mark.long
def test_the_card_of_a_release_that_was_trained_from_another_one_has_the_data_and_directions_of_both(
    execute, bitext, tmp_path
):
    options = {"recipe": "tr", "max_steps": 1, "save_strategy": "no", "test": [], "debias": 2}
    first = execute("first", **options)
    other = str(write_sets(tmp_path / "other", sw=bitext))
    second = execute("second", **options | {"model": str(first.output), "corpus": [other], "seed": 7, "debias": 3})
    third = execute("third", **options | {"model": str(second.output), "corpus": [other]})
    old, new, last = (ModelCard.load(one.output / "README.md") for one in (first, second, third))
    assert [card.data.language for card in (old, new, last)] == [["de", "en"], ["de", "en", "sw"], ["de", "en", "sw"]]
    facts = new.data.to_dict()["metaphrase"]
    assert facts["source"] == old.data.to_dict()["metaphrase"]
    assert (facts["debias"]["earlier"], facts["debias"]["directions"]) == (2, 1)  # 3 in all
    assert "differ most, in addition to 2 that were projected out before" in new.text
    before, after = new.text.split("Training data of the models that it was made from:")
    assert "sw-en" in before
    assert re.findall("de-en|sw-en", after.split("###")[0]) == ["de-en"]
    assert "3 directions projected out by linear layers" in last.text  # more than 2: nothing to remove
    assert last.text.count("de-en.tsv") == 1
    assert "Training data of the models that it was made from:" not in old.text


def read_retention(result):
    kept = json.loads((result.output / baseline.BASELINE).read_text())["results"]
    return {name.removeprefix("others "): one for name, one in kept.items() if name.startswith("others ")}


@pytest.mark.long
def test_the_packaged_declaration_is_measured_if_the_test_sets_have_no_other_languages(
    execute, bitext, tmp_path, monkeypatch
):
    monkeypatch.setattr(baseline, "UDHR", write_sets(tmp_path / "udhr", de=bitext[:9], sw=bitext[:8]))
    result = execute(test=[str(write_sets(tmp_path / "test", de=bitext[:10]))])
    assert [row["language"] for row in result.retention["udhr"]["languages"]] == ["sw"]


def test_a_caller_states_the_origin_of_its_files(execute):
    result = execute(recipe="tr", max_steps=1, test=[], data_license="cc0-1.0", origins={"de-en.tsv": PACKAGED})
    (row,) = ModelCard.load(result.output / "README.md").data.metaphrase["data"]
    assert row["license"] == PACKAGED["license"]
    assert row["origin"] == PACKAGED["origin"]


def test_errors_are_those_of_the_command_line(execute, settings, tmp_path, capsys):
    for changes, message in (
        ({"corpus": []}, "pass --corpus"),
        ({"output_dir": ""}, "pass --output_dir"),
        ({"clean": "soap"}, "--clean is one of"),
        ({"report_to": "wandbb"}, "did you mean 'wandb'?"),
        ({"per_device_train_batch_size": 64}, "fewer than a batch of 64"),
    ):
        given = settings | {"output_dir": str(tmp_path / "x")} | changes
        with pytest.raises(ValueError) as error:  # noqa: PT011 - each has its own class
            execute("x", **changes)
        assert main(argv(given)) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"metaphrase train: {error.value}"
        assert message in str(error.value)


@pytest.mark.long
def test_another_encoder_of_the_same_name_is_not_resumed(execute, tiny_encoder_dir, tmp_path):
    """The manifest names a local encoder without its path, and another may have this name."""
    folder = shutil.copytree(tiny_encoder_dir, tmp_path / "a" / "tiny")
    execute(model=str(folder), test=[], save_steps=2)
    other = shutil.copytree(folder, tmp_path / "b" / "tiny")
    assert execute(model=str(other), test=[], max_steps=4, resume_from_checkpoint="true").facts["steps"] == 4
    weights = load_file(other / "model.safetensors")
    save_file({name: one + 0.01 for name, one in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="belongs to another run, which differs in: base_weights"):
        execute(model=str(other), test=[], max_steps=6, resume_from_checkpoint="true")


@pytest.mark.long
def test_a_run_is_not_mixed_with_an_earlier_one(execute):
    execute(test=[])
    with pytest.raises(CheckpointError, match="--resume_from_checkpoint true"):
        execute(test=[])
    assert execute(test=[], resume_from_checkpoint="true").facts["steps"] == 3


def test_settings_are_those_of_the_recipe_unless_given(tmp_path):
    own = RunConfig(recipe="dap")
    assert (own.per_device_train_batch_size, own.head_learning_rate) == (32, 5e-4)
    assert RunConfig(recipe="dap", head_learning_rate=None).head_learning_rate is None
    assert RunConfig(recipe="dap", paper_training=True).max_steps == 100_000
    epochs = RunConfig(recipe="dap", paper_training=True, num_train_epochs=2)
    assert (epochs.max_steps, epochs.num_train_epochs) == (-1, 2)
    small = RunConfig(recipe="dap", paper_training=True, per_device_train_batch_size=8)
    assert (small.effective_batch_size, small.per_device_train_batch_size, small.max_steps) == (None, 8, 100_000)
    assert RunConfig(recipe="dap", warmup_ratio=0.3).training_arguments().warmup_steps == 0.3
    assert RunConfig(recipe="dap", warmup_ratio=None).training_arguments().warmup_steps == 0.1
    one = RunConfig(corpus=Path("a.tsv"), languages="sw", output_dir=Path("runs/sw"))
    assert (one.corpus, one.languages, one.output_dir) == (["a.tsv"], ["sw"], "runs/sw")
    with pytest.raises(UsageError, match=r"Unknown option 'max_stpes' .did you mean 'max_steps'"):
        RunConfig(max_stpes=3)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\nterms: [{objective: tr}]\ntraining: {stpes: 3}\n")
    with pytest.raises(RecipeError, match=r"r.yaml:3:12: 'stpes' in 'training' .* is not a setting of recipes"):
        RunConfig(recipe=str(recipe))


def test_the_command_of_a_configuration_gives_the_configuration():
    settings = {
        "recipe": "amber", "corpus": ["a.tsv", "b.tsv"], "languages": ["no", "sw"], "monolingual_ratio": 0.5,
        "output_dir": "runs/a folder", "learning_rate": 3e-5, "eval_strategy": "steps", "bf16": True, "packing": False,
    }  # fmt: skip
    config = RunConfig(hub_token="secret", **settings)
    command = config.command()
    assert "secret" not in shlex.join(command)
    assert "secret" not in repr(config)
    parsed, *_ = parse_run(command[2:], prog="metaphrase train", description="", examples=())
    assert {name: getattr(parsed, name) for name in settings} == settings
    assert parsed.head_learning_rate == config.head_learning_rate == 5e-4


def test_the_settings_of_a_configuration_are_its_options_without_defaults_and_tokens(tmp_path, monkeypatch):
    """However they were given: in Python, on the command line, or in a file."""
    monkeypatch.setenv("HF_TOKEN", "hidden-token")
    given = {"recipe": "tr", "corpus": ["a.tsv"], "learning_rate": 3e-5, "eval_strategy": "steps", "packing": False}
    config = RunConfig(hub_token="secret", run_name="hidden-token", disable_tqdm=True, seed=42, **given)
    assert config.settings() == given | {"run_name": "$HF_TOKEN"}
    assert json.loads(json.dumps(config.settings())) == config.settings()
    (tmp_path / "run.yaml").write_text("recipe: tr\ncorpus: [a.tsv]\nlearning_rate: 3.0e-5\neval_strategy: steps\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--packing", "false"]
    parsed, *_ = parse_run(words, prog="metaphrase train", description="", examples=())
    assert parsed.settings() == given


def test_runs_can_be_built_before_the_first_is_executed(settings, tmp_path, monkeypatch):
    """The state of accelerate, with the precision, belongs to the process."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    settings = settings | {"recipe": "tr", "test": [], "max_steps": 1}
    configs = [RunConfig(**settings, output_dir=str(tmp_path / str(bf16)), bf16=bf16) for bf16 in (False, True)]
    runs = [TrainingRun(config) for config in configs]
    assert [run.execute().facts["bf16"] for run in runs] == [False, True]


def test_the_interval_of_evaluations_is_the_configured_one(settings, tmp_path):
    changes = {"recipe": "tr", "test": [], "dev": settings["corpus"], "eval_steps": 1, "max_steps": 2}
    changes["metric_for_best_model"] = "eval_sequential_score"  # which Sentence Transformers adds
    run = TrainingRun(RunConfig(**settings | changes, output_dir=str(tmp_path / "out")))
    run.execute()
    assert [log["step"] for log in run.trainer.state.log_history if "eval_dev_mean_accuracy" in log] == [1, 2]


def guard_log(result) -> list[dict[str, float]]:
    return [
        {name: log[name] for name in log if "guard" in name}
        for log in result.facts["log_history"]
        if "eval_dev_mean_accuracy" in log
    ]


@pytest.mark.long
def test_guards_are_measured_with_the_dev_sets_also_after_resuming(execute, settings, sts, tmp_path):
    """They compare with the encoder before training, and do not decide which model is the best."""
    options = {"recipe": "tr", "test": [], "dev": settings["test"], "guard": [str(sts)], "learning_rate": 0.05}
    options |= {"eval_steps": 1, "save_steps": 1, "save_total_limit": 0}
    whole = execute(**options)
    assert [log.keys() for log in guard_log(whole)] == [{"eval_guard_similarity_structure", "eval_guard_sts"}] * 3
    assert 0 < guard_log(whole)[-1]["eval_guard_similarity_structure"] < 0.99
    for log in whole.facts["log_history"]:
        assert log.get("eval_sequential_score") == log.get("eval_dev_mean_accuracy")
    for later in ("checkpoint-2", "checkpoint-3"):
        shutil.rmtree(tmp_path / "out" / later)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    resumed = execute(**options, resume_from_checkpoint="true")
    assert guard_log(resumed) == guard_log(whole)
    assert logged_steps((tmp_path / "out" / "README.md").read_text(encoding="utf-8")) == logged_steps(card)


def logged_steps(card):
    """The rows of the training log of a card, including those before a resume."""
    rows = re.findall(r"^\|.*\|$", card.partition("### Training log")[2].partition("</details>")[0], re.MULTILINE)
    assert [row.split("|")[2].strip() for row in rows] == ["Step", "--:", "1", "2", "3"]
    return rows


def test_a_guard_can_choose_the_best_model_anew_with_other_data(settings, sts, tmp_path, monkeypatch):
    scores = iter([0.5, 0.4, 0.3, 0.2])
    monkeypatch.setattr(GuardEvaluator, "scores", lambda self, model: dict.fromkeys(self.guards, next(scores)))
    changes = {
        "test": [],
        "dev": settings["test"],
        "guard": [str(sts)],
        "max_steps": 2,
        "eval_steps": 1,
        "save_steps": 1,
    }
    best = {"eval_strategy": "steps", "metric_for_best_model": "eval_guard_sts", "load_best_model_at_end": True}
    run = TrainingRun(RunConfig(**settings | changes | best, output_dir=str(tmp_path / "out")))
    run.execute()
    assert run.trainer.state.best_global_step == 1
    path = sts / "de-dev.csv"  # of which half is measured
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:10]), encoding="utf-8")
    more = {"max_steps": 3, "resume_from_checkpoint": "true", "output_dir": str(tmp_path / "out")}
    run = TrainingRun(RunConfig(**settings | changes | best | more))
    run.execute()
    assert run.trainer.state.best_global_step == 2


def test_a_resumed_run_counts_the_time_of_its_baseline(execute, tmp_path):
    execute(save_steps=3)
    path = tmp_path / "out" / "before.json"
    content = read_part(path)
    for result in content["results"].values():
        result["seconds"] = 500.0
    write_part(path, content)
    resumed = execute(save_steps=3, resume_from_checkpoint="true")
    assert resumed.facts["seconds"] > 500 * len(content["results"]) > 500


@pytest.mark.parametrize("changes", [{"retention": ["none"]}, {"dev": [], "eval_strategy": "no"}])
def test_guards_can_be_left_out(execute, settings, changes):
    options = {"recipe": "tr", "test": [], "dev": settings["test"], "eval_steps": 1, "max_steps": 1}
    result = execute(**options | changes)
    assert "guard" not in json.dumps(result.facts["log_history"])


def test_a_guard_needs_data_that_it_is_measured_with(execute, sts):
    with pytest.raises(UsageError, match="also pass --dev or --test"):
        execute(test=[], guard=[str(sts)])


def test_a_baseline_without_a_test_set_is_refused_before_training(execute, tmp_path):
    with pytest.raises(UsageError, match="baseline has no results on test"):
        execute(inputs=Inputs(baseline=baseline.Baseline()))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "wrong", [{"corpus": 5}, {"languages": None}, {"test": [None]}, {"model": None}, {"vocabulary": "tide"}]
)
def test_values_of_another_type_are_refused(wrong):
    with pytest.raises(UsageError, match=f"'{next(iter(wrong))}' of RunConfig must be .*, but is"):
        RunConfig(**wrong)


def test_a_recipe_is_passed_by_name():
    with pytest.raises(
        RecipeError, match=r"^Expected the name of a recipe .* but got the Recipe object 'mine'\. Write its to_dict"
    ):
        RunConfig(recipe=Recipe("mine", (Term("tr"),)))


def test_a_disk_without_room_for_the_release_is_noticed_before_training(execute, monkeypatch, tmp_path):
    free = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr("metaphrase.checkpoints.folders.shutil.disk_usage", lambda path: free)
    with pytest.raises(CheckpointError, match=r"has 0\.0 MB free, and a release needs about 0\.\d MB\. Free some"):
        execute(save_strategy="no")
    assert not (tmp_path / "out" / "before.json").exists()


@pytest.mark.parametrize("steps", [{"max_steps": 0}, {"max_steps": -2}, {"num_train_epochs": 0}])
def test_a_run_without_a_step_is_refused(execute, steps, tmp_path):
    with pytest.raises(UsageError, match=next(iter(steps))):
        execute(recipe="tr", **steps)
    assert not (tmp_path / "out").exists()


def test_the_batch_of_all_processes_needs_pairs(settings, tmp_path, monkeypatch):
    run = TrainingRun(RunConfig(**settings | {"per_device_train_batch_size": 16, "output_dir": str(tmp_path)}))
    run.load_encoder()
    run.load_test_sets()
    run.load_corpus()
    run.build_loss()
    monkeypatch.setattr(type(run.arguments), "world_size", 2)
    with pytest.raises(CorpusError, match="24 pairs, fewer than a batch of 32 over 2 processes"):
        run.build_trainer()


def test_a_vocabulary_that_no_objective_has_is_reported(caplog):
    configured_recipe(RunConfig(recipe="dap", vocabulary="english"))
    assert not caplog.records
    configured_recipe(RunConfig(recipe="tr", vocabulary="english"))
    assert "--vocabulary has no effect" in caplog.text


def test_a_recipe_has_the_length_that_was_configured():
    assert configured_recipe(RunConfig(recipe="dap", max_length=24)).max_length == 24
    assert configured_recipe(RunConfig(recipe="dap")).max_length == 32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"merge": 0.5, "debias": 500}, "--debias is 500, but at most 31 directions"),
        ({"merge": "auto", "guard": ["nowhere"]}, "nowhere has no data"),
        ({"debias": "auto"}, "--debias auto needs data .* Pass folders with --guard, or a number"),
        ({"debias": "auto", "dev": []}, "Pass folders with --dev and --guard, or a number"),
        ({"debias": None}, "'debias' must be a whole number .* or 'auto', but is None"),
        ({"guard": ["a/sts", "b/sts"]}, "two have the same name: similarity structure, dev, sts, sts. Rename one"),
        (
            {"guard": ["a/similarity structure"]},
            "two have the same name: similarity structure, dev, similarity structure",
        ),
        ({"debias": "most"}, "'debias' must be a whole number .* or 'auto', but is 'most'"),
        (
            {"metric_for_best_model": "eval_dev_mean_acuracy"},
            r"is not measured \(did you mean 'eval_dev_mean_accuracy'\?\); choose one of .*, eval_dev_fi_accuracy, ",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1},
            "--metric_for_best_model loss, the default, is not measured; choose one of eval_dev_mean_accuracy, ",
        ),
    ],
)
def test_a_release_that_cannot_be_made_is_refused_before_training(execute, settings, tmp_path, wrong, message):
    with pytest.raises(MetaphraseError, match=message):
        execute(**{"test": [], "dev": settings["test"]} | wrong)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"load_best_model_at_end": True},
        {"metric_for_best_model": "eval_dev_mean_accuracy"},
        {"eval_strategy": "steps"},
        {"eval_on_start": True},
        {"lr_scheduler_type": "greedy"},
        {"lr_scheduler_type": SchedulerType.GREEDY},
    ],
)
def test_a_best_model_needs_dev_data(execute, monkeypatch, wrong):
    monkeypatch.delattr(run_module, "load_encoder")
    with pytest.raises(
        UsageError, match=rf"--{next(iter(wrong))}( best| greedy)? needs pairs on which .*: pass --dev"
    ):
        execute(**wrong)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({}, "The release will be the last model, not the best by --metric_for_best_model eval_dev_mean_accuracy"),
        ({"save_steps": 2, "load_best_model_at_end": True}, "The final model is from step 2, not the best"),
        ({"save_steps": 1, "load_best_model_at_end": True}, ""),
    ],
)
def test_a_release_that_is_not_the_best_model_is_reported(execute, settings, caplog, monkeypatch, options, warning):
    scores = iter([0.5, 0.4, 0.3, 0.2])
    monkeypatch.setattr(RetrievalEvaluator, "scores", lambda self, model: {"mean_accuracy": next(scores)})
    best = {"metric_for_best_model": "eval_dev_mean_accuracy", "eval_strategy": "steps", "eval_steps": 1}
    execute(test=[], dev=settings["test"], max_steps=2, **best, **options)
    messages = [one.getMessage() for one in caplog.records if "not the best" in one.getMessage()]
    assert len(messages) == bool(warning)
    assert "".join(messages).startswith(warning)


def test_a_resumed_run_with_other_dev_sets_selects_the_best_model_anew(
    execute, settings, bitext, tmp_path, caplog, monkeypatch
):
    scores = iter([0.9, 0.8, 0.5, 0.4])
    monkeypatch.setattr(RetrievalEvaluator, "scores", lambda self, model: {"mean_accuracy": next(scores)})
    options = {"metric_for_best_model": "eval_dev_mean_accuracy", "load_best_model_at_end": True, "test": []}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    execute(**options, dev=settings["test"], max_steps=2)
    other = write_sets(tmp_path / "other", de=bitext[:5])
    execute(**options, dev=[str(other)], max_steps=3, resume_from_checkpoint="true")
    assert "selected from the checkpoints of step 2 and later" in caplog.text
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert (state["best_metric"], state["best_global_step"]) == (0.5, 2)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ("no", None)),
        ({"dev": ["dev.tsv"]}, ("steps", 500)),
        ({"dev": ["dev.tsv"], "eval_steps": 20}, ("steps", 20)),
        ({"dev": ["dev.tsv"], "save_strategy": "epoch"}, ("epoch", None)),
        ({"dev": ["dev.tsv"], "save_strategy": "epoch", "eval_steps": 20}, ("steps", 20)),
        ({"dev": ["dev.tsv"], "eval_strategy": "no"}, ("no", None)),
    ],
)
def test_dev_data_are_measured_at_every_checkpoint(tmp_path, options, wanted):
    arguments = RunConfig(recipe="tr", corpus=["a.tsv"], output_dir=str(tmp_path), **options).training_arguments()
    assert (arguments.eval_strategy, arguments.eval_steps) == wanted


def test_a_stream_is_shuffled_with_the_seed_of_the_data(execute, tmp_path):
    losses = []
    for run, seed in enumerate((1, 1, 2)):
        output = str(tmp_path / str(run))
        result = execute(streaming=True, max_steps=2, logging_steps=1, data_seed=seed, test=[], output_dir=output)
        losses.append([log["loss"] for log in result.facts["log_history"] if "loss" in log])
    assert losses[0] == losses[1] != losses[2]


def test_a_configuration_is_not_changed_by_its_run(settings, tmp_path):
    config = RunConfig(**settings | {"output_dir": str(tmp_path / "out"), "test": [], "dev": settings["corpus"]})
    before = dataclasses.asdict(config)
    TrainingRun(config).execute()
    assert dataclasses.asdict(config) == before


def test_the_library_builds_and_parses_no_command_line():
    for module in (Path(run_module.__file__).parent).glob("*.py"):
        text = module.read_text(encoding="utf-8")
        assert "metaphrase.cli" not in text
        assert "argparse" not in text


def test_pairs_that_are_trained_on_or_chosen_by_are_reported(caplog):
    tests = {"news": {"sw": ParallelSet("sw", ("a", "b"), ("x", "y"))}}
    dev = {"sw": ParallelSet("sw", ("b",), ("z",))}
    trained = Dataset.from_dict({"source": ["A", "b"], "target": ["q", "r"], "source_lang": ["sw", "te"]})
    assert leakage(trained, dev, tests) == [{"data": "news", "pairs": 2, "shared": 1}]
    assert "1 of the 2 pairs of the test set news share a sentence with the training corpus" in caplog.text
    assert "1 of the 2 pairs of the test set news share a sentence with the dev pairs" in caplog.text
    assert leakage(trained, dev, {}) is None
