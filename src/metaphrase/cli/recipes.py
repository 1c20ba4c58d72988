"""``metaphrase recipes``: list the recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml
from rich.table import Table

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, is_json
from metaphrase.io.configuration import option
from metaphrase.objectives import OBJECTIVES
from metaphrase.training.recipe import Recipe, list_recipes

EXAMPLES = ("metaphrase recipes", "metaphrase recipes dap > mine.yaml", "metaphrase recipes --json")


@dataclass
class RecipesOptions:
    """Options of ``metaphrase recipes``."""

    show: str | None = option(
        None, "Print this recipe as YAML, as a start for your own. Can be passed as the first argument.", first=True
    )


def run(argv: Sequence[str]) -> int:
    """List the recipes, or print one."""
    (options,) = parse(
        "metaphrase recipes",
        [RecipesOptions],
        argv,
        description="List the recipes, or print one.",
        examples=EXAMPLES,
    )
    recipes = [Recipe.load(options.show)] if options.show else list_recipes()
    contents = [recipe.to_dict() for recipe in recipes]
    if is_json():
        emit(contents[0] if options.show else contents)
    elif options.show:
        emit([], yaml.safe_dump(contents[0], sort_keys=False, allow_unicode=True).rstrip("\n"))
    else:
        emit([], _table(recipes))
    return 0


def _table(recipes: Sequence[Recipe]) -> Table:
    table = Table(title="Recipes", show_lines=True)
    for column in ("recipe", "weight × objective", "granularity", "paper"):
        table.add_column(column, overflow="fold")
    for recipe in recipes:
        table.add_row(
            f"[bold]{recipe.name}[/bold]\n{recipe.description}",
            "\n".join(f"{term.weight:g} × {term.objective}" for term in recipe.terms),
            "\n".join(OBJECTIVES.granularity(term.objective) for term in recipe.terms),
            recipe.paper or "",
        )
    return table
