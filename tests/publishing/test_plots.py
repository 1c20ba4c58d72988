"""Charts show the data of a report, as PNG files and as markup that needs nothing else."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from metaphrase.publishing import plots
from tests.conftest import mostly_slow
from tests.publishing.reports import analyses, comparison


def test_learning_curves_are_finite_scalars_with_two_points():
    history = [
        {"step": 1, "loss": 3.0, "tr": float("nan"), "learning_rate": 0.1, "note": "x"},
        {"step": 2, "loss": float("inf"), "tr": 1.0, "eval_sw_mean_accuracy": 0.5, "eval_guard_a": 1.0},
        {"step": 3, "loss": 1.0, "eval_sw_mean_accuracy": 0.6, "eval_runtime": 2.0, "eval_guard_a": 0.5},
        {"train_loss": 2.0, "step": 3},
        {"loss": 9.0},
    ]
    assert plots.learning_curves(history) == {
        "loss": [(1, 3.0), (3, 1.0)],
        "eval_sw_mean_accuracy": [(2, 0.5), (3, 0.6)],
        "eval_guard_a": [(2, 1.0), (3, 0.5)],
    }


@pytest.mark.parametrize("name", ["eval_sw_mean_accuracy", "eval_guard_similarity_structure"])
def test_accuracies_and_guards_are_drawn_in_percent(name):
    figure = Figure()
    plots.draw_curves(figure, curves={"loss": [(1, 3.0), (3, 0.5)], name: [(2, 0.5), (3, 0.625)]})
    loss, accuracy = figure.axes
    assert loss.lines[0].get_ydata().tolist() == [3.0, 0.5]
    assert accuracy.lines[0].get_ydata().tolist() == [50, 62.5]
    assert [panel.get_title().rpartition(", last ")[2] for panel in (loss, accuracy)] == ["0.5", "62.5 %"]


def test_differences_are_drawn_with_their_intervals_and_verdicts():
    rows = [
        {"language": "sw", "difference": -8.0, "interval": [-11.0, -6.0], "verdict": "worse"},
        {"language": "te", "difference": 1.0, "interval": [-1.0, 4.0], "verdict": "tie"},
        {"language": "vi", "difference": 5.0, "interval": [3.0, 6.0], "verdict": "better"},
    ]
    rows = [{"before": 50.0, "after": 50.0 + row["difference"], **row} for row in rows]
    axes = Figure().subplots()
    plots.draw_differences(axes, rows)
    assert [drawn.get_label() for drawn in axes.containers] == ["worse", "tie", "better"]
    for place, (row, drawn) in enumerate(zip(rows, axes.containers, strict=True)):
        line, _, (bar,) = drawn
        ends = np.array(bar.get_segments()[0])
        assert sorted(ends[:, 0]) == row["interval"]
        assert line.get_xdata()[0] == row["difference"]
        assert (ends[:, 1] == place).all()


def results(accuracies):
    return {
        "languages": {
            language: {"mean": {"accuracy": accuracy, "interval": [accuracy - 4, accuracy + 3]}}
            for language, accuracy in accuracies.items()
        }
    }


BEFORE, AFTER = results({"sw": 40.0, "te": 50.0, "vi": 80.0}), results({"sw": 75.0, "te": 51.0, "vi": 50.0})


def test_accuracies_are_drawn_with_their_intervals_and_the_largest_gain_on_top():
    figure = Figure()
    tests = comparison({"sw": 35.0, "te": 1.0, "vi": -30.0}, [1, 3])
    plots.draw_accuracy(figure, before=BEFORE, after=AFTER, comparison=tests)
    axes, moved = figure.axes
    points = {marker: [] for marker in "so"}
    bars = []
    for line in axes.get_lines():
        if line.get_marker() in points:
            points[line.get_marker()].append((line.get_xdata()[0], round(line.get_ydata()[0])))
        elif line.get_linewidth() == 4:
            bars.append(list(line.get_xdata()))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Vietnamese (vi)", "Telugu (te)", "Swahili (sw)"]
    assert points == {"s": [(80.0, 0), (50.0, 1), (40.0, 2)], "o": [(50.0, 0), (51.0, 1), (75.0, 2)]}
    assert bars == [[76, 83], [46, 53], [46, 53], [47, 54], [36, 43], [71, 78]]
    assert sorted(drawn[0].get_xdata()[0] for drawn in moved.containers) == [-30.0, 1.0, 35.0]


def test_accuracies_without_a_baseline():
    figure = Figure()
    plots.draw_accuracy(figure, before=None, after=AFTER, comparison=None)
    (axes,) = figure.axes
    drawn = [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "o"]
    assert drawn == [50.0, 51.0, 75.0]


def test_the_red_line_of_retention():
    figure = Figure()
    retention = analyses()["retention"]["udhr"]
    plots.draw_retention(figure, retention=retention)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["red line, -1"].get_xdata()) == [-1.0, -1.0]
    assert list(lines["mean"].get_xdata()) == [retention["pooled"]["difference"]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mean", "German (de)", "French (fr)"]


def test_maps_draw_the_points_on_one_scale():
    figure = Figure()
    tokens = analyses()["tokens"]
    plots.draw_tokens(figure, tokens=tokens)
    panels = {axes.get_title(): axes for axes in figure.axes}
    for kind, name in (("pca", "PCA"), ("tsne", "t-SNE")):
        for side in ("before", "after"):
            axes = panels[f"{name}, {side}"]
            points = [line.get_xydata()[0].tolist() for line in axes.get_lines() if len(line.get_xdata())]
            assert points == tokens[side][kind]
            assert axes.get_aspect() == 1


def test_histograms_draw_the_counts():
    figure = Figure()
    margins = analyses()["margins"]
    plots.draw_margins(figure, margins=margins)
    for axes, side in zip(figure.axes, ("before", "after"), strict=True):
        drawn = [steps.get_data() for steps in axes.patches]
        for key, (counts, edges, _) in zip(("translations", "others"), drawn, strict=True):
            assert counts.tolist() == margins[side][key]
            assert list(edges) == margins[side]["edges"]


def report(baseline=True, word="mbwa"):
    history = [{"step": at, "loss": 3 / at, "tr": 2.0, "rtl": at, "eval_loss": 1.0} for at in (1, 2, 3)]
    return {
        "before": {"demo": BEFORE} if baseline else None,
        "after": {"demo": AFTER},
        "comparisons": {"demo": comparison({"sw": 35.0, "te": 1.0, "vi": -30.0}, [1, 3])} if baseline else {},
        "run": {"log_history": history},
        "analysis": analyses(baseline, word=word),
    }


@pytest.mark.long
@pytest.mark.parametrize("baseline", mostly_slow([True, False], [True]))
def test_pictures(tmp_path, baseline):
    content = report(baseline, word="犬ఒక")  # of scripts that few fonts cover
    paths = plots.save_pictures(content, tmp_path / "new")
    names = ["accuracy-demo", *["retention-udhr"] * baseline, "curves", "tokens", "margins"]
    assert [path.stem for path in paths] == names
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 4000


@pytest.mark.long
def test_markup_is_deterministic_and_needs_nothing_else():
    for name, chart in plots.charts(report()).items():
        markup = plots.svg(name, chart)
        if name == "accuracy-demo":
            assert markup == plots.svg(name, chart)
        assert markup.startswith("<svg viewBox=")
        assert markup.rstrip().endswith("</svg>")
        assert not re.search(r"https?:|url\(|<style|<image|<metadata|<!--|<g id=", markup)
        assert set(re.findall(r'xlink:href="#(\w+)"', markup)) <= set(re.findall(r'id="(\w+)"', markup))
        assert not re.search(r"#[0-9a-f]{6}", re.sub(r'href="#\w+"', "", markup))  # colours follow the theme


@pytest.mark.long
def test_charts_are_legible_on_a_phone():
    """A width of 360 points, of which a phone of 400 pixels shows 372 pixels, and no text below 8 points."""
    for name, chart in plots.charts(report()).items():
        markup = plots.svg(name, chart)
        assert float(re.match(r'<svg viewBox="0 0 ([\d.]+) ', markup)[1]) <= 360
        assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", markup)) >= 8


def test_markup_of_two_charts_shares_no_id():
    found = plots.charts(report())
    ids = [set(re.findall(r' id="(\w+)"', plots.svg(name, found["tokens"]))) for name in ("a", "b")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_markup_has_text_and_tooltips():
    markup = plots.svg("tokens", plots.charts(report(word='<b>"'))["tokens"])
    words = re.findall(r"<title>(.*?)</title>", markup)
    assert len(words) == 48  # 12 words on 4 maps
    assert words[0] == '&lt;b&gt;"0 (sw)'
    assert "t-SNE, before</text>" in markup


def test_a_picture_is_replaced_as_a_whole(tmp_path, monkeypatch):
    def fail(figure, file, **options):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    path = plots.save_picture(plots.Chart("", lambda figure: None), tmp_path / "chart.png")
    before = path.read_bytes()
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(KeyboardInterrupt):
        plots.save_picture(plots.Chart("", lambda figure: None), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_of_a_picture_is_created(tmp_path):
    plots.save_picture(plots.Chart("empty", lambda figure: None), tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").is_file()
