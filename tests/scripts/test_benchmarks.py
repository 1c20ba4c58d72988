import json
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from metaphrase.io.environment import has_bfloat16_instructions

ROOT = Path(__file__).parents[2]
MODULES = (
    "costs",
    "measuring",
    "official",
    "settings",
    "vocabulary",
    "rows",
    "rates",
    "isolated",
    "engines",
    "commands",
)
MODULES += ("run",)


@pytest.fixture(scope="module")
def bench(load_script):
    """The benchmark's modules."""
    return SimpleNamespace(**{name: load_script(name) for name in MODULES})


def measured(bench, folder, *options):
    """Results of the benchmark on an encoder of two narrow layers."""
    threads = torch.get_num_threads()
    code = bench.run.main(["--shape", "tiny", "--rounds", "1", "--results", str(folder), *options])
    torch.set_num_threads(threads)
    assert code == 0
    return folder


@pytest.fixture(scope="module")
def all_results(bench, tmp_path_factory):
    """Results of every row; they take a minute."""
    return measured(bench, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def results(bench, tmp_path_factory):
    """Results of fast rows."""
    rows = "projected-rows,encode-vs-st,gradcache,shares,profile,commands"
    return measured(bench, tmp_path_factory.mktemp("results"), "--rows", rows)


def figures(folder, row):
    content = json.loads((folder / f"{row}.json").read_text())
    return {figure["what"]: figure for figure in content["figures"]}


@pytest.mark.slow
def test_every_row_gives_figures(bench, all_results):
    kept = {path.stem for path in all_results.glob("*.json")}
    assert bench.run.ROWS.keys() - kept <= {"compiled", "encode-bf16", "encode-vs-onnx", "encode-vs-openvino"}
    for row in kept:
        content = json.loads((all_results / f"{row}.json").read_text())
        assert content["statement"]
        assert content["facts"].keys() >= {"date", "device", "cpus", "threads", "torch", "texts"}
        assert all(np.isfinite(figure["value"]) for figure in content["figures"])
        assert all(all(s > 0 for s in rounds) for f in content["figures"] for rounds in f["seconds"].values())


@pytest.mark.slow
def test_quick_rows_leave_out_what_takes_longest(bench, all_results, tmp_path):
    rows = ("dap-vs-official", "tr-vs-mnrl", "demo-step", "flops")
    settings = ["--shape", "tiny", "--rounds", "1", "--results", str(tmp_path), "--quick"]
    assert bench.run.main(["--rows", ",".join(rows), *settings]) == 0
    for row in rows:
        quick, whole = figures(tmp_path, row), figures(all_results, row)
        assert quick
        assert quick.keys() < whole.keys()
    assert "(" not in (tmp_path / "flops.md").read_text().partition("| recipe |")[2]


def test_exactly_the_scored_targets_are_projected(results):
    assert {figure["value"] for figure in figures(results, "projected-rows").values()} == {0}


def test_outputs_of_bulk_encoding_are_the_same(results):
    assert figures(results, "encode-vs-st")["largest difference between embeddings of both"]["value"] < 1e-5


def test_steps_reach_a_share_of_the_rate_of_their_matrix_products(results):
    found = figures(results, "shares")
    rates = [
        figure["value"] for what, figure in found.items() if what.startswith("speed of a layer's matrix products")
    ]
    shares = {what: figure["value"] for what, figure in found.items() if figure["unit"] == "%"}
    precisions = 1 + has_bfloat16_instructions()
    assert len(rates) == 2 * precisions
    assert min(rates) > 0
    assert [what.split()[2:4] for what in shares] == [["a", "TR"], ["a", "DAP"], ["encoding", "12"]] * precisions
    assert all(0 < share < 100 for share in shares.values())


def test_a_profile_adds_up_to_a_step(bench, results):
    found = figures(results, "profile")
    precisions = ("float32", "bfloat16")[: 1 + has_bfloat16_instructions()]
    assert sum(figure["value"] for figure in found.values()) == pytest.approx(100 * len(precisions))
    assert found.keys() == {f"{kind}, {one}" for kind in (*bench.rates.KINDS, "other") for one in precisions}
    assert found["matrix products, float32"]["value"] > 0
    assert "| matrix products |" in (results / "profile.md").read_text()
    assert "matrix products |" not in (results / "table.md").read_text()


def test_durations_of_commands_are_read_from_their_results(bench, results, tmp_path, monkeypatch):
    files = [ROOT / "runs" / "demo" / "report.json", ROOT / "scripts" / "results" / "demo.json"]
    demo = json.loads(next(file for file in files if file.exists()).read_text())
    assert figures(results, "commands")["make demo"]["value"] == pytest.approx(demo["run"]["seconds"] / 60)
    monkeypatch.setattr(bench.commands, "ROOT", tmp_path)
    monkeypatch.setattr(bench.commands, "RESULTS", tmp_path)
    with pytest.raises(bench.measuring.Skipped):
        bench.commands.commands(None)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "test.xml").write_text('<testsuites><testsuite name="pytest" time="90.0"/></testsuites>')
    assert [(one.what, one.value) for one in bench.commands.commands(None)] == [("make test", 1.5)]


