"""Hooks of the documentation site: links to files outside docs/, and reST roles in docstrings."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\]\((\.\.?/[^)#\s]+)(#[^)]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(<code>)~?")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point links to files outside ``docs/`` at the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        inside = path.startswith("docs/")
        return match[0] if inside else f"]({config.repo_url}/blob/main/{path}{match[2] or ''})"

    return _LINK.sub(target, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show roles such as ``:class:`Recipe``` as code."""
    return _ROLE.sub(r"\1", html)
