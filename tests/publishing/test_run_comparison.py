import json

import numpy as np
import pytest

from metaphrase.cli import main
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.result import Measurement, Result
from metaphrase.evaluation.seeds import difference
from metaphrase.exceptions import DataError, DataMismatchError, MissingFileError, UsageError
from metaphrase.publishing.run_comparison import compare_runs


def result(share, seed, n=200, **details):
    """Accuracy in two languages, of which about a share of the items is right."""
    languages = {}
    for place, language in enumerate(("fi", "sw")):
        items = (np.random.default_rng([seed, place]).random(n) < share).astype(float).tolist()
        languages[language] = Measurement(n, 100 * float(np.mean(items)), details={"items": items, **details})
    average = Measurement(2, float(np.mean([one.score for one in languages.values()])))
    return Result("demo", "encoder", "accuracy", languages, average, statistic="items").to_dict()


@pytest.fixture
def write(tmp_path):
    def written(
        name, *, recipe="tr", seed=1, share=0.8, tests=("demo",), steps=10, n=200, ids=None, code=None, **settings
    ):
        shared = {} if ids is None else {"item_ids": ids}
        facts = {"recipe": {"name": recipe}, "seed": seed, "model": "starter", "steps": steps, "files": []}
        facts |= {"objective_code": code} if code else {}
        facts["settings"] = {"recipe": recipe, "seed": seed, "output_dir": name, **settings}
        report = {
            "run": facts,
            "before": {test: result(0.5, 0, n, **shared) for test in tests},
            "after": {test: result(share, seed, n, **shared) for test in tests},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report))
        return tmp_path / name

    return written


def test_seeds_of_a_configuration_are_pooled(write):
    runs = [write("a", seed=1), write("b", recipe="dap", seed=1, share=0.52), write("c", seed=2)]
    rows = {row["configuration"]: row for row in compare_runs(runs)}
    assert {name: row["seeds"] for name, row in rows.items()} == {"tr": [1, 2], "dap": [1]}
    pooled = [compare(result(0.5, 0), result(0.8, seed))["pooled"] for seed in (1, 2)]
    wide = max((one["interval"][1] - one["interval"][0]) / 2 for one in pooled)
    expected = difference(*([one[side] for one in pooled] for side in ("before", "after")), wide)
    assert rows["tr"]["difference"] == expected["mean"]
    assert rows["tr"]["interval"] == [expected["mean"] - expected["half"], expected["mean"] + expected["half"]]
    assert rows["tr"]["interval"][1] - rows["tr"]["interval"][0] > 2 * wide
    assert rows["dap"]["interval"] == compare(result(0.5, 0), result(0.52, 1))["pooled"]["interval"]
    assert (rows["tr"]["verdict"], rows["dap"]["verdict"]) == (expected["verdict"], "tie")


def test_runs_with_other_code_of_an_objective_are_not_pooled(write):
    codes = [{"distance": "a"}, {"distance": "a"}, {"distance": "b"}]
    rows = compare_runs([write(str(seed), seed=seed, code=code) for seed, code in enumerate(codes)])
    assert [row["seeds"] for row in rows] == [[0, 1], [2]]


def test_a_run_is_the_baseline_of_the_others(write):
    runs = [write("a", seed=1), write("b", recipe="dap", seed=1, share=0.6), write("c", seed=2)]
    (row,) = compare_runs(runs, baseline=str(runs[0]))
    assert (row["configuration"], row["seeds"], row["verdict"]) == ("dap", [1], "worse")
    runs.append(write("d", recipe="dap", seed=3))
    with pytest.raises(UsageError, match="has no run with seed 3"):
        compare_runs(runs, baseline=str(runs[0]))
    with pytest.raises(UsageError, match="--baseline is 'before'"):
        compare_runs(runs, baseline="elsewhere")
    assert compare_runs(runs, baseline="starter") == compare_runs(runs)


def test_a_baseline_with_the_configuration_of_all_runs_is_refused(write):
    runs = [write("a", seed=1), write("b", seed=2)]
    with pytest.raises(UsageError, match="All runs have the configuration of the baseline"):
        compare_runs(runs, baseline=str(runs[0]))


