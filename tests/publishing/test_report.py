import importlib.util
import io
import json
import re
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from rich.console import Console

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retrieval import TATOEBA_GROUPS, evaluate_retrieval
from metaphrase.io.files import write_json
from metaphrase.publishing.examples import usage_lines
from metaphrase.publishing.report import render_table, write_report
from metaphrase.training.recipe import Recipe
from tests.publishing.reports import analyses

HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=y>&amp;{{ 7*7 }}"
VOID = {"meta", "line", "circle", "rect", "polyline", "br", "img", "link", "input"}


def measured(*args, **options):
    """The JSON form of a result."""
    return evaluate_retrieval(*args, **options).to_dict()


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where tags are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def result(found, model="model", n=100):
    """Result of a model that finds ``found[language]`` of ``n`` translations."""
    vectors = {f"e{i}": vector for i, vector in enumerate(np.random.default_rng(0).normal(size=(n, 12)))}
    sets = {}
    for language, count in found.items():
        vectors |= {f"{language}{i}": vectors[f"e{i if i < count else (i + 1) % n}"] for i in range(n)}
        sets[language] = ParallelSet(
            language, tuple(f"{language}{i}" for i in range(n)), tuple(f"e{i}" for i in range(n))
        )

    class Echo:
        prompts = {}  # noqa: RUF012

        def encode(self, texts, **kwargs):
            return np.array([vectors[text] for text in texts])

    return measured(Echo(), sets, name=model, resamples=300)


@pytest.fixture(scope="module")
def results():
    before = result({"sw": 40, "te": 50, "vi": 80}, "starter")
    after = result({"sw": 75, "te": 51, "vi": 50}, "released")
    return before, after


@pytest.fixture
def run():
    return {
        "command": "metaphrase demo",
        "seed": 42,
        "seconds": 600.0,
        "steps": 40,
        "data": [{"path": "sw-en.train.tsv.gz", "pairs": 3000, "sha256": "ab12"}],
        "versions": {"torch": "2.13.0"},
        "log_history": [
            {"step": 10, "epoch": 0.1, "loss": 3.0, "tr": 2.0, "rtl": 10.0, "learning_rate": 1e-5},
            {"step": 20, "epoch": 0.2, "loss": 2.0, "tr": 1.5, "rtl": float("nan"), "learning_rate": 1e-5},
            {"step": 20, "epoch": 0.2, "eval_dev_mean_accuracy": 0.5, "eval_dev_sw_accuracy": 0.5},
            {"step": 40, "epoch": 0.4, "loss": 1.0, "tr": 0.5, "rtl": 7.0, "learning_rate": 0.0},
            {"step": 40, "epoch": 0.4, "eval_dev_mean_accuracy": 0.75, "eval_dev_sw_accuracy": 0.6},
            {"step": 40, "epoch": 0.4, "train_runtime": 600.0, "train_loss": 2.0},
        ],
    }


def write(tmp_path, results, run=None, **kwargs):
    before, after = results
    return write_report(
        tmp_path,
        title="Demo",
        before={"demo test": before},
        after={"demo test": after},
        run=run,
        usage=usage_lines("runs/demo"),
        **kwargs,
    )


def test_page_shows_every_number(tmp_path, results, run):
    path = write(tmp_path, results, run)
    assert path == tmp_path / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    for words in (
        "better: Swahili (sw); tie: Telugu (te); worse: Vietnamese (vi)",
        "56.7 → 58.7",
        "10.0 minutes",
        "sw-en.train.tsv.gz",
        "torch: 2.13.0",
    ):
        assert words in page.text
    before, after = results
    for side in (before, after):
        for measured in side["languages"].values():
            for key in ("source_to_target", "target_to_source", "mean"):
                low, high = measured[key]["interval"]
                assert f"{measured[key]['accuracy']:.1f} {low:.1f} – {high:.1f}" in page.text
    comparison = compare(before, after)
    for test in (*comparison["languages"].values(), comparison["pooled"]):
        low, high = test["interval"]
        assert f"{test['difference']:+.1f} {low:+.1f} to {high:+.1f}" in page.text
    assert page.tags.count("svg") == 2  # the accuracies and the learning curves
    titles = [
        f"{language}: {before['languages'][language]['mean']['accuracy']:.1f} before"
        for language in comparison["languages"]
    ]
    assert all(title in page.text for title in titles)


