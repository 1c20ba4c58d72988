"""A release is reproduced from its card, and differences are reported."""

import copy
import shutil

import pytest

from metaphrase.cli import main as metaphrase

RECORDED = {
    "recipe": "tr",
    "command": "metaphrase train --corpus x.tsv",
    "seed": 3,
    "data": [{"file": "x.tsv", "language": "de", "pairs": 2, "sha256": "ab"}],
    "hardware": "machine x86_64, cpus 2",
    "versions": {"metaphrase": "0.1.0", "torch": "2.13.0"},
    "weights": {"model.safetensors": "cd"},
}


def test_the_same_is_the_same(script):
    assert script.compare(RECORDED, copy.deepcopy(RECORDED)) == ([], True)


@pytest.mark.parametrize(
    ("change", "line", "same"),
    [
        ({"seed": 4}, "seed: 3 was recorded, but the new release has 4.", False),
        ({"data": []}, "data: ", False),
        (
            {"weights": {"model.safetensors": "ef"}},
            "model.safetensors: the SHA-256 cd was recorded, the new one is ef.",
            False,
        ),
        (
            {"versions": {"metaphrase": "0.1.0", "torch": "3"}},
            "version of torch: 2.13.0 was recorded, 3 is installed.",
            True,
        ),
        ({"hardware": "a GPU", "weights": {"model.safetensors": "ef"}}, "weights are not compared", True),
    ],
    ids=["seed", "data", "weights", "versions", "hardware"],
)
def test_differences_are_reported(script, change, line, same):
    lines, verdict = script.compare(RECORDED, RECORDED | change)
    assert len(lines) == 1
    assert line in lines[0]
    assert verdict == same


def test_the_weights_of_a_card_without_weights_are_reported(script):
    recorded = {key: value for key, value in RECORDED.items() if key != "weights"}
    assert script.compare(recorded, RECORDED) == (
        ["model.safetensors: the card records no SHA-256; the new one is cd."],
        True,
    )


def test_files_are_looked_up_by_name_and_content(script):
    rows = [{"file": "x.tsv", "sha256": "ab"}, {"file": "y.tsv", "sha256": "cd"}, {"file": "hf:acme/corpus"}]
    assert script.differing_files(rows, {"x.tsv": "ab", "y.tsv": "cd"}) == []
    assert script.differing_files(rows, {"x.tsv": "00"}) == ["x.tsv has the SHA-256 00, not ab.", "y.tsv is missing."]


def test_origin_and_licence_of_the_data_may_be_better_known(script):
    row = RECORDED["data"][0]
    made = RECORDED | {"data": [row | {"origin": "the ministry", "license": "cc0-1.0"}]}
    assert script.compare(RECORDED, made) == ([], True)
    assert script.compare(made, RECORDED) == ([], True)


def test_a_data_set_of_the_hub_that_was_read_at_its_commit_is_the_same(script):
    command = ["metaphrase", "train", "--corpus", "hf:acme/corpus:sw-en"]
    rows = [{"file": "hf:acme/corpus:sw-en", "language": "sw", "pairs": 3, "revision": "ab" * 20}]
    again = [rows[0] | {"file": script.at_commits(command, rows)[-1]}]
    assert again != rows
    assert script.compare(RECORDED | {"data": rows}, RECORDED | {"data": again}) == ([], True)
    other = [again[0] | {"revision": "cd" * 20}]
    lines, same = script.compare(RECORDED | {"data": rows}, RECORDED | {"data": other})
    assert (len(lines), same) == (2, False)


def test_files_in_another_order_are_other_data(script):
    rows = [RECORDED["data"][0] | {"file": name} for name in ("x.tsv", "y.tsv")]
    lines, same = script.compare(RECORDED | {"data": rows}, RECORDED | {"data": rows[::-1]})
    assert not same
    assert "different order" in lines[0]


@pytest.mark.slow
def test_a_run_is_reproduced(script, tiny_encoder_dir, bitext_path, tmp_path, capsys):
    corpus = shutil.copy(bitext_path, tmp_path / "bitext.tsv")
    command = ["--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--recipe", "tr", "--max_steps", "2"]
    command += ["--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu", "true"]
    assert metaphrase(["train", *command, "--output_dir", str(tmp_path / "first")]) == 0
    card = tmp_path / "first" / "README.md"
    assert script.main([str(card), "--output", str(tmp_path / "again")]) == 0
    assert "No differences." in capsys.readouterr().out
    (tmp_path / "bitext.tsv").write_text(bitext_path.read_text() + "noch ein\tone more\tde\ten\n")
    assert script.main([str(card), "--output", str(tmp_path / "third")]) == 1
    assert "Nothing was trained" in capsys.readouterr().out


def test_data_sets_of_the_hub_are_read_at_the_commit_of_the_card(script):
    rows = [{"file": "hf:acme/corpus:sw-en", "revision": "ab" * 20}, {"file": "x.tsv", "sha256": "cd"}]
    command = ["metaphrase", "train", "--corpus", "hf:acme/corpus:sw-en", "x.tsv", "--seed", "3"]
    assert script.at_commits(command, rows) == [*command[:3], f"hf:acme/corpus:sw-en#{'ab' * 20}", *command[4:]]


def test_the_card_of_a_release_of_each_language(script, tmp_path):
    for folder in ("checkpoint-20", "en", "sw", "te"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").touch()
        if not folder.startswith("checkpoint"):
            (tmp_path / folder / "reference.json").touch()
    assert script.made_card(tmp_path) == tmp_path / "sw" / "README.md"
    (tmp_path / "reference.json").touch()
    assert script.made_card(tmp_path) == tmp_path / "README.md"


def test_a_sum_of_runs_is_not_repeated(script, tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nmetaphrase:\n  runs: []\n---\n")
    with pytest.raises(SystemExit, match="describes several runs"):
        script.main([str(card)])


def test_a_merge_is_not_a_training(script, tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nmetaphrase:\n  command: metaphrase merge a b -o c\n---\n")
    with pytest.raises(
        SystemExit, match=r"release of `metaphrase merge`, run the command itself: metaphrase merge a b"
    ):
        script.main([str(card)])