@pytest.mark.parametrize(("n", "verdict"), [(49, "too few to tell"), (50, "tie")])
@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_a_tie_on_few_items_is_shown_as_that(write, capsys, n, verdict, seeds):
    """The items of two languages."""
    runs = [write(f"run-{seed}", seed=seed, share=0.5, n=n) for seed in seeds]
    (row,) = compare_runs(runs)
    assert (row["n"], row["verdict"]) == (2 * n, "tie")
    assert main(["compare", *map(str, runs)]) == 0
    assert verdict in " ".join(capsys.readouterr().out.split())


def test_a_tie_on_few_items_that_languages_share_is_shown_as_that(write, capsys):
    run = write("run", share=0.5, ids=[number % 40 for number in range(200)])
    (row,) = compare_runs([run])
    assert (row["n"], row["clusters"], row["verdict"]) == (400, 40, "tie")
    assert main(["compare", str(run)]) == 0
    assert "too few to tell" in " ".join(capsys.readouterr().out.split())


def test_configurations_of_one_recipe_are_named_by_their_folders(write):
    runs = [write("short"), write("long", steps=20)]
    assert [row["configuration"] for row in compare_runs(runs)] == [str(run) for run in runs]


def test_other_options_are_another_configuration(write):
    """The facts of a run name neither the learning rate nor most other options."""
    runs = [write(f"{rate}-{seed}", seed=seed, learning_rate=rate) for rate in (1.0, 2.0) for seed in (1, 2)]
    runs.append(write("resumed", seed=3, resume_from_checkpoint="true", learning_rate=1.0))
    rows = [(row["configuration"], row["seeds"]) for row in compare_runs(runs)]
    assert rows == [(str(runs[0]), [1, 2, 3]), (str(runs[2]), [1, 2])]


def test_runs_that_differ_in_nothing_are_refused(write):
    """They would count as independent."""
    with pytest.raises(UsageError, match=r"\S+a and \S+b have the same configuration and the seed 1"):
        compare_runs([write("a"), write("b")])


def test_runs_that_cannot_be_compared_are_refused(write, tmp_path):
    with pytest.raises(MissingFileError, match=r"has no report\.json"):
        compare_runs([tmp_path])
    runs = [write("my a"), write("b", seed=2, tests=("demo", "udhr"))]
    with pytest.raises(DataMismatchError, match="Not all runs were measured on udhr"):
        compare_runs(runs)
    facts = json.loads((runs[0] / "report.json").read_text())["run"]
    lacking = [
        json.dumps({"run": facts | {name: None}, "before": None, "after": {}}) for name in ("seed", "recipe", "files")
    ]
    for content in ("{", "[]", '{"run": {}, "before": null, "after": {}}', *lacking):
        (runs[0] / "report.json").write_text(content)
        with pytest.raises(
            DataError,
            match=r"report\.json is damaged\. Delete it, run `metaphrase report '.*my a' --data TEST_SETS`, and compare .*my a/report in",
        ):
            compare_runs(runs[:1])


def test_seeds_with_different_baselines_are_refused(write):
    """`metaphrase report --baseline` measures another encoder than the one that the run started from."""
    runs = [write("a"), write("b", seed=2)]
    path = runs[1] / "report.json"
    path.write_text(path.read_text().replace('"model": "encoder"', '"model": "other"'))
    with pytest.raises(DataMismatchError, match="have different baselines: encoder, other"):
        compare_runs(runs)
    compare_runs(runs[1:])


def test_the_command_prints_and_draws(write, tmp_path, capsys):
    runs = [write("a", tests=("demo", "udhr")), write("b", recipe="dap", tests=("demo", "udhr"))]
    plot = tmp_path / "plot.svg"
    assert main(["compare", *map(str, runs), "--plot", str(plot), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == compare_runs(runs)
    assert plot.read_text().count("difference in points") == 2
    assert main(["compare", *map(str, runs), "--plot", str(tmp_path / "plot.doc")]) == 2
    assert "--plot requires a file name that ends in .png, .svg or .pdf, but got " in capsys.readouterr().err


def test_runs_on_other_files_are_another_configuration(write):
    """Their seeds are not pooled, even if the settings are the same."""
    runs = [write("a", seed=1), write("b", seed=2), write("c", seed=3)]
    for run, digest in zip(runs, "010", strict=True):
        path = run / "report.json"
        report = json.loads(path.read_text())
        report["run"]["files"] = [{"path": "sw-en.tsv", "sha256": digest}]
        path.write_text(json.dumps(report))
    assert [row["seeds"] for row in compare_runs(runs)] == [[1, 3], [2]]
