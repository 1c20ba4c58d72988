import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import BertConfig, BertModel

from metaphrase.cli import main
from metaphrase.evaluation.seeds import difference, interval
from metaphrase.training.recipe import Recipe
from tests.conftest import shape, wordpiece

SCRIPTS = Path(__file__).parents[2] / "scripts"
GRIDS = sorted(path.stem for path in (SCRIPTS.parent / "configs" / "ablations").glob("*.yaml"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, full_bitext):
    """Twenty-four pairs in German, twelve in a made-up Afrikaans, with back-translations and without links."""
    folder = tmp_path_factory.mktemp("corpus")
    columns = ("source", "target", "source_bt", "target_bt")
    for language, rows in (("de", full_bitext), ("af", full_bitext[:12])):
        for split in ("train", "test"):
            lines = []
            for row in rows:
                texts = {column: row[column] for column in columns}
                if language == "af":
                    texts["source"] = " ".join(reversed(row["source"].split()))
                lines.append(json.dumps(texts) if split == "train" else f"{texts['source']}\t{texts['target']}")
            name = f"{language}-en.train.jsonl" if split == "train" else f"{language}-en.test.tsv"
            header = [] if split == "train" else ["source\ttarget"]
            (folder / name).write_text("\n".join([*header, *lines]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def deep_encoder_dir(tmp_path_factory):
    """An encoder with as many layers as RTL's deepest head."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("deep"), wordpiece()
    BertModel(BertConfig(**shape(tokenizer, num_hidden_layers=4)), add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tiny_encoder_dir, corpus, tmp_path):
    words = f"--model {tiny_encoder_dir} --corpus {corpus} --test {corpus} --output {tmp_path}/out --use_cpu"
    return [*words.split(), "--batch_size", "6", "--max_length", "24", "--steps", "2"]


def planned(script, name, argv, identity=""):
    options, given, own = script.parsed(argv)
    grid = script.load_grid(name, settings=own)
    configs = script.configurations(grid, options, given)
    decisive = [[identity, script.settings_of(one)] for one in configs[:2]]
    return script.plan(grid, options, configs, decisive + [[]] * len(configs[2:]))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_is_trained_and_written(script, settings, deep_encoder_dir, tmp_path, name, capsys):
    more = {"ppa-table5": ["--set", "moco.queue_size=12"], "dap-fig4": ["--model", str(deep_encoder_dir)]}.get(
        name, []
    )
    assert script.main([name, *settings, *more, "--seeds", "1", "2"]) == 0
    grid, folder = script.load_grid(name), tmp_path / "out" / name
    result = json.loads((folder / "results.json").read_text())
    assert [cell["label"] for cell in result["cells"]] == [cell.label for cell in grid.cells]
    assert result["pairs"] == {"de": 24, "af": 12}
    test = next(iter(result["untrained"]))
    assert all(len(cell["tests"][test]["scores"]["mean"]["values"]) == 2 for cell in result["cells"])
    assert list(result["cells"][0]["tests"][test]["gains"]) == ["af", "de"]
    table = (folder / "table.md").read_text()
    assert all(f"| {cell.label} | " in table for cell in grid.cells)
    assert "| af | 12 |" in table
    assert ("not directly comparable" in table) == bool(grid.published)
    assert ("GFLOP" in table) == (name == "dap-table6")
    assert (folder / f"{name}-gains.png").is_file()
    assert (folder / f"{name}.svg").is_file() == (name in ("dap-fig3", "dap-fig4"))
    assert not list((folder / "work").iterdir())
    facts = [json.loads(path.read_text())["facts"] for path in (folder / "cells").iterdir()]
    assert len(facts) == 2 * len(grid.cells)
    assert all(fact["steps"] == 2 for fact in facts)
    digests = {json.dumps(fact["recipe"]["terms"]) for fact in facts}
    assert len(digests) == len(grid.cells) or name == "wacse-table8"  # whose cells differ in a recipe's key
    assert_kept(script, grid, result, tmp_path)
    out = capsys.readouterr().out
    assert out.index("Estimate:") < out.index(f"1/{2 * len(grid.cells)} {grid.cells[0].label}, seed 1:")


def assert_kept(script, grid, result, folder):
    page, name = folder / "docs.md", grid.name
    page.write_text("before\n<!-- ablations -->\n<!-- /ablations -->\nafter\n")
    for _ in range(2):
        script.keep(grid, result, "python …", page, folder / "kept")
    text = page.read_text()
    assert text.startswith(f"before\n<!-- ablations -->\n## {name}: ")
    assert text.endswith("<!-- /ablations -->\nafter\n")
    assert all((folder / target).is_file() for target in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text))
    assert text.count("![") == 1 + bool(grid.axis)
    assert text.count("`python …`") == 1
    assert json.loads((folder / f"kept/{name}.json").read_text())["command"] == "python …"


@pytest.mark.long
def test_a_killed_run_resumes(script, settings, tmp_path, monkeypatch, capsys):
    calls, real = [], script.measured

    def measured(model, tests, name):
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(model, tests, name)

    monkeypatch.setattr(script, "measured", measured)
    argv = ["dap-table6", *settings, "--seeds", "3"]
    with pytest.raises(KeyboardInterrupt):
        script.main(argv)
    kept = {path: path.read_bytes() for path in (tmp_path / "out/dap-table6/cells").iterdir()}
    assert [path.name.partition("-seed")[0] for path in kept] == ["tr"]
    calls[:] = ["x"] * 9
    assert script.main(argv) == 0
    assert calls[10:] == ["TR+TLM", "DAP"]  # behind the untrained encoder
    assert all(path.read_bytes() == content for path, content in kept.items())
    first = (tmp_path / "out/dap-table6/results.json").read_text()
    assert script.main(argv) == 0
    assert calls[10:] == ["TR+TLM", "DAP", str(settings[1])]
    assert (tmp_path / "out/dap-table6/results.json").read_text() == first
    assert "3 already done" in capsys.readouterr().out
    monkeypatch.setattr(script, "trained", lambda *args: pytest.fail("trained again"))
    with pytest.raises(pytest.fail.Exception):
        script.main([*argv, "--learning_rate", "1e-3"])


@pytest.mark.long
def test_a_checkpoint_within_a_cell_is_resumed(script, settings, tmp_path):
    saving = ["--save_strategy", "steps", "--save_steps", "2", "--steps", "5"]
    run = planned(script, "dap-table6", [*settings, *saving])[0]
    plain, _, _ = script.trained(run.config, tmp_path / "a", tmp_path / "links")
    (tmp_path / "a/checkpoint-5/trainer_state.json").unlink()  # as a crash leaves it
    resumed, _, facts = script.trained(run.config, tmp_path / "a", tmp_path / "links")
    assert facts["steps"] == 5
    assert len(list((tmp_path / "a").glob("checkpoint-*"))) > 0
    for name, value in plain.state_dict().items():
        assert value.equal(resumed.state_dict()[name]), name


@pytest.mark.slow
def test_links_are_found_once_for_all_cells(script, settings, tmp_path, monkeypatch):
    import metaphrase.aligners.linking as aligners

    aligned, real = [], aligners.add_alignment
    monkeypatch.setattr(aligners, "add_alignment", lambda *a, **k: aligned.append(k) or real(*a, **k))
    assert script.main(["wacse-table9", *settings, "--seeds", "1"]) == 0
    assert script.main(["wacse-table9", *settings, "--seeds", "1", "2"]) == 0
    assert len(aligned) == 1
    assert [path.is_symlink() for path in (tmp_path / "out/alignment").iterdir()] == [False]


@pytest.mark.slow
def test_results_are_those_of_metaphrase_train(script, settings, tmp_path, corpus):
    run = planned(script, "dap-fig3", [*settings, "--learning_rate", "1e-3"])[0]
    model, tests, _ = script.trained(run.config, tmp_path / "work", tmp_path / "links")
    ours = script.measured(model, tests, "ours")
    command = replace(run.config, output_dir=str(tmp_path / "plain"), resume_from_checkpoint=None).command()
    assert main(command[1:]) == 0
    theirs = json.loads((tmp_path / "plain/report.json").read_text())["after"]
    assert ours[corpus.name]["languages"] == theirs[corpus.name]["languages"]


def test_invalid_grids_are_refused_before_training(script, settings, tmp_path, bitext_path, capsys):
    corpus = settings.index("--corpus") + 1
    bare = [*settings[:corpus], str(bitext_path), *settings[corpus + 1 :], "--languages", "de"]
    for argv, message in (
        (["mgc-table4", *bare], "scripts/back_translate.py"),
        (["dap-table5", *settings, "--vocabulary", "english"], "english"),
        (["dap-fig3", *settings, "--learning_rat", "1"], "learning_rate"),
        (["dap-fig3", *settings, "--seed", "1"], "--seeds"),
        (["dap-fig3", *settings, "--set", "merge=0.5"], "--merge has no effect here"),
        (["dap-fig3", *settings, "--set", "moco.queue_size=3"], "contains the objective moco"),
        (["dap-fig3", *settings, "--set", "learning_rate"], "OPTION=VALUE"),
        (["dap-fig9", *settings], "dap-fig4"),
    ):
        assert script.main(argv) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*/cells"))


@pytest.mark.slow
def test_digests_depend_on_what_determines_a_result(script, settings, corpus, tmp_path):
    def path(*more, identity="", base=settings):
        return planned(script, "dap-fig4", [*base, *more], identity)[1].path.name

    plain = path()
    assert path("--save_strategy", "steps", "--report_to", "none") == plain
    assert path("--set", "per_device_train_batch_size=6") == plain
    best = ["--dev", settings[settings.index("--test") + 1], "--load_best_model_at_end", "--save_strategy", "steps"]
    best += ["--metric_for_best_model", "eval_dev_mean_accuracy", "--save_steps"]
    assert path(*best, "2") != path(*best, "3")
    moved = tmp_path / corpus.name
    moved.mkdir()
    for file in corpus.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    elsewhere = [str(moved) if word == str(corpus) else word for word in settings]
    assert path(base=elsewhere) == plain
    changes = [["--steps", "6"], ["--freeze_word_embeddings"], ["--set", "rtl.positions=double"], ["--limit", "9"]]
    names = {plain, path(identity="other"), *(path(*change) for change in changes)}
    (moved / "af-en.train.jsonl").write_text((corpus / "de-en.train.jsonl").read_text())
    assert len(names | {path(base=elsewhere)}) == 7


def test_monolingual_text_is_read_if_given(script):
    cells = script.load_grid("amber-table2", monolingual=True).cells
    assert all("monolingual" in cell.recipe.columns for cell in cells)
    assert cells[-1].recipe.terms == Recipe.load("amber").terms
    assert not any("monolingual" in cell.recipe.columns for cell in script.load_grid("amber-table2").cells)


def test_monolingual_text_of_the_hub_is_part_of_the_settings(script, bitext_path):
    given = {"recipe": "amber", "output_dir": "unused", "corpus": [str(bitext_path)], "test": [], "languages": ["de"]}
    texts = (["hf:org/a"], ["hf:org/b"], ["hf:org/b", "hf:org/a"])
    assert len({json.dumps(script.settings_of(script.RunConfig(**given, monolingual=one))) for one in texts}) == 3


@pytest.mark.parametrize(
    "written", ["--monolingual {}", "--monolingual={}", "--set monolingual={}", "--config {}.yaml"]
)
def test_monolingual_text_from_options_and_files(script, written, tmp_path):
    (tmp_path / "sw.txt.yaml").write_text(f"monolingual: [{tmp_path}/sw.txt]\n", encoding="utf-8")
    _, given, _ = script.parsed(written.format(tmp_path / "sw.txt").split())
    assert given["monolingual"] == [str(tmp_path / "sw.txt")]
    assert "monolingual" not in script.run_options(["--monolingual_ratio", "0.5"])


@pytest.mark.parametrize("name", ["model", "corpus", "test"])
def test_its_own_options_are_not_read_from_a_file(script, name, tmp_path):
    (tmp_path / "c.yaml").write_text(f"{name}: {'x' if name == 'model' else '[x]'}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"--config has {name}\. Remove it, and pass --{name} on the command line"):
        script.parsed(["--config", str(tmp_path / "c.yaml")])


def test_a_seed_is_trained_once(script):
    assert script.parsed(["--seeds", "1", "2", "1"])[0].seeds == [1, 2]


def test_cells_are_the_papers(script):
    def terms(name):
        return [{t.objective: t.weight for t in cell.recipe.terms} for cell in script.load_grid(name).cells]

    full = {"tr": 0.8, "awp": 0.02, "wtr": 0.18}
    assert terms("wacse-table10") == [
        {k: full[k] for k in kinds} for kinds in (["tr"], ["tr", "awp"], ["tr", "wtr"], full)
    ]
    assert [set(t) for t in terms("ppa-table5")] == [{"moco", "tlm"}, {"tlm"}, {"moco"}, {"moco", "mlm"}]
    ratios = [cell.recipe.terms[1].args.get("ratio", 1.0) for cell in script.load_grid("dap-fig3").cells]
    assert ratios == [cell.x for cell in script.load_grid("dap-fig3").cells] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert [cell.recipe.language_embedding for cell in script.load_grid("wacse-table8").cells] == [False, True]


@pytest.mark.parametrize("name", GRIDS)
def test_published_numbers_fill_their_columns(script, name):
    grid = script.load_grid(name)
    assert all(len(cell.published) == len(grid.published.get("columns", ())) for cell in grid.cells)
    assert bool(grid.axis) == all(cell.x is not None for cell in grid.cells)
    assert len({cell.slug for cell in grid.cells}) == len(grid.cells)


def test_settings_of_a_cell_join_its_recipe(script, tmp_path, monkeypatch):
    content = {
        "title": "",
        "paper": "",
        "varies": "",
        "cells": [
            {"label": "a", "recipe": "dap", "settings": {"max_length": 7}, "training": {"learning_rate": 3e-5}},
            {"label": "b", "recipe": "tr", "terms": {"tr": {"weight": 0.5, "args": {"temperature": 0.1}}}},
        ],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(script, "GRIDS", tmp_path)
    first, second = (cell.recipe for cell in script.load_grid("mine", settings={"rtl.layers": 3}).cells)
    assert (first.max_length, first.training["learning_rate"], first.paper_training["learning_rate"]) == (
        7,
        3e-5,
        3e-5,
    )
    assert first.terms[1].args["layers"] == 3
    assert (second.terms[0].weight, second.terms[0].args) == (0.5, {"temperature": 0.1})


def test_intervals_are_students():
    from scipy.stats import t, ttest_rel

    old, new = [70.0, 71.5, 72.0], [71.0, 72.0, 73.5]
    found = difference(old, new)
    low, high = ttest_rel(new, old).confidence_interval(0.95)
    assert (found["mean"] - found["half"], found["mean"] + found["half"]) == pytest.approx((low, high), abs=2e-3)
    assert found["verdict"] == "tie"
    assert difference(new, [x - 9 for x in new])["verdict"] == "worse"
    assert difference([70.0, 71.0, 72.0], [71.0, 72.0, 73.0], sampling=1.1)["verdict"] == "tie"
    assert difference([1.0], [2.0]) == {"mean": 1.0, "half": None, "values": [1.0], "verdict": "one seed"}
    assert interval(old)["half"] == pytest.approx(t.ppf(0.975, 2) * 1.0408 / 3**0.5, abs=1e-3)


def test_the_page_lists_every_grid_and_shows_the_stored_results(script, tmp_path):
    page = tmp_path / "ablations.md"
    page.write_bytes(script.PAGE.read_bytes())
    listed = re.findall(r"^\| \[?`([\w-]+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == GRIDS
    script.write_page(script.KEPT, page)
    assert page.read_bytes() == script.PAGE.read_bytes()


def test_seeds_that_agree_leave_the_sampling_error(load_script):
    def runs(*hits):
        return [
            {
                language: {way: {"hits": h} for way in ("source_to_target", "target_to_source")}
                for language, h in run.items()
            }
            for run in hits
        ]

    old = runs({"sw": "0000", "fi": "1010"}, {"sw": "0000", "fi": "1010"})
    new = runs({"sw": "1100", "fi": "1010"}, {"sw": "1000", "fi": "1010"})
    moved = 100 * np.array([1, 0.5, 0, 0])  # the mean over seeds; Finnish does not move
    expected = 1.96 * (moved.std(ddof=1) / 2) / 2
    sampling_error = load_script("ablation_table").sampling_error
    assert sampling_error(old, new) == pytest.approx(expected)
    assert sampling_error(old, old) == 0
