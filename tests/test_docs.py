"""Files, functions and tests that the documentation names exist, and its tables are up to date."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

import metaphrase
from metaphrase.training.recipe import list_recipes

ROOT = Path(__file__).parents[1]
SOURCE = Path(metaphrase.__file__).parent
PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAPERS.splitlines()
    if line.startswith("| ") and not line.startswith("| paper")
]


def cells(column: int) -> list[str]:
    return [token for row in ROWS for token in re.findall(r"`([^`]+)`", row[column])]


def test_every_row_is_whole():
    assert len(ROWS) > 50
    assert all(len(row) == 7 for row in ROWS)


def test_files_and_functions_exist():
    path, missing = None, []
    for token in cells(3):
        name = re.fullmatch(
            r"(?P<file>(?:scripts|trainers)?/?[\w./-]*\.(?:py|yaml))?(?::(?P<name>\w+))?(?:\.\w+)?", token
        )
        if name is None or not (name["file"] or name["name"]):
            continue
        if name["file"]:
            path = next((p for p in (SOURCE / name["file"], ROOT / name["file"]) if p.exists()), None)
        defined = rf"^ *(def |class )?{name['name']}\b( = |[:(])"
        if path is None or (name["name"] and not re.search(defined, path.read_text(), re.MULTILINE)):
            missing.append(token)
    assert not missing


def test_tests_exist():
    paths = list((ROOT / "tests").rglob("*.py"))
    written, files = "\n".join(path.read_text(encoding="utf-8") for path in paths), {path.name for path in paths}
    defined = set(re.findall(r"\b(?:def|class) (\w+)", written))
    missing = []
    for token in cells(6):
        file, _, name = token.rpartition("::")
        file, name = (name, "") if name.endswith(".py") else (file, name)
        if file and Path(file).name not in files:
            missing.append(token)
        if name and name not in defined:
            missing.append(token)
    assert not missing


def test_every_packaged_recipe_has_a_row():
    named = set(re.findall(r"[\w-]+", " ".join(row[4] for row in ROWS)))
    assert not {recipe.name for recipe in list_recipes() if recipe.paper} - named


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The addresses of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "RELEASING", "SECURITY"))]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    missing = []
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{path}#{anchor}")
    assert missing == []


def test_the_architecture_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {"exceptions"}
    assert set(re.findall(r"^\| `metaphrase\.(\w+)` \|", page, re.MULTILINE)) == packages


def test_continuous_integration_runs_the_test_command_of_the_readme():
    (command,) = re.findall(r"^(make test\b.*?) +#", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()


def test_the_readme_is_a_front_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_verdict_in_the_readme_is_a_stored_result():
    verdict = re.search(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert verdict[1] in (ROOT / "docs" / "my-language.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("page", "sentence", "language"),
    [
        ("README.md", r"the command took (\d+) minutes", "eu"),
        ("docs/my-language.md", r"command took (\d+) minutes", "sw"),
    ],
)
def test_stated_durations_of_adapt_are_stored_results(page, sentence, language):
    runs = json.loads((ROOT / "scripts" / "results" / "adapt.json").read_text("utf-8"))
    (seconds,) = [run["seconds"] for run in runs if language in run["languages"]]
    assert re.findall(sentence, (ROOT / page).read_text("utf-8")) == [f"{seconds / 60:.0f}"]


@pytest.fixture
def update_tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("update_tables")


def test_pages_show_the_stored_results(update_tables):
    """Tables are those that ``scripts/update_tables.py`` writes."""
    tables = update_tables.stored_tables()
    shown = {}
    for page in PAGES:
        for name, content in re.findall(r"<!-- ([\w-]+) -->\n(.*?)<!-- /\1 -->", page.read_text("utf-8"), re.DOTALL):
            shown[name] = content.rstrip("\n")
    assert tables.keys() <= shown.keys()
    assert [name for name, content in tables.items() if shown[name] != content] == []


def test_durations_are_those_of_suites(update_tables, tmp_path):
    machine = {"cpus": 2, "machine": "x86_64", "threads": 2}
    parts = {
        name: {"suite": suite, "seconds": seconds, "hardware": machine}
        for name, suite, seconds in [("stsb", "sts", 90), ("a", "retrieval", 60.0), ("b", "retrieval", 30)]
    }
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"model": "starter", "model_hash": "1", "suite": "all", "parts": parts}))
    update_tables.keep_durations([results], tmp_path / "durations.json")
    lines = update_tables.durations_table(json.loads((tmp_path / "durations.json").read_text())).splitlines()
    assert lines[0] == "| suite | `evaluate starter --suite all` |"
    assert lines[2:5] == ["| sts | 1.5 |", "| retrieval | 1.5 |", "| **minutes** | **3** |"]
    assert lines[-1] == "One run each, on 2 x86_64 cores, 2 threads."


def test_stored_results_name_no_folder_of_the_machine():
    for path in (ROOT / "scripts").rglob("results/**/*.json"):
        assert re.findall(r'"/\w+/[^"]*"', path.read_text(encoding="utf-8")) == [], path
