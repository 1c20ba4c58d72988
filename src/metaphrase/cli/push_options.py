"""Pushing the pairs that a command writes to the Hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from metaphrase.exceptions import HubError, UsageError
from metaphrase.io.configuration import option
from metaphrase.mining.options import EngineOptions


@dataclass
class PushPairsOptions:
    """The data set of the Hub that receives the pairs."""

    push_to_hub: str | None = option(
        None, "Also push the pairs to this data set of the Hub, as me/name; the output must be .parquet."
    )
    private: bool = option(False, "With --push_to_hub: make a new data set private, and push nothing to a public one.")
    license: str | None = option(
        None, "With --push_to_hub: licence of the pairs, as the Hub spells it, e.g. cc-by-4.0."
    )

    def check(self, output: str, engine: EngineOptions) -> None:
        """Refuse what cannot be pushed.

        Raises:
            UsageError: The output is not a Parquet file, or a Slurm job will write it later.
        """
        if self.push_to_hub is None:
            if self.private or self.license:
                raise UsageError(f"--{'private' if self.private else 'license'} requires --push_to_hub.")
            return
        if not output.endswith(".parquet"):
            raise UsageError(f"--push_to_hub requires an --output that ends in .parquet, but it is {output}.")
        if engine.executor == "slurm":
            from metaphrase.publishing.hub import push_command  # takes a second

            command = push_command(output, self.push_to_hub, private=self.private, license=self.license)
            raise UsageError(
                "--push_to_hub cannot push what a Slurm job writes later. Omit it, and push the pairs when they are written: "
                f"{command}."
            )

    def create(self, output: str, note: Callable[[str], Any]) -> None:
        """Create the data set, or check that it is writable, before the work. Print a note if the Hub is unavailable."""
        if self.push_to_hub is None:
            return
        from metaphrase.io.hub import is_transient  # takes a second
        from metaphrase.publishing.hub import make_repository, push_command

        command = push_command(output, self.push_to_hub, private=self.private, license=self.license)
        later = f"The pairs can also be pushed later: `{command}`."
        try:
            make_repository(self.push_to_hub, "dataset", private=self.private, later=later)
        except HubError as error:
            if not is_transient(error):
                raise
            note(f"{error} The work continues, and the push tries again.")

    def push(self, output: str, note: Callable[[str], Any]) -> dict[str, str]:
        """Push the pairs. Returns the address of the commit as ``pushed``.

        Raises:
            HubError: The push failed; the output is kept, and the message names the command that pushes it.
        """
        if self.push_to_hub is None:
            return {}
        from metaphrase.publishing.hub import push_corpus

        url = push_corpus(output, self.push_to_hub, license=self.license, private=self.private)
        note(f"Pushed {output} to {self.push_to_hub}: {url}")
        return {"pushed": url}
