"""Hooks of the documentation site: generated parts, links to files outside docs/, and reST roles in docstrings."""

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\((\.\.?/[^)#\s]+)(#[^)]*)?\)")
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(<code>)~?")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Write the generated parts, and point links to files outside ``docs/`` at the repository."""
    if _GENERATED.search(markdown):
        parts = runpy.run_path(str(Path(__file__).with_name("generated.py")))["GENERATED"]
        markdown = _GENERATED.sub(lambda match: parts[match[1]](), markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        inside = path.startswith("docs/")
        return match[0] if inside else f"]({config.repo_url}/blob/main/{path}{match[2] or ''})"

    return _LINK.sub(target, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show roles such as ``:class:`Recipe``` as code."""
    return _ROLE.sub(r"\1", html)
