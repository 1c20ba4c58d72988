import json

import pytest

from metaphrase.checkpoints.folders import publish
from metaphrase.cli.options import parse
from metaphrase.evaluation.retention import collapse_in_words, verdict_in_words
from metaphrase.exceptions import CheckpointError, RecipeError, UsageError
from metaphrase.io.work_folders import write_part
from metaphrase.training.adaptation import PLAN, Adaptation, AdaptationConfig, plan_of_checkpoints, recipe_content
from metaphrase.training.planning import Plan
from metaphrase.training.recipe import Recipe, Term
from metaphrase.training.results import RunResult


def row(verdict, difference):
    return {"verdict": verdict, "before": 80.0, "after": 80.0 + difference, "difference": difference, "n": 500,
            "interval": [difference - 1, difference + 1]}  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "difference", "said"),
    [("better", 3.0, "Better. 80.0 → 83.0 %"), ("tie", 0.4, "Tie"), ("worse", -3.0, "Worse.")],
)
def test_the_verdict_is_said(verdict, difference, said):
    (line,) = verdict_in_words({"sw": row(verdict, difference)}, None, {"sw": "Swahili (sw)"})
    assert line.startswith("Swahili (sw): ")
    assert said in line
    assert f"{difference:+.1f}" in line


@pytest.mark.parametrize(("pairs", "said"), [(99, "Too few held-out pairs to tell. 80.0"), (100, "Tie:")])
def test_few_pairs_do_not_tell_a_tie(pairs, said):
    (line,) = verdict_in_words({"sw": row("tie", 0.4) | {"n": pairs}}, None, {})
    assert line.startswith(f"sw: {said}")
    (line,) = verdict_in_words({"sw": row("better", 9.0) | {"n": pairs}}, None, {})
    assert line.startswith("sw: Better.")


def test_directions_are_not_chosen_without_a_guard(tmp_path):
    config = AdaptationConfig(["my.tsv"], ["sw"], debias="auto", output_dir=str(tmp_path / "out"))
    with pytest.raises(UsageError, match=r"--debias auto needs data .* Pass folders with --guard, or a number"):
        Adaptation(config)


@pytest.mark.parametrize(
    ("verdict", "said", "meaning"),
    [("kept", "Kept", "so a loss"), ("lost", "Worse", "a loss"), ("uncertain", "Uncertain", "so a loss")],
)
def test_other_languages_are_spoken_of(verdict, said, meaning):
    kept = {"verdict": verdict, "limit": 1.0, "pooled": row("tie", -0.2), "languages": [{}] * 90}
    lines = verdict_in_words({"sw": row("tie", 0.0)}, kept, {})
    assert lines[1].startswith(f"90 other languages: {said}. -0.2 [")
    assert f"on average, {meaning} of more than 1 point" in lines[1]
    one = verdict_in_words({"sw": row("tie", 0.0)}, kept | {"languages": [{}]}, {})[1]
    assert one == lines[1].replace("90 other languages", "1 other language")


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("kept", "Kept"),
        ("lost", "Worse"),
        ("uncertain", "Uncertain"),
        ("tie", "Kept (a tie)"),
        ("worse", "Worse"),
    ],
)
def test_other_abilities_are_spoken_of(verdict, said):
    abilities = {"verdict": verdict, "languages": {"de": 1, "sw": 2}, "difference": -5.0, "interval": [-6, -4]}
    structure = abilities | {"limit": 4.0}
    lines = verdict_in_words({"sw": row("tie", 0.0)}, None, {}, {"stsb": abilities, "similarity structure": structure})
    assert lines[1].startswith(f"Stsb, 2 languages: {said}.")
    assert lines[1].endswith(" -5.0 [-6.0, -4.0] points.")
    assert lines[2].startswith(f"Similarity structure, 2 languages: {said}.")
    assert lines[2].endswith(" -5.0 [-6.0, -4.0] points, against a red line of -4.")


def test_a_guard_with_few_items_tells_no_tie():
    few = {"verdict": "tie", "n": 99, "languages": {"en": 0}, "difference": -0.1, "interval": [-6, 6]}
    (line,) = verdict_in_words({}, None, {}, {"stsb": few})
    assert line == "Stsb, 1 language: Too few items to tell. -0.1 [-6.0, +6.0] points."


@pytest.mark.parametrize("settings", [{}, {"output_dir": "runs/mine", "force": True, "data_license": "cc0-1.0"}])
def test_the_recorded_command_repeats_the_run(settings):
    config = AdaptationConfig(corpus=["my.tsv"], languages=["sw"], **settings)
    words = Adaptation(config)._command()
    assert parse("metaphrase adapt", [AdaptationConfig], words[2:], description="", examples=[]) == (config,)


