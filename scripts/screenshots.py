"""Take screenshots of a report: ``python scripts/screenshots.py RUN/report/report.html docs/report``.

Writes one picture for each part that the documentation shows. Requires Chromium (``apt install chromium``). Pictures are
compressed if pngquant is installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

#: The sections that a picture shows: those whose beginning contains one of the words.
PARTS = {
    "summary": ("<h2>demo<", "retention"),
    "curves": ("learning curves",),
    "words": ("tokens",),
    "alignment": ("alignments",),
    "margins-and-errors": ("margins", "errors"),
}
#: Removes the space above the first section of a picture.
_NO_GAP = "<style>body > section:first-of-type > h2 { margin-top: 0; padding-top: 0; border-top: 0; }</style>"
_MARGIN = 24
#: Width of the window, and maximum height of a picture.
_WIDTH, _HEIGHT = 1100, 6000
_SECTION = re.compile(r"<section.*?</section>\n?", re.DOTALL)


def chromium() -> str | None:
    """Return the path of a Chromium browser, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def shoot(page: Path, picture: Path, *, width: int = _WIDTH, height: int = _HEIGHT, dark: bool = False) -> Path:
    """Render a page and write a screenshot.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    browser = chromium()
    if browser is None:
        raise FileNotFoundError("Chromium is not on PATH. Install it (apt install chromium).")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
    options += [f"--window-size={width},{height}"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *options, f"--user-data-dir={profile}", f"--screenshot={picture.resolve()}"]
        subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
    return picture


def part_of(html: str, words: tuple[str, ...], *, top: bool = False) -> str:
    """Keep only some sections of the page, and the part above the sections if ``top`` is set."""
    sections = [one for one in _SECTION.findall(html) if any(word in one[:200].lower() for word in words)]
    head, _, rest = html.partition("<body>")
    above = rest[: rest.index("<section")] if top else _NO_GAP
    return f"{head}<body>{above}{''.join(sections)}</body></html>"


def crop(picture: Path) -> None:
    """Remove the empty space above and below the content.

    Raises:
        ValueError: The content reaches the lower edge, so that it may be truncated.
    """
    from PIL import Image, ImageChops

    with Image.open(picture) as image:
        pixels = image.convert("RGB")
    empty = Image.new("RGB", pixels.size, pixels.getpixel((0, pixels.height - 1)))
    _, top, _, bottom = ImageChops.difference(pixels, empty).getbbox() or (0, 0, 0, pixels.height)
    if bottom + _MARGIN > pixels.height:
        raise ValueError(f"{picture} is truncated at {pixels.height} pixels. Increase _HEIGHT in this program.")
    pixels.crop((0, max(0, top - _MARGIN), pixels.width, bottom + _MARGIN)).save(picture, optimize=True)
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--ext", ".png", "64", str(picture)], check=True)


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.html, as written by `metaphrase report`")
    parser.add_argument("output", type=Path, help="folder to write the pictures to")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    html = arguments.report.read_text(encoding="utf-8")
    for name, words in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "part.html"
            page.write_text(part_of(html, words, top=name == "summary"), encoding="utf-8")
            picture = shoot(page, arguments.output / f"{name}.png")
        crop(picture)
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
