"""``metaphrase export MODEL --output_dir DIR``: a smaller encoder, measured before it is written."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, notes, show_progress
from metaphrase.io.environment import versions
from metaphrase.io.tables import titled_table
from metaphrase.postprocessing.exporting import ExportOptions, prepare_export, size_rows
from metaphrase.publishing.drafts import how_to_load
from metaphrase.publishing.report import render_table

DESCRIPTION = (
    "Reduce an encoder to some languages: remove pieces of its vocabulary (--languages, --corpus, --texts) and "
    "layers (--layers, --keep_layers). The result is compared with the original model per language, with a paired bootstrap, "
    "and the comparison is printed before anything is written."
)

EXAMPLES = (
    "metaphrase export runs/sw --languages sw --output_dir runs/sw-small",
    "metaphrase export runs/sw --corpus sw-en.tsv.gz --texts news.sw.gz --max_loss 1 --output_dir runs/sw-small",
    "metaphrase export runs/sw --layers 9 --data my-test-sets --output_dir runs/sw-fast",
)


def run(argv: Sequence[str]) -> int:
    """Run the command.

    The exit status is 1 if the loss is too large and nothing is written.
    """
    (options,) = parse("metaphrase export", [ExportOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    console = notes()
    with prepare_export(options, note=console.print, show_progress=show_progress()) as export:
        sizes = titled_table("", "", right=("before", "after"))
        for row in size_rows(export.sizes):
            sizes.add_row(*row)
        console.print(render_table(export.after, export.before, export.comparison), sizes)
        if export.lost:
            message = (
                f"Nothing was written: {', '.join(export.lost)} lost significantly more than {options.max_loss:g} points. "
                "Keep more of the model, or accept a larger loss with --max_loss."
            )
        else:
            export.publish(shlex.join(["metaphrase", "export", *argv]))
            message = f"Wrote {options.output_dir}: {'; '.join(export.changes)}. {how_to_load(options.output_dir)}"
    result = {
        "model": options.model,
        "output_dir": options.output_dir,
        "written": not export.lost,
        "changes": export.changes,
        "sizes": export.sizes,
        **export.comparison,
        "lost": export.lost,
        "options": asdict(options),
        "versions": versions(),
    }
    emit(result, message)
    return 1 if export.lost else 0
