"""``metaphrase adapt --corpus my.tsv --languages xx``: adapt an encoder to a few thousand pairs, without manual settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from shlex import quote

from rich.text import Text

from metaphrase.checkpoints.folders import checkpoint_folders
from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, is_quiet, notes
from metaphrase.cli.runs import comparison_tables
from metaphrase.cli.tables import findings_table, lines_without_pair
from metaphrase.io.counts import format_duration
from metaphrase.io.environment import prepare_process
from metaphrase.publishing.hub import push_command
from metaphrase.training.adaptation import Adaptation, AdaptationConfig

DESCRIPTION = "Adapt an encoder to your language: check the corpus, train, measure, and print a verdict."
EXAMPLES = [
    "metaphrase adapt --corpus my.tsv --languages sw",
    "metaphrase adapt --corpus my.tsv --languages sw --plan_only",
    "metaphrase adapt --model BAAI/bge-m3 --corpus my.tsv --languages wo --minutes 120 --anchor 30 --output_dir runs/wo",
]


def run(argv: Sequence[str]) -> int:
    """Check the data, plan, train and measure; print the verdict, or the plan alone."""
    (config,) = parse("metaphrase adapt", [AdaptationConfig], argv, description=DESCRIPTION, examples=EXAMPLES)
    prepare_process()
    adaptation = Adaptation(config, command=["metaphrase", "adapt", *argv], show_progress=not is_quiet())
    findings = adaptation.check()
    if unread := lines_without_pair(adaptation.read):
        notes().print(unread)
    if findings:
        notes().print(findings_table(findings))
    if config.plan_only:
        plan = adaptation.plan()
        emit(asdict(plan), *(plan.reasons if is_quiet() else ()))  # without --quiet, the log shows them
        return 0
    try:
        result = adaptation.execute()
    except (Exception, SystemExit, KeyboardInterrupt):
        if adaptation.run is not None:
            notes().print(hint(adaptation), soft_wrap=True)
        raise
    output = adaptation.output
    emit(
        result.to_dict(),
        *comparison_tables(result.run),
        Text("\n" + "\n".join(result.verdict), style="bold"),
        f"\nFinished in {format_duration(result.seconds)}. Release: {output}. Report: {output / 'report.html'}. "
        f"For a longer report: metaphrase report {quote(str(output))}. "
        f"To publish: {push_command(output, 'me/my-encoder')}",
    )
    return 0


def hint(adaptation: Adaptation) -> str:
    """How to continue after a failure."""
    if checkpoints := checkpoint_folders(adaptation.output):
        return f"Stopped. The same `metaphrase adapt` command resumes from {checkpoints[-1].name}."
    return "Stopped before the first checkpoint. The same `metaphrase adapt` command starts training again."