def test_a_collapsed_encoder_is_named_first_and_nothing_is_called_kept(tmp_path):
    kept = {"verdict": "kept", "limit": 1.0, "pooled": row("tie", -0.2), "languages": [{}] * 93}
    adaptation = Adaptation(AdaptationConfig(corpus=["my.tsv"], languages=["sw"], output_dir=str(tmp_path)))
    results = [{"held-out": {"facts": {"unrelated_cosine": cosine}}} for cosine in (0.8, 0.9996)]
    run = RunResult(
        tmp_path,
        "starter",
        {},
        *results,
        comparisons={"held-out": {"languages": {"sw": row("tie", 0.1)}}},
        retention={"udhr": kept},
    )
    plan = Plan(8, None, 9, 3, True, False, 1e-4, 1.0, 1.0, ())
    first, second = adaptation._judge(run, plan).verdict
    assert first.startswith("Training has collapsed the embeddings: unrelated sentences have a mean cosine of 0.9996")
    assert second.startswith("Swahili (sw): Tie")
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == [first, second]
    before, after = results
    assert collapse_in_words(after, before).startswith("The embeddings of the encoder before training have collapsed")
    assert collapse_in_words({}, after).startswith("The embeddings have collapsed: ")  # by training, or before it
    assert collapse_in_words(before, before) == ""
    both = {"udhr": before["held-out"], **after}  # one test set is enough
    assert collapse_in_words(before, both).startswith("Training has collapsed the embeddings")


def test_a_recipe_that_learns_a_vector_for_each_language_is_refused(tmp_path):
    config = AdaptationConfig(["x.tsv"], ["sw"], recipe="wacse-language", output_dir=str(tmp_path / "out"))
    with pytest.raises(UsageError, match=r"Recipe wacse-language learns .* Train it with `metaphrase train`"):
        Adaptation(config)


def test_a_recipe_that_reads_more_than_a_bitext_is_refused(tmp_path):
    config = AdaptationConfig(["x.tsv"], ["sw"], recipe="amber", output_dir=str(tmp_path / "out"))
    with pytest.raises(UsageError, match=r"Recipe amber reads monolingual, which .* Train it with `metaphrase train`"):
        Adaptation(config)


@pytest.mark.parametrize(
    ("args", "vocabulary"),
    [({}, "english"), ({"vocabulary": "untied"}, "untied"), ({"direction": "both"}, "tied")],
)
def test_the_vocabulary_is_that_of_the_corpus_unless_the_recipe_sets_it(tmp_path, args, vocabulary):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps({"name": "mine", "terms": [{"objective": "rtl", "args": args}]}))
    content = recipe_content(AdaptationConfig(["x.tsv"], ["sw"], recipe=str(recipe)))
    assert Recipe.from_dict(content).objectives()["rtl"].vocabulary == vocabulary


def test_a_recipe_does_not_change_the_plan(tmp_path):
    training = {"gradient_accumulation_steps": 8, "learning_rate": 1.0, "max_length": 128, "weight_decay": 0.1}
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps({"name": "mine", "terms": [{"objective": "tr"}], "training": training}))
    content = Recipe.from_dict(recipe_content(AdaptationConfig(["x.tsv"], ["sw"], recipe=str(recipe))))
    assert (content.training, content.max_length) == ({"weight_decay": 0.1}, 128)


def test_a_recipe_is_passed_by_name(tmp_path):
    config = AdaptationConfig(
        ["x.tsv"], ["sw"], recipe=Recipe("mine", (Term("tr"),)), output_dir=str(tmp_path / "out")
    )
    with pytest.raises(RecipeError, match=r"but got the Recipe object 'mine'"):
        Adaptation(config)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="runs in one process"):
        Adaptation(AdaptationConfig(corpus=["x.tsv"], languages=["sw"]))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"seed": 2, "pairs": "b"}, r"seed \(1 → 2\)"),
        ({"seed": 1, "pairs": "b"}, r'pairs \("a" → "b"\)'),
    ],
)
def test_a_refusal_omits_digests_that_follow_from_an_option(tmp_path, asked, named):
    (tmp_path / "_partial").mkdir()
    publish(tmp_path / "_partial", tmp_path / "checkpoint-2", {"step": 2})
    write_part(tmp_path / PLAN, {"asked": {"seed": 1, "pairs": "a"}, "plan": {}})
    with pytest.raises(CheckpointError, match=rf"a run that differs in: {named}\. To resume it, use the original"):
        plan_of_checkpoints(tmp_path, asked)
