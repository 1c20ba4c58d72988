import pytest
import yaml

from metaphrase.objectives import OBJECTIVES
from metaphrase.recipe import Recipe, Term, list_recipes


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_packaged_recipes_can_be_built(recipe):
    for term in recipe.terms:
        OBJECTIVES[term.objective](max_length=recipe.max_length, **term.args)
    assert recipe.training
    assert bool(recipe.paper) == bool(recipe.paper_training) == (recipe.name != "metaphrase")  # our own
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


def test_dap_is_the_papers_sum():
    assert [(term.objective, term.weight) for term in Recipe.load("dap").terms] == [("tr", 1.0), ("rtl", 1.0)]
    assert Recipe.load("dap").max_length == 32
    assert Recipe.load("dap").paper_training["max_steps"] == 100_000


def test_the_release_weighs_rtl_as_its_eight_ranks_did():
    assert [(term.objective, term.weight) for term in Recipe.load("dap-release").terms] == [("tr", 1.0), ("rtl", 0.8)]


def test_a_recipe_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nterms:\n  - {objective: tr, weight: 2, args: {margin: 0.3}}\n")
    assert Recipe.load(path) == Recipe(name="mine", terms=(Term("tr", 2.0, {"margin": 0.3}),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("terms: [{objective: rtt}]", "known objectives are .*did you mean 'rtl'"),
        ("terms: [{objective: tr, args: {temprature: 1}}]", "'temprature' in the args of 'tr'.*'temperature'"),
        ("terms: [{objective: tr, wieght: 1}]", "'wieght' in a term.*'weight'"),
        ("terms: [{objective: tr, weight: -1}]", "should be a number from 0"),
        ("terms: [{objective: tr, weight: yes}]", "should be a number from 0"),
        ("terms: [{objective: tr}, {objective: tr}]", "names tr twice"),
        ("terms: []", "at least one objective"),
        ("trems: [{objective: tr}]", "'trems'.*did you mean 'terms'"),
        ("just a string", "should hold keys"),
        ("terms: [", "not valid YAML"),
        ("terms: [{objective: tr, args: 3}]", "keys and values"),
        ("terms: [tr]", "needs an 'objective'"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said(tmp_path, content, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Recipe.load(path)


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"known recipes are amber, .*did you mean 'dap'"):
        Recipe.load("dapp")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Recipe.load("nowhere.yaml")
