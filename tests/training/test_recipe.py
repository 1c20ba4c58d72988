import inspect
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.exceptions import ConfigError, MetaphraseError, RecipeError
from metaphrase.io.arguments import is_of_type
from metaphrase.io.configuration import read_yaml
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import parameters_of
from metaphrase.training.configuration import RunConfig
from metaphrase.training.corpora import read_bitext
from metaphrase.training.recipe import Recipe, Term, list_recipes


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


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("wacse", {"tr": 0.8, "awp": 0.1, "wtr": 0.1}),
        ("wacse-language", {"tr": 0.8, "awp": 0.1, "wtr": 0.1}),
        ("wacse-8", {"tr": 0.8, "awp": 0.02, "wtr": 0.18}),
        ("tr-xtr", {"tr": 2, "xtr": 1}),
    ],
)
def test_weights_are_the_papers(name, weights):
    assert {term.objective: term.weight for term in Recipe.load(name).terms} == weights


def test_arguments_are_the_papers():
    moco, tlm = Recipe.load("ppa").terms
    assert {
        "temperature": 0.05,
        "queue_size": 32000,
        "momentum": 0.999,
        "projection_size": 300,
    }.items() <= moco.args.items()
    assert tlm.args["mask_rate"] == 0.15
    (mexma,) = Recipe.load("mexma").terms
    assert mexma.args == {"mask_rate": 0.4, "layers": 6, "heads": 8, "koleo_weight": 0.01}


def test_the_release_weighs_rtl_as_its_eight_ranks_did():
    assert [(term.objective, term.weight) for term in Recipe.load("dap-release").terms] == [("tr", 1.0), ("rtl", 0.8)]


