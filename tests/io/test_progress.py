import io

from rich.console import Console

from metaphrase.io.progress import progress_bars


def test_bars_are_drawn_on_request():
    for show in (True, False):
        out = io.StringIO()
        with progress_bars(show, Console(file=out, force_terminal=True, width=80)) as begin:
            for name in ("first", "second"):
                advance = begin(name, 2)
                advance(2)
        assert ("first" in out.getvalue(), "second" in out.getvalue()) == (show, show)