def test_the_recipe_is_shown_as_yaml_that_loads(tmp_path, results, run):
    recipe = Recipe.load("wacse")
    html = write(tmp_path, results, run | {"recipe": recipe.to_dict()}).read_text(encoding="utf-8")
    shown = re.search(r"<h2>Recipe</h2>\n<pre>(.*?)</pre>", html, re.DOTALL)[1]
    assert Recipe.from_dict(yaml.safe_load(unescape(shown))) == recipe


def test_curves_of_objectives_and_accuracy(tmp_path, results, run):
    page = Page(write(tmp_path, results, run).read_text(encoding="utf-8"))
    (label,) = [value for name, value in page.attributes if name == "aria-label" and "over training steps" in value]
    assert label == "loss, tr, rtl, eval_dev_mean_accuracy over training steps"
    assert "rtl, last 7" in page.text


def test_page_is_self_contained(tmp_path, results, run):
    html = write(tmp_path, results, run).read_text(encoding="utf-8")
    assert not re.search(r"https?://|//cdn|@import|url\(", html)
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "onerror"} & {name for name, _ in page.attributes}


def test_hostile_text_stays_text(tmp_path, run, fault):
    found = {"sw": 40, HOSTILE: 70}
    results = result(found, HOSTILE), result(found, HOSTILE)
    run |= {"command": HOSTILE, HOSTILE: {HOSTILE: [HOSTILE]}}
    run["log_history"] = [{"step": step, HOSTILE: 1.0} for step in (1, 2)]
    path = write_report(
        tmp_path,
        title=HOSTILE,
        before={HOSTILE: results[0]},
        after={HOSTILE: results[1]},
        run=run,
        usage=HOSTILE,
    )
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "onerror" not in {name for name, _ in page.attributes}
    assert "49" not in page.text.split("alert", 1)[1][:60]
    assert HOSTILE in page.text
    fault("H8", "names of models, data, languages and runs that contain HTML and templates", tried=1, survived=1)


def test_json_holds_everything(tmp_path, results, run):
    run["log_history"] = run["log_history"][:1]
    write(tmp_path, results, run)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    before, after = results
    assert report["before"] == {"demo test": before}
    assert report["after"] == {"demo test": after}
    assert report["comparisons"] == {"demo test": compare(before, after)}
    assert report["run"] == run
    assert report["usage"] == usage_lines("runs/demo")


def test_given_comparisons_are_used(tmp_path, results):
    comparison = compare(*results, resamples=500, seed=9)
    page = Page(write(tmp_path, results, comparisons={"demo test": comparison}).read_text(encoding="utf-8"))
    assert "500 resamples, seed 9" in page.text


