"""Results that are stored in the repository are not replaced by less, and unfinished work is not mixed."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from metaphrase.corpus.words import Words
from metaphrase.evaluation.word_alignment import GoldPair, alignment_scores
from metaphrase.exceptions import UsageError


def covers(content):
    return {"seeds": set(content["seeds"]), "steps": content["steps"]}


def test_results_are_replaced_by_as_many_or_more(load_script, tmp_path):
    write, path = load_script("stored_results").write_results, tmp_path / "results" / "a.json"
    for seeds, steps in (([1, 2], 100), ([2, 1], 100), ([1, 2, 3], 200)):
        write(path, {"seeds": seeds, "steps": steps}, covers)
        assert json.loads(path.read_text())["seeds"] == seeds
    before = path.read_bytes()
    with pytest.raises(
        UsageError, match=r"a\.json has results of seeds 2, 3, which the new results lack\. To replace"
    ):
        write(path, {"seeds": [1, 4], "steps": 1000}, covers)
    with pytest.raises(UsageError, match=r"has results of 200 steps, the new results of 20\."):
        write(path, {"seeds": [1, 2, 3], "steps": 20}, covers)
    assert path.read_bytes() == before


def test_results_of_some_suites_do_not_replace_all(load_script, tmp_path, capsys, monkeypatch):
    tables = load_script("update_tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    stored = tmp_path / "suites.json"
    stored.write_text('{"scores": {"stsb": {"languages": 2}, "tatoeba": {"languages": 3}}}')
    result = {"scores": {}, "skipped": {}, "failed": [], "suite": "sts", "model": "m", "model_hash": "1"}
    part = {"stsb": {"seconds": 1, "suite": "sts", "hardware": {}}}
    result |= {"parts": part, "settings": {"seed": 0, "bf16": False}, "versions": {}, "comparisons": {}}
    result["baseline"] = {"parts": part, "model": "starter", "model_hash": "2", "scores": {}}
    (tmp_path / "results.json").write_text(json.dumps(result))
    before = stored.read_bytes()
    (tmp_path / "alone.json").write_text(json.dumps(result | {"baseline": None}))
    assert tables.main(["--suites", str(tmp_path / "alone.json")]) == 2
    assert "alone.json has no baseline to compare with" in capsys.readouterr().err
    assert tables.main(["--suites", str(tmp_path / "results.json")]) == 2
    assert "has results of scores stsb, tatoeba, which the new results lack" in capsys.readouterr().err
    assert stored.read_bytes() == before


def suite_results(name, kinds, **changes):
    """Results of one benchmark, with the error of each kind of distractor."""
    averages = {kind: {"n": 1, "score": score} for kind, score in kinds.items()}
    score = {
        **{"measure": "xsim++ error", "protocol": "", "lower_is_better": True, "languages": {"de": {}}},
        **{"average": averages.pop("all"), "groups": averages, "settings": {"prompt": ""}},
    }
    hardware = {"machine": "x", "cpus": 2, "threads": 2}
    one = {"scores": {name: score}, "parts": {name: {"seconds": 120, "suite": "xsim++", "hardware": hardware}}}
    one |= {"skipped": {}, "failed": [], "suite": "xsim++", "model": "m", "model_hash": "1", "comparisons": {}}
    one |= {"settings": {"seed": 0, "bf16": False}, "versions": {}}
    return one | {"baseline": one | {"model": "starter", "model_hash": "2"}} | changes


def test_results_on_parts_of_the_data_are_joined(load_script, tmp_path):
    tables = load_script("suite_tables")
    path, files = tmp_path / "suites.json", [tmp_path / "one.json", tmp_path / "two.json"]
    one = suite_results("udhr xsim++", {"all": 9}, suite="all", skipped={"sts": "no data", "sts22": "offline"})
    two = suite_results("tatoeba xsim++", {"all": 4}, suite="all", skipped={"xsim++": "no data", "sts22": "offline"})
    for file, content in zip(files, (one, two), strict=True):
        file.write_text(json.dumps(content))
    tables.keep_suites(files, path)
    content = json.loads(path.read_text())
    assert content["suites"] == ["all"]
    assert content["scores"].keys() == {"udhr xsim++", "tatoeba xsim++"}
    assert content["skipped"] == {"sts": "no data", "sts22": "offline"}  # xsim++ was measured
    files[1].write_text(json.dumps(two | {"settings": {"seed": 0, "bf16": True}}))
    tables.keep_suites(files, path)
    content = json.loads(path.read_text())
    assert tables.setting_words(content) == "bootstrap seed 0, in bfloat16, except udhr xsim++, in float32 (2 x cores)"


def test_results_of_the_same_encoders_are_added(load_script, tmp_path, monkeypatch):
    tables = load_script("suite_tables")
    path, results = tmp_path / "suites.json", tmp_path / "results.json"

    def keep(content):
        results.write_text(json.dumps(content))
        tables.keep_suites([results], path)
        return json.loads(path.read_text())

    keep(suite_results("udhr xsim++", {"all": 9}, suite="all"))
    keep(suite_results("tatoeba xsim++", {"all": 4}))
    content = keep(suite_results("tatoeba xsim++", {"all": 3, "without distractors": 1, "number": 2}))
    assert content["suites"] == ["all", "xsim++"]
    assert content["scores"]["udhr xsim++"]["after"]["average"]["score"] == 9
    table = tables.xsimpp_table(content)
    assert "| data | encoder | all | without | number |" in table
    assert "| tatoeba | release | 3.0 | 1.0 | 2.0 |" in table
    assert "udhr" not in table
    with pytest.raises(UsageError, match="which the new results lack"):
        keep(suite_results("tatoeba xsim++", {"all": 3}, model_hash="3"))
    with pytest.raises(ValueError, match="a small sample"):
        keep(suite_results("tatoeba xsim++", {"all": 3}, suite="quick"))
    fewer = suite_results("tatoeba xsim++", {"all": 3})
    fewer["scores"]["tatoeba xsim++"]["languages"] = {}
    with pytest.raises(UsageError, match=r"has results of 1 languages of tatoeba xsim\+\+, the new results of 0"):
        keep(fewer)


def test_durations_of_a_part_are_added(load_script, tmp_path):
    tables = load_script("suite_tables")
    results, path = tmp_path / "results.json", tmp_path / "durations.json"

    def keep(suite, model_hash):
        content = suite_results("a", {"all": 1}, suite="all", model_hash=model_hash)
        content["parts"]["a"]["suite"] = suite
        results.write_text(json.dumps(content))
        tables.keep_durations([results], path)
        (run,) = json.loads(path.read_text())
        return list(run["seconds"])

    assert keep("sts", "1") == ["sts"]
    assert keep("nli", "1") == ["sts", "nli"]
    with pytest.raises(UsageError, match="suites nli, which the new results lack"):
        keep("sts", "2")


def test_work_with_other_settings_is_not_resumed(load_script, tmp_path):
    check = load_script("stored_results").check_settings
    for _ in range(2):
        check(tmp_path / "out", {"pairs": 20, "languages": ("fr", "es")})
    with pytest.raises(UsageError, match=r"another value of pairs\. Choose another folder"):
        check(tmp_path / "out", {"pairs": 4000, "languages": ("fr", "es")})


@pytest.mark.parametrize(
    ("name", "stored", "argv", "message"),
    [
        ("ablations", {"seeds": [1, 2, 3], "steps": 10}, "dap-fig3 --steps 10 --seeds 1 --keep", "seeds 2, 3"),
        ("ablations", {"seeds": [1], "steps": 100}, "dap-fig3 --steps 10 --seeds 1 --keep", "100 steps"),
        (
            "forgetting",
            {"rows": [], "seeds": [1], "steps": 100, "batch_size": 64, "corpus": "the demo's bitext"},
            "--stsb x --mlqa x --seeds 1 2 --steps 200 --keep",
            "has results of steps 100, seeds [1]. To replace",
        ),
        ("forgetting", None, "--stsb x --mlqa x --only tau=9 --keep", "No recipe of the grid contains 'tau=9'"),
        (
            "precision",
            [{"seed": seed, "steps": 100} for seed in (1, 2, 3)],
            "--stsb x --mlqa x --seeds 1 2 --keep",
            "seeds 3, which",
        ),
        ("vector_precision", {"items": 50}, "starter x --guards x --items 9 --keep", "50 items, the new results of 9"),
    ],
)
def test_less_is_refused_before_anything_is_trained(
    load_script, tmp_path, monkeypatch, capsys, name, stored, argv, message
):
    program, folder = load_script(name), tmp_path / "results"
    folder.mkdir()
    kept = folder / "dap-fig3.json" if name == "ablations" else folder / "kept.json"
    if stored is not None:
        kept.write_text(json.dumps(stored))
    monkeypatch.setattr(program, "KEPT", folder if name == "ablations" else kept)
    monkeypatch.setattr(program, "prepare_process", lambda: pytest.fail("it started"))
    assert program.main(argv.split()) == 2
    assert message in capsys.readouterr().err


def test_a_trial_of_the_aligner_is_not_stored(load_script, tmp_path, monkeypatch, capsys):
    program = load_script("train_aligner")
    monkeypatch.setattr(program, "rows_of", lambda options, output: [{"options": vars(options)}])
    monkeypatch.setattr(program, "bitext_files", lambda options: [])
    output = ["--data", str(tmp_path), "--output", str(tmp_path / "out")]
    assert program.main([*output, "--steps", "2", "--keep"]) == 2
    assert "--steps is for trials" in capsys.readouterr().err
    assert program.main([*output, "--pairs", "20"]) == 0
    assert program.main([*output, "--pairs", "40"]) == 2
    assert "another value of pairs" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["pairs"] == 20


def test_the_interval_of_an_aligner_holds_its_error_and_follows_the_sentences(load_script):
    program, rng = load_script("word_alignment"), np.random.default_rng(0)
    words = Words.of("a b c d")

    def links():
        return frozenset((int(i), int(j)) for i, j in rng.integers(4, size=(rng.integers(2, 7), 2)))

    gold = [GoldPair(words, words, (sure := links()), sure | links()) for _ in range(60)]
    predicted = [links() for _ in gold]

    def error(places):
        return alignment_scores(
            [predicted[at] for at in places], [gold[at].sure for at in places], [gold[at].possible for at in places]
        ).aer

    low, high = program.error_interval(predicted, gold)
    assert low < error(range(60)) < high
    drawn = [error(rng.integers(60, size=60)) for _ in range(2000)]  # by hand, with replacement
    np.testing.assert_allclose((low, high), np.quantile(drawn, [0.025, 0.975]), atol=0.02)
    same = program.error_interval(predicted[:1] * 9, gold[:1] * 9)
    assert same[0] == pytest.approx(same[1])  # the same sentence again and again: nothing varies


def test_aligners_of_other_gold_links_are_not_mixed(load_script, tmp_path, capsys):
    program = load_script("word_alignment")
    (tmp_path / "test.eng").write_text("<s snum=1> the dog sleeps </s>\n")
    (tmp_path / "test.hin").write_text("<s snum=1> der Hund schläft </s>\n")
    (tmp_path / "test.eng.hin.wa").write_text("1 1 1 S\n1 2 2 S\n")
    path = tmp_path / "results.json"
    path.write_text('{"gold": {"pairs": 90}, "aligners": {"hmm": {}}}')
    words = ["--gold", str(tmp_path), "--output", str(path), "--aligners"]
    assert program.main([*words, "embedding"]) == 2
    assert "has results on other gold links" in capsys.readouterr().err
    assert program.main([*words, "embedding", "fast_align"]) == 2
    assert "fast_align requires a training corpus" in capsys.readouterr().err
    assert program.main([*words, "nothing"]) == 2
    assert "Unknown aligner 'nothing'. The aligners are embedding, span, fast_align" in capsys.readouterr().err


def test_a_page_shows_results_of_the_repository_only(load_script, tmp_path):
    program = load_script("evidence")
    assert program.parsed([]).page == program.ROOT / "docs" / "evidence.md"
    assert program.parsed(["--results", str(tmp_path)]).page is None
    page = tmp_path / "a.md"
    with pytest.raises(SystemExit):
        program.parsed(["--results", str(tmp_path), "--page", str(page)])
    page.write_text("<!-- evidence -->\n<!-- /evidence -->\n")
    assert program.parsed(["--results", str(tmp_path), "--page", str(page)]).page == page


def test_a_run_of_some_tests_does_not_shorten_the_table_of_faults(load_script, tmp_path, capsys):
    program, page, rows = load_script("reliability"), tmp_path / "page.md", tmp_path / "faults.jsonl"
    page.write_text(f"# Page\n{program.BEGIN}\n{program.END}\nend\n")

    def write(*faults):
        made = [{"number": "A1", "fault": one, "tried": 2, "survived": 2, "test": "t"} for one in faults]
        rows.write_text("".join(json.dumps(row) + "\n" for row in made))
        return program.main([str(rows), "--page", str(page)])

    assert write("kill", "stop") == 0
    whole = page.read_text()
    assert "| A1 | kill | 2 | 2 |\n| A1 | stop | 2 | 2 |\n| | **all** | **4** | **4** |" in whole
    assert write("kill") == 1
    assert page.read_text() == whole
    assert "Not tested: A1 | stop" in capsys.readouterr().out
    assert program.main([str(rows), "--page", str(page), "--removed"]) == 0
    assert "stop" not in page.read_text()
    assert page.read_text().startswith("# Page\n")


def test_questions_that_are_too_few_are_refused(load_script, tmp_path):
    program = load_script("dev_measures")
    question = {"id": "a", "question": "When?", "answers": [{"answer_start": 0}]}
    content = {"data": [{"paragraphs": [{"context": "Today.", "qas": [question]}]}]}
    (tmp_path / "dev-en.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(UsageError, match=r"has 0 questions in 4 languages or more, but 120 are required"):
        program.Answers.read(tmp_path, 120)


def test_exported_encoders_are_columns(load_script, tmp_path):
    tables = load_script("update_tables")
    sizes = {name: {"before": 4000, "after": 2000} for name in ("megabytes", "pieces", "layers", "parameters")}
    change = {"before": 80.0, "after": 81.0, "difference": 1.0, "interval": [-1, 2], "n": 96, "verdict": "tie"}
    one = {"changes": ["x"], "sizes": sizes, "languages": {"sw": change}, "settings": {}, "versions": {}}
    for name, layers in (("a.json", None), ("b.json", 6)):
        content = one | {"options": {"languages": ["sw", "en"], "layers": layers, "data": None}}
        (tmp_path / name).write_text(json.dumps(content))
    path = tmp_path / "export.json"
    tables.keep_exports([tmp_path / "a.json", tmp_path / "b.json"], path)
    table = tables.exports_table(json.loads(path.read_text())).splitlines()
    assert table[0] == "| | starter | `--languages sw en` | `--languages sw en --layers 6` |"
    assert table[3] == "| pieces | 4,000 | 2,000 | 2,000 |"
    assert table[-1].startswith("| retrieval, sw, 96 pairs | 80.0 | 81.0 (+1.0 [-1.0, +2.0], ")
    with pytest.raises(UsageError, match="exports"):
        tables.keep_exports([tmp_path / "a.json"], path)
