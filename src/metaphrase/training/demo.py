"""The configuration of the demo: the bundled bitext and test sets."""

from __future__ import annotations

from typing import Any

import yaml

from metaphrase.io.files import PACKAGED_DATA


def demo_settings(recipe: str | None = None) -> dict[str, Any]:
    """Settings of the demo, by the names of :class:`metaphrase.RunConfig`.

    ``merge`` and ``debias`` were chosen for the demo's own recipe; another recipe is released as it was trained.
    """
    settings = yaml.safe_load((PACKAGED_DATA / "demo.yaml").read_text(encoding="utf-8"))
    if recipe is not None and recipe != settings["recipe"]:
        settings = {name: value for name, value in settings.items() if name not in ("merge", "debias")}
        settings["recipe"] = recipe
    return settings | {
        "corpus": [str(PACKAGED_DATA / "demo")],
        "test": [str(PACKAGED_DATA / "demo"), str(PACKAGED_DATA / "udhr")],
        "retention": [str(PACKAGED_DATA / "udhr")],
        "output_dir": "runs/demo",
    }