def test_nothing_but_the_two_files_is_left(tmp_path, results):
    write(tmp_path, results)
    write(tmp_path, results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_data_sets_must_agree(tmp_path, results):
    before, after = results
    with pytest.raises(ValueError, match=r"\['udhr'\] and \['demo'\]"):
        write_report(tmp_path, title="x", before={"udhr": before}, after={"demo": after})


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = write_json(tmp_path / "new" / "result.json", {"a": 1})

    class Broken:
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(RuntimeError):
        write_json(path, {"a": 2, "b": Broken()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_usage_is_in_the_language_of_the_run():
    assert "Pertsona orok du herritartasuna" in usage_lines("out", ["en", "eu"])
    assert "Kila mtu ana haki ya utaifa." in usage_lines("out", ["xx"])


def test_usage_is_eight_lines_that_run():
    lines = usage_lines('runs/"odd" path')
    assert len(lines.splitlines()) == 8
    compile(lines, "usage", "exec")
    assert "SentenceTransformer('runs/\"odd\" path')" in lines


def test_collapsed_embeddings_are_named_first(results, tmp_path):
    before, after = results
    after = after | {"facts": {"unrelated_cosine": 0.9991}}
    page = write_report(tmp_path, title="x", before={"udhr": before}, after={"udhr": after})
    text = page.read_text(encoding="utf-8")
    assert 0 < text.index("Training has collapsed the embeddings") < text.index("<section>")


def rendered(table, width=140):
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def test_table_of_one_result(results):
    before, _ = results
    low, high = before["languages"]["sw"]["source_to_target"]["interval"]
    text = rendered(render_table(before))
    assert "starter" in text
    assert f"40.0 [{low:.1f}–{high:.1f}]" in text
    assert "average" in text
    assert "verdict" not in text


def test_table_of_a_comparison(results):
    before, after = results
    text = rendered(render_table(after, before))
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "40.0 → 75.0" in rows["sw"]
    assert "+35.0" in rows["sw"]
    assert "better" in rows["sw"]
    assert "tie" in rows["te"]
    assert "worse" in rows["vi"]
    low, high = compare(before, after)["languages"]["sw"]["interval"]
    assert f"{low:+.1f}…{high:+.1f}" in text
    assert rendered(render_table(after, before, compare(before, after))) == text


def test_table_fits_a_narrow_console(results):
    before, after = results
    lines = rendered(render_table(after, before), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("40.0 → 75.0" in line and "+35.0" in line and "better" in line for line in lines)


def test_table_names_groups_and_no_markup():
    members = dict.fromkeys(TATOEBA_GROUPS["5"], 50)
    text = rendered(render_table(result(members, "[bold]model[/bold]", n=60)))
    assert "[bold]model[/bold]" in text
    assert "the 5" in text
    assert "the 4" in text
    assert "the 8" not in text
    text = rendered(render_table(result(members, n=60), result(members, n=60)))
    assert "the 5" in text


def test_a_wider_baseline_is_compared_where_both_have_the_language():
    text = rendered(render_table(result({"sw": 60}), result({"sw": 40, "te": 50})))
    assert "40.0 → 60.0" in text
    assert "te" not in text.split()


@pytest.fixture(scope="module")
def analysed(tmp_path_factory, results):
    """Page and JSON of a report with everything in it."""
    path = write(tmp_path_factory.mktemp("report"), results, analysis=analyses())
    return path.read_text(encoding="utf-8"), json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def test_words_of_a_map_have_tooltips(analysed):
    html, report = analysed
    tokens = report["analysis"]["tokens"]
    titles = re.findall(r"<title>([^<]*)</title>", html[html.index('aria-label="Maps of') :].split("</svg>")[0])
    words = [f"{word} ({language})" for word, language in zip(tokens["words"], tokens["language_of"], strict=True)]
    assert titles == words * 4


def test_numbers_stand_in_tables_too(analysed):
    html, report = analysed
    text, content = Page(html).text, report["analysis"]
    for side in ("before", "after"):
        assert f"{content['tokens'][side]['own_language']:.1f} %" in text
        assert f"{content['margins'][side]['overlap']:.1f} %" in text
        assert f"{content['margins'][side]['translation_median']:.3f}" in text
        cells = [value for row in content["alignments"][0][side]["cosine"] for value in row]
        assert " ".join(f"{100 * value:.0f}" for value in cells[:2]) in text
    for row in content["retention"]["udhr"]["languages"]:
        assert f"{row['difference']:+.1f} {row['interval'][0]:+.1f} to {row['interval'][1]:+.1f}" in text
    for kind in ("wrong", "fixed", "broken"):
        assert content["errors"]["counts"][kind] > 0
        for row in content["errors"][kind]:
            assert row["source"] in text
            shown = row["before" if kind == "fixed" else "after"]
            assert f"{shown['found']} cosine {shown['found_cosine']:.3f}; of the translation" in text


def test_links_are_framed(analysed):
    html, report = analysed
    links = sum(len(report["analysis"]["alignments"][0][side]["links"]) for side in ("before", "after"))
    assert html.count('class="linked"') == links > 0


def test_the_verdict_of_retention_is_stated(analysed):
    html, report = analysed
    one = report["analysis"]["retention"]["udhr"]
    assert one["verdict"] == "lost"
    assert "with a red line at -1 points; mean -3.00, lost" in html
    assert "lost accuracy: lost" in Page(html).text
    assert "Largest losses: German (de) -7.0 ( worse )" in Page(html).text


def test_pictures_have_names_for_those_who_do_not_see_them(analysed):
    html, _ = analysed
    for tag in re.findall(r"<svg[^>]*>", html):
        assert 'role="img" aria-label="' in tag or 'aria-hidden="true"' in tag
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        assert "<thead>" in table
    assert html.count("<table") == html.count('class="scroll" role="region" tabindex="0"')


def test_full_page_is_self_contained(analysed, fault):
    html, _ = analysed
    assert not re.search(r"https?://|//cdn|@import|url\(", html)
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    fault("H8", "report page that loads nothing external", tried=1, survived=1)


@pytest.mark.long
def test_hostile_sentences_stay_text(tmp_path, results, fault):
    html = write(tmp_path, results, analysis=analyses(word=HOSTILE)).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "img"} & set(page.tags)
    assert not {"onerror", "src"} & {name for name, _ in page.attributes}
    assert page.text.count(HOSTILE) > 20
    assert "{{ 7*7 }}" in page.text
    fault("H8", "sentences and words that contain HTML and templates", tried=1, survived=1)


def test_page_without_a_baseline(tmp_path, results):
    _, after = results
    path = write_report(
        tmp_path, title="Alone", before=None, after={"demo test": after}, analysis=analyses(baseline=False)
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 3  # accuracies, words, margins
    assert "no baseline" in page.text
    assert not re.search(r"\b(before|worse|verdict)\b", page.text)
    report = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["before"] is None
    assert report["comparisons"] == {}


@pytest.mark.slow
def test_chromium_renders_the_page(tmp_path, analysed):
    screenshots = load_screenshots()
    if screenshots.chromium() is None:
        pytest.skip("rendering the page requires Chromium, which is not a Python package")
    page = tmp_path / "report.html"
    page.write_text(analysed[0], encoding="utf-8")
    sizes = {}
    for dark in (False, True):
        picture = screenshots.shoot(page, tmp_path / f"{dark}.png", width=600, height=900, dark=dark)
        with Image.open(picture) as image:
            sizes[dark] = image.size, image.convert("L").getpixel((2, 2))
    assert sizes[False][0] == (600, 900)
    assert sizes[False][1] > 250
    assert sizes[True][1] < 40  # dark colours where they are preferred


@pytest.mark.slow
def test_a_phone_shows_the_page_without_scrolling_sideways(tmp_path, analysed):
    browser = load_screenshots().chromium()
    if browser is None:
        pytest.skip("measuring the page requires Chromium, which is not a Python package")
    measure = """<script>document.documentElement.style.width = "400px"; // a window has at least 500 pixels
        document.title = JSON.stringify([document.body.scrollWidth,
        ...[...document.querySelectorAll("svg, .scroll")].map(one => one.getBoundingClientRect().right),
        ...[...document.querySelectorAll(".scroll")].map(one => one.scrollWidth)])</script>"""
    page = tmp_path / "report.html"
    page.write_text(analysed[0] + measure, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", f"--user-data-dir={tmp_path}/x"]
    done = subprocess.run(
        [browser, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    widths = json.loads(re.search(r"<title>(\[.*?\])</title>", done.stdout)[1])
    assert len(widths) > 10
    assert max(widths) <= 400


def load_screenshots():
    spec = importlib.util.spec_from_file_location(
        "screenshots", Path(__file__).parents[2] / "scripts" / "screenshots.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
