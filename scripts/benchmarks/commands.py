"""Row on the durations of the README's commands, from their stored results: nothing is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from measuring import Figure, Skipped
from rows import Context

from metaphrase.io.environment import cores, hardware
from metaphrase.io.files import read_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results"


def commands(context: Context) -> list[Figure]:
    """Minutes of the README's commands when their stored results were made."""
    runs = [("make demo", run) for run in _stored("demo")] + [
        (f"metaphrase adapt, {' and '.join(run['languages'])}", run) for run in _stored("adapt")
    ]
    figures = [Figure(name, run["seconds"] / 60, None, "min", of=cores(run["hardware"])) for name, run in runs]
    for run in _stored("durations"):
        what, minutes = f"metaphrase evaluate {run['model']} --suite {run['suite']}", sum(run["seconds"].values()) / 60
        figures.append(Figure(what, minutes, None, "min", of=cores(run["hardware"])))
    for name in ("test", "test-long"):
        if (report := ROOT / "build" / f"{name}.xml").exists():
            suites = ElementTree.parse(report).getroot().iter("testsuite")
            minutes = sum(float(one.get("time", 0)) for one in suites) / 60
            figures.append(Figure(f"make {name}", minutes, None, "min", of=cores(hardware())))
    if not figures:
        raise Skipped("no results are stored")
    return figures


def _stored(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    content = read_json(path) if path.exists() else []
    return content if isinstance(content, list) else [content["run"]]


ROWS = {"commands": commands}