@pytest.mark.parametrize("name", ["mgc-hard", "mgc-soft"])
def test_mgc_samples_languages_with_the_exponent_of_xlmr(tiny_encoder, tmp_path, name):
    """In the training of the paper only."""
    sizes = {"de": 200, "sw": 20}
    for language, count in sizes.items():
        lines = ["source\ttarget", *(f"{language} {at}\ten {at}" for at in range(count))]
        (tmp_path / f"{language}-en.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def sampled(**options):
        config = RunConfig(recipe=name, corpus=[str(tmp_path)], output_dir=str(tmp_path), use_cpu=True, **options)
        return Counter(read_bitext(config, tiny_encoder, config.training_arguments()).dataset["source_lang"])

    assert sampled() == sizes
    powers = {language: count**0.3 for language, count in sizes.items()}
    expected = {language: 220 * power / sum(powers.values()) for language, power in powers.items()}
    assert sampled(paper_training=True) == pytest.approx(expected, abs=1)


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
        ("terms: [{objective: tr, weight: {start: 1}}]", "'weight' of 'tr' .* needs 'steps'"),
        ("terms: [{objective: tr, weight: {stop: 1}}]", "1:34: Unknown key 'stop' in 'weight' of 'tr'"),
        (
            "terms: [{objective: tr, weight: {steps: 0}}]",
            "1:34: 'steps' of 'weight' of 'tr' .* must be a whole number from 1 to 2,147,483,647, but is 0",
        ),
        (
            "terms: [{objective: tr, weight: {steps: 9, end: -1}}]",
            "1:44: 'end' of 'weight' of 'tr' .* must be a number from 0 to 1,000,000, but is -1",
        ),
        ("terms: [{objective: tr, weight: {steps: 9, end: 0}}]", "The 'weight' of every term of .* is 0"),
        (
            "terms: [{objective: tr, weight: -1}]",
            "1:25: 'weight' of 'tr' .* must be a number from 0 to 1,000,000, but is -1",
        ),
        ("terms: [{objective: tr, weight: yes}]", "must be a number from 0"),
        ("terms: [{objective: tr}, {objective: tr}]", "names tr twice"),
        ("terms: []", "at least one objective"),
        ("trems: [{objective: tr}]", "'trems'.*did you mean 'terms'"),
        ("just a string", "should have keys"),
        ("terms: [", "not valid YAML"),
        ("terms: [{objective: tr, args: 3}]", "keys and values"),
        ("terms: [tr]", "needs an 'objective'"),
        ("terms:\n  - objective: tr\n    wieght: 1", r"wrong.yaml:3:5: Unknown key 'wieght' .*did you mean 'weight'"),
        (
            "terms: [{objective: tr, args: {temperature: hot}}]",
            "1:32: 'temperature' .* must be a number from 0.0001 to 10,000 or 'auto', but is 'hot'",
        ),
        ("terms: [{objective: tr, args: {gather: 1}}]", "must be true or false, but is 1"),
        ("terms: [{objective: tr, args: {direction: up}}]", "must be one of .*'symmetric'.*but is 'up'"),
        ("terms: [{objective: tr, weight: .nan}]", "must be a number from 0"),
        ("terms: [{objective: [tr]}]", "known objectives are"),
        (
            "terms: [{objective: tr}]\nmax_length: long",
            "2:1: 'max_length' .* must be a whole number from 3 to .*, but is 'long'",
        ),
        (
            "terms: [{objective: tr}]\nmax_length: 0",
            "2:1: 'max_length' .* must be a whole number from 3 to .*, but is 0",
        ),
        ("terms: [{objective: tr}]\ntraining: {1: 2}", "2:12: 1 in 'training' .* is not a setting of recipes"),
        ("name: a\nname: b", "wrong.yaml:2:1: not valid YAML: duplicate key 'name'"),
        (
            "name: !!python/object/apply:os.getcwd []",
            "wrong.yaml:1:7: not valid YAML: could not determine a constructor",
        ),
        ("name: &a [*a]", "aliases that expand to more than"),
        ("[" * 3000, "nested too deeply"),
        ("name: !!bool maybe", "not valid YAML"),
        ("name: !!timestamp maybe", "not valid YAML"),
        ("? [a]\n: 1", "a key must be a scalar"),
        ("name: \0", "special characters"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said(tmp_path, content, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Recipe.load(path).check()


def test_a_file_without_a_name_does_not_tell_its_folder(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("terms: [{objective: tr}]")
    assert Recipe.load(path).name == "mine"


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"known recipes are amber, .*did you mean 'dap'"):
        Recipe.load("dapp")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Recipe.load("nowhere.yaml")


def test_a_billion_laughs_are_refused_before_they_are_written_out(tmp_path):
    path = tmp_path / "bomb.yaml"
    rows = [f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]" for i in range(1, 10)]
    path.write_text("\n".join(["k0: &k0 [ha, ha, ha]", *rows]))
    with pytest.raises(ConfigError, match=r"aliases that expand"):
        read_yaml(path)
    path.write_text("a: " + "x" * 1_000_001)
    with pytest.raises(ConfigError, match="maximum size"):
        read_yaml(path)


def test_aliases_and_merges_that_people_write_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: &b {x: 1, y: 5e-5}\nother: {<<: *b, x: 2}\nagain: *b\n")
    assert read_yaml(path) == {"base": {"x": 1, "y": 5e-5}, "other": {"x": 2, "y": 5e-5}, "again": {"x": 1, "y": 5e-5}}
    assert read_yaml(path)["other"].places["x"] == f"{path}:2:17"


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_the_table_agrees_with_the_classes(name):
    cls = OBJECTIVES[name]
    assert (name, OBJECTIVES.granularity(name)) == (cls.name, cls.granularity)
    parameters = parameters_of(cls)
    assert "max_length" not in parameters
    for key, parameter in inspect.signature(cls).parameters.items():
        assert parameter.default is not inspect.Parameter.empty
        assert key == "max_length" or is_of_type(parameter.default, parameters[key])


def test_recipes_are_read_without_torch():
    code = "import sys; from metaphrase import list_recipes; print(len(list_recipes()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(list_recipes())), "False"]


SCRAPS = st.sampled_from(
    [
        "name",
        "terms",
        "objective",
        "tr",
        "args",
        "weight",
        ":",
        "- ",
        "\n",
        "  ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "&a",
        "*a",
        "<<",
        "!!",
        "!!int",
        "? ",
        "|",
        ">",
        "'",
        '"',
        "#",
        "%",
        "---",
        "1e3",
        "\t",
        "é",
        "\ufeff",
    ]
)


@settings(max_examples=100)
@given(st.lists(SCRAPS | st.text(max_size=3), max_size=25))
def test_whatever_is_written_is_read_or_refused_in_our_words(tmp_path, scraps):
    path = tmp_path / "any.yaml"
    path.write_text("".join(scraps), encoding="utf-8", errors="replace")
    try:
        recipe = Recipe.load(path)
    except MetaphraseError:
        return
    assert recipe.terms


def test_recipes_built_in_python_are_checked():
    for terms in ((), ({"objective": "tr"},), ("tr",)):
        with pytest.raises(RecipeError, match=r"'terms' of recipe 'mine' must be one or several Terms.*from_dict"):
            Recipe("mine", terms)
    with pytest.raises(
        RecipeError, match=r"recipe 'mine' names objective 'trr'; known objectives are .*did you mean 'tr'"
    ):
        Recipe("mine", (Term("trr"),)).check()


def test_numbers_of_numpy_are_numbers():
    args = {"temperature": np.float32(0.5), "negatives": np.int64(2)}
    recipe = Recipe.from_dict({"name": "r", "terms": [{"objective": "tr", "weight": np.float32(2), "args": args}]})
    assert json.loads(json.dumps(recipe.to_dict()["terms"]))[0]["args"] == {"temperature": 0.5, "negatives": 2}