def test_rows_that_cannot_be_measured_are_skipped_with_a_reason(bench, tmp_path, capsys):
    assert bench.run.main(["--rows", "gpu-step", "--shape", "small", "--results", str(tmp_path)]) == 0
    assert "gpu-step: skipped, it needs a GPU" in capsys.readouterr().out
    assert not [*tmp_path.glob("*.json")]


def test_the_minutes_that_are_left_are_those_of_the_last_run(bench, tmp_path):
    assert bench.run.expected_minutes("nothing", tmp_path) == bench.run.MINUTES
    (tmp_path / "adamw.json").write_text('{"minutes": 7.5}')
    assert bench.run.expected_minutes("adamw", tmp_path) == 7.5


def test_micro_batches_hold_less(results):
    assert (
        figures(results, "gradcache")["activation memory of a DAP step, in micro-batches ÷ whole batch"]["value"] < 0.8
    )


@pytest.mark.slow
def test_operations_are_counted(bench, all_results):
    values = {what: figure["value"] for what, figure in figures(all_results, "flops").items()}
    shape = bench.settings.SHAPES["tiny"]
    encoder = bench.costs.Encoder(shape.layers, shape.hidden, shape.vocabulary)
    # Biases and norms are no matrix products; they are most of what such narrow layers have beyond the count.
    counted, modelled = values["TR, published"], bench.costs.step_flops(encoder, "tr", 32, 32) / 1e9
    assert 0.9 * modelled < counted <= modelled
    assert values["TR, ours, full-length batches"] == pytest.approx(values["TR, published"], rel=1e-3)
    assert values["TR, ours, Tatoeba-like lengths"] < 0.5 * values["TR, published"]
    for recipe in ("DAP", "TR + TLM"):
        assert values[f"{recipe}, ours, full-length batches"] < values[f"{recipe}, published"]


@pytest.mark.slow
def test_tables(all_results):
    table = (all_results / "table.md").read_text()
    assert "| time of a step, DAP ÷ TR | 2 × 32, V = 600 |" in table
    assert "1 thread of" in table
    assert "\nAll rows took " in table
    assert "published" not in table
    assert (all_results / "flops.md").read_text().count("\n| ") == 5


def test_a_run_goes_on_with_the_rows_that_are_missing(bench, results, capsys, monkeypatch):
    path = results / "projected-rows.json"
    before = path.read_text()
    arguments = ["--rows", "projected-rows", "--shape", "tiny", "--results", str(results)]
    assert bench.run.main(arguments) == 0
    assert "projected-rows: recent result found" in capsys.readouterr().out
    assert path.read_text() == before

    def failing(context):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(bench.run.ROWS, "projected-rows", failing)
    assert bench.run.main([*arguments, "--again"]) == 1
    assert path.read_text() == before
    with pytest.raises(ValueError, match=r"Unknown rows: nothing\. Available rows: projected-rows"):
        bench.run.main(["--rows", "nothing", "--results", str(results)])


def test_a_row_is_done_when_it_is_new_and_from_here(bench, results, tmp_path):
    options = SimpleNamespace(again=False, max_age=24.0, device="cpu", threads=1, texts=None)
    content = json.loads((results / "projected-rows.json").read_text())
    path = tmp_path / "row.json"

    def is_done(**changes):
        path.write_text(json.dumps({**content, **changes}))
        return bench.run.is_done(path, options)

    assert is_done()
    assert not is_done(finished=content["finished"] - 25 * 3600)
    assert not is_done(facts={**content["facts"], "device": "another"})
    assert not is_done(facts={**content["facts"], "texts": "a folder"})
    assert not is_done(figures=[{"verdict": "skipped: others used 50% of the machine"}])
    assert not bench.run.is_done(tmp_path / "none.json", options)


def test_results_with_other_settings_are_kept_apart(bench):
    def folder(**settings):
        return bench.run.results_folder("cpu", bench.run.Options(**settings))

    assert folder(rows="adamw", again=True) == bench.run.RESULTS / "cpu"
    others = [{"quick": True}, {"shape": "small"}, {"threads": 2}]
    folders = {folder(**settings) for settings in others}
    assert {path.name for path in folders} == {"cpu-quick", "cpu-small", "cpu-2-threads"}
    assert not any(path.is_relative_to(bench.run.RESULTS) for path in folders)


