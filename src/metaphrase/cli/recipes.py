"""``metaphrase recipes``: what can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml
from rich.console import Console
from rich.table import Table

from metaphrase.cli import parse
from metaphrase.recipe import Recipe, list_recipes


@dataclass
class RecipesOptions:
    """Options of ``metaphrase recipes``."""

    show: str | None = field(
        default=None, metadata={"help": "Print this recipe as YAML, to start one of your own from."}
    )


def run(argv: Sequence[str]) -> int:
    """List the recipes, or print one."""
    if argv and not argv[0].startswith("-"):
        argv = ["--show", *argv]
    (options,) = parse("metaphrase recipes", [RecipesOptions], argv, description="metaphrase recipes [NAME]")
    if options.show:
        print(yaml.safe_dump(Recipe.load(options.show).to_dict(), sort_keys=False, allow_unicode=True), end="")
        return 0
    table = Table(title="Recipes", show_lines=True)
    for column in ("recipe", "weight × objective", "granularity", "paper"):
        table.add_column(column, overflow="fold")
    for recipe in list_recipes():
        objectives = recipe.objectives().values()
        table.add_row(
            f"[bold]{recipe.name}[/bold]\n{recipe.description}",
            "\n".join(f"{t.weight:g} × {t.objective}" for t in recipe.terms),
            "\n".join(objective.granularity for objective in objectives),
            recipe.paper or "",
        )
    Console().print(table)
    return 0