def test_verdicts(bench):
    make = bench.measuring.ratio
    rounds = {"a": [1.0, 1.1, 1.9], "b": [2.0, 2.1, 2.1], "loud": [2.0, 3.0, 4.0]}
    figure = make("a / b", rounds, "a", "b", ("<=", 0.5))
    assert figure.value == 0.5
    assert figure.spread == pytest.approx(0.1)
    assert figure.verdict(0.1) == "met"
    assert figure.verdict(0.3) == "skipped: other processes used 30% of the machine"
    assert make("b / a", rounds, "b", "a", ("<=", 1.9)).verdict(0) == "missed"
    assert make("b / a", rounds, "b", "a", (">=", 1.9)).verdict(0) == "met"
    assert make("a / loud", rounds, "a", "loud", (">=", 0)).verdict(0) == "skipped: rounds differ by 50%"
    assert make("a / b", rounds, "a", "b").verdict(1.0) == "reported"
    assert bench.measuring.Figure("rows", 0, ("==", 0)).verdict(0.9) == "met"
    assert bench.measuring.Figure("rows", 1, ("==", 0)).verdict(0.9) == "missed"


def test_variants_are_measured_in_turn(bench):
    order = []
    variants = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    assert bench.measuring.interleaved(variants, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert order == list("ababab")


def test_held_activations_are_those_of_autograd(bench):
    linear = torch.nn.Linear(10, 20)
    with bench.measuring.held_activations(linear) as held:
        states = torch.ones(3, 10).requires_grad_() * 1.5  # the factor is no tensor that is kept
        linear(states).exp().sum()
    assert held == [4 * (3 * 10 + 3 * 20)]


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is reset through /proc, which only Linux has"
)
def test_peak_memory_is_what_is_needed_at_a_time(bench):
    def peaks(size):
        def work():
            for _ in range(3):  # new pages: an allocator might reuse memory that the process holds already
                with mmap.mmap(-1, size) as pages:
                    pages[:: mmap.PAGESIZE] = b"x" * -(-size // mmap.PAGESIZE)

        return [bench.measuring.peak_memory(work, "cpu") for _ in range(5)]

    # The kernel may reclaim pages of libraries in the meantime, which lowers a peak.
    assert 60e6 < max(peaks(64_000_000)) < 100e6
    assert min(peaks(1000)) < 30e6


def test_lengths_are_tatoebas(bench):
    drawn = bench.settings.lengths(192, seed=1)
    assert drawn.mean(axis=0) == pytest.approx([11.4, 10.8], abs=0.1)
    assert (bench.settings.lengths(5, 0, full=True) == 32).all()
    assert len(bench.settings.lengths(500, seed=1)) == 500
    assert bench.settings.lengths(16, seed=1).mean(axis=0) == pytest.approx([11.4, 10.8], abs=0.5)


def test_random_encoders_read_texts_of_the_lengths_that_are_asked_for(bench):
    shape = bench.settings.SHAPES["tiny"]
    model = bench.settings.random_encoder(shape, "cpu")
    assert model[0].auto_model.config.vocab_size == shape.vocabulary
    words = bench.settings.Words(shape.vocabulary)
    for full in (False, True):
        pairs = words.pairs(20, full=full, seed=3)
        lengths = [[len(model.tokenizer(pair[side])["input_ids"]) for side in ("source", "target")] for pair in pairs]
        assert lengths == bench.settings.lengths(20, 3, full=full).tolist()
        assert not any(model.tokenizer.unk_token_id in model.tokenizer(pair["source"])["input_ids"] for pair in pairs)


@pytest.mark.slow
def test_bundled_pairs_have_about_tatoebas_lengths(bench, tokenizer):
    texts = bench.settings.RealTexts(lambda rows: tokenizer([row[:200] for row in rows]), None)
    pairs = texts.pairs(50, seed=2)
    assert len({pair["source"] for pair in pairs}) == 50
    sides = [np.clip([len(tokenizer(p[side])["input_ids"]) for p in pairs], 0, 32) for side in ("source", "target")]
    assert np.abs(np.array(sides).T - bench.settings.lengths(50, 2)).mean() < 2


def test_pairs_of_a_folder(bench, tmp_path):
    rows = "".join(f"s{i}\tt{i}\n" for i in range(40))
    (tmp_path / "sw-en.tsv").write_text(f"source\ttarget\n{rows}")
    texts = bench.settings.RealTexts(None, str(tmp_path))
    assert all(pair["source"][1:] == pair["target"][1:] for pair in texts.pairs(40))
    full = texts.pairs(5, full=True)
    assert [len(pair["target"].split()) for pair in full] == [8] * 5


@pytest.fixture(scope="module")
def tiny(bench):
    torch.manual_seed(0)
    return bench.settings.random_encoder(bench.settings.SHAPES["tiny"], "cpu")


def test_the_official_ranking_is_ours(bench, tiny):
    loss = bench.rows.loss_of(tiny, bench.rows.TR).eval()
    batch = bench.settings.batch_of(loss, bench.settings.Words(600).pairs(6), "cpu")
    official = bench.official.OfficialStep(tiny[0].auto_model, "tr").eval()
    theirs = official(batch["source"]["input_ids"], batch["target"]["input_ids"])
    assert theirs.item() > 0.1
    torch.testing.assert_close(loss(batch)["tr"], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", ["dap", "tr-tlm"])
@pytest.mark.parametrize("rows", [None, 100])
def test_the_official_step_projects_every_position(bench, tiny, objective, rows):
    official = bench.official.OfficialStep(tiny[0].auto_model, objective, rows=rows)
    projected = []
    official.head.get_output_embeddings().register_forward_hook(lambda m, args, out: projected.append(out.shape))
    loss = bench.rows.loss_of(tiny, bench.rows.DAP)
    batch = bench.settings.batch_of(loss, bench.settings.Words(600).pairs(3), "cpu")
    value = official(batch["source"]["input_ids"], batch["target"]["input_ids"])
    value.backward()
    assert projected == [(3, 64, rows or 600)]
    table = official.head.get_output_embeddings().weight
    assert table.grad.abs().max() > 0
    assert table.data_ptr() != tiny[0].auto_model.get_input_embeddings().weight.data_ptr()  # of its own


def test_costs_are_those_of_the_papers_table(bench):
    """DAP's Table 6 (mBERT, 32 + 32 pieces): TR 11.0, and what its other cells fit."""
    costs = bench.costs
    mbert = costs.ENCODERS["mBERT"]
    assert costs.step_flops(mbert, "tr", 32, 32) / 1e9 == pytest.approx(11.0, abs=0.05)
    assert costs.step_flops(mbert, "dap", 32, 32) / 1e9 == pytest.approx(18.7, abs=0.1)
    base = costs.ENCODERS["XLM-R base"]
    ratio = costs.step_flops(base, "dap", 32, 32) / costs.step_flops(base, "tr", 32, 32)
    assert ratio == pytest.approx(2.3, abs=0.03)
    assert base.parameters == pytest.approx(277.5e6, rel=0.002)
    assert costs.ENCODERS["XLM-R large"].parameters == pytest.approx(558.8e6, rel=0.002)
    assert costs.step_seconds(base, "dap", 1024, costs.TATOEBA) < 0.12


def test_the_tables_of_costs(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.costs, "RESULTS", tmp_path)
    bench.costs.main()
    text = (tmp_path / "costs.md").read_text()
    assert text.count("| XLM-R base |") == 3
    assert "Not measured yet" in text
    of, given = "12 × 768, V = 250,002", {"recipe": "tr", "pairs": 16, "tokens": [182, 173]}
    figures = [
        {"of": of, "value": 2.2, "seconds": {"tr": [5.0, 4.0], "dap": [9.0]}, "given": {}},
        {"of": of, "value": 250.0, "seconds": {"tr": [5.0, 4.0]}, "given": given},
    ]
    facts = {"device": "a machine", "threads": 2}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "dap-vs-tr.json").write_text(json.dumps({"facts": facts, "figures": figures}))
    bench.costs.main()
    text = (tmp_path / "costs.md").read_text()
    assert text.count("| a machine, 2 threads |") == 1
    assert "| `tr` | 16 | 4 | 45 | 250 | 222 |" in text


@pytest.mark.slow
def test_tables_are_put_between_markers(load_script, all_results, tmp_path):
    script = load_script("update_tables")
    (tmp_path / "cpu").symlink_to(all_results)
    tables = script.benchmark_tables(tmp_path)
    assert tables.keys() == {"bench", "flops", "profile"}
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench -->\nold\n<!-- /bench -->\nb\n<!-- costs --><!-- /costs -->\n")
    script.fill(page, tables)
    text = page.read_text()
    assert text.startswith(f"a\n<!-- bench -->\n{tables['bench']}\n<!-- /bench -->\nb\n")
    assert text.endswith("<!-- costs --><!-- /costs -->\n")
