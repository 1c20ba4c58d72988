import csv
import gzip
import hashlib
import json
import logging

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation import diagnosis, retrieval
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import prepare
from metaphrase.evaluation.retrieval import (
    TATOEBA_GROUPS,
    RetrievalEvaluator,
    evaluate_retrieval,
    pooled_hits,
    retrieval_hits,
    unrelated_cosine,
)
from metaphrase.exceptions import UsageError


def measured(*args, **options):
    """The JSON form of a result."""
    return evaluate_retrieval(*args, **options).to_dict()


class EchoModel:
    """Embeds a text by the numbers it is given for it, and remembers what it was asked."""

    def __init__(self, vectors, prompts=None):
        self.vectors = vectors
        self.prompts = prompts or {}
        self.calls = []

    def encode(self, texts, **kwargs):
        self.calls.append((list(texts), kwargs))
        return np.array([self.vectors[text] for text in texts], dtype=np.float32)


def hits_loop(source, target):
    """First of the most similar candidates, one cosine at a time."""

    def cosine(a, b):
        return float(a @ b) / (float(a @ a) ** 0.5 * float(b @ b) ** 0.5)

    hits = []
    for i, query in enumerate(source):
        similarities = [cosine(query, candidate) for candidate in target]
        best = 0
        for j, similarity in enumerate(similarities):
            if similarity > similarities[best] + 1e-12:
                best = j
        hits.append(best == i)
    return hits


@pytest.fixture
def toy():
    """Two languages of four pairs; 'good' embeds all but one sentence beside its translation, 'bad' only half."""
    sets = {
        "sw": ParallelSet("sw", ("s0", "s1", "s2", "s3"), ("e0", "e1", "e2", "e3")),
        "te": ParallelSet("te", ("t0", "t1", "t2"), ("e0", "e1", "e2")),
    }
    eye = np.eye(5)
    good = {f"{side}{i}": eye[i] for side in "ste" for i in range(4)}
    good["s3"] = eye[2] + 0.1 * eye[4]
    bad = dict(good) | {"s0": eye[1], "s1": eye[0], "t0": eye[1], "t1": eye[0]}
    return sets, EchoModel(good), EchoModel(bad)


def write_pairs(path, pairs, header="source\ttarget"):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join([header, *("\t".join(pair) for pair in pairs)]) + "\n")


# --- Language sets ---


def test_group_sizes():
    assert {name: len(set(members)) for name, members in TATOEBA_GROUPS.items()} == {
        "36": 36,
        "28": 28,
        "14": 14,
        "8": 8,
        "5": 5,
        "4": 4,
    }


def test_groups_nest_as_published():
    groups = {name: set(members) for name, members in TATOEBA_GROUPS.items()}
    assert all(members <= groups["36"] for members in groups.values())
    assert groups["4"] < groups["5"] < groups["8"]
    assert groups["36"] - groups["28"] == {"jv", "ka", "kk", "ml", "sw", "ta", "te", "th"}
    assert groups["14"] - groups["28"] == {"sw", "th"}
    assert groups["5"] - groups["4"] == {"tl"}


# --- Reading test sets ---


def test_loads_the_files_of_a_split(tmp_path):
    write_pairs(tmp_path / "sw-en.tsv.gz", [("paka", "cat"), ("mbwa", "dog")])
    write_pairs(tmp_path / "te-en.tsv.gz", [("pilli", "cat")])
    write_pairs(tmp_path / "sw-en.test.tsv.gz", [("nyumba", "house", "x")], "source\ttarget\tprovenance")
    write_pairs(tmp_path / "zh-Hant-en.tsv.gz", [("貓", "cat")])
    (tmp_path / "NOTICE.md").write_text("notice")
    write_pairs(tmp_path / "pt_BR-en.tsv.gz", [("gato", "cat")])
    write_pairs(tmp_path / "zh_Hans-en.tsv.gz", [("猫", "cat")])
    assert list(load_parallel_folder(tmp_path)) == ["pt_BR", "sw", "te", "zh-Hant", "zh_Hans"]
    assert list(load_parallel_folder(tmp_path, ["te", "sw"])) == ["te", "sw"]
    sw = load_parallel_folder(tmp_path, ["sw"])["sw"]
    assert (sw.sources, sw.targets, sw.path) == (("paka", "mbwa"), ("cat", "dog"), tmp_path / "sw-en.tsv.gz")
    assert load_parallel_folder(tmp_path, split="test")["sw"].sources == ("nyumba",)


def test_missing_files_are_reported_with_alternatives(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such files"):
        load_parallel_folder(tmp_path)
    write_pairs(tmp_path / "sw-en.dev.tsv.gz", [("paka", "cat")])
    write_pairs(tmp_path / "te-en.dev.tsv.gz", [("pilli", "cat")])
    with pytest.raises(FileNotFoundError, match=r"Its splits are: dev\."):
        load_parallel_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no pairs for fr, de\. It has: sw, te"):
        load_parallel_folder(tmp_path, ["sw", "fr", "de"], split="dev")
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        load_parallel_folder(tmp_path / "nowhere")


def test_refuses_empty_and_doubled_files(tmp_path):
    write_pairs(tmp_path / "sw-en.tsv.gz", [])
    with pytest.raises(ValueError, match=r"sw-en.tsv.gz"):
        load_parallel_folder(tmp_path)
    (tmp_path / "sw-en.tsv").write_text("source\ttarget\npaka\tcat\n")
    with pytest.raises(ValueError, match=r"Both \S+/sw-en\.tsv and \S+/sw-en\.tsv\.gz"):
        load_parallel_folder(tmp_path)


def test_digest_is_that_of_the_lines():
    parallel = ParallelSet("sw", ("paka", "mbwa"), ("cat", "dog"))
    assert parallel.sha256 == hashlib.sha256(b"paka\tcat\nmbwa\tdog\n").hexdigest()
    assert parallel.sha256 != ParallelSet("sw", ("mbwa", "paka"), ("dog", "cat")).sha256


# --- Hits ---


@pytest.mark.parametrize(("n", "hidden"), [(1, 3), (2, 1), (37, 4)])
def test_hits_match_loop(n, hidden):
    rng = np.random.default_rng(n)
    source, target = rng.normal(size=(n, hidden)), rng.normal(size=(n, hidden))
    target += source
    forward, backward = retrieval_hits(source, target)
    assert forward.tolist() == hits_loop(source, target)
    assert backward.tolist() == hits_loop(target, source)


def test_identical_sides_are_all_found():
    embeddings = np.random.default_rng(0).normal(size=(301, 8))
    forward, backward = retrieval_hits(embeddings, embeddings)
    assert forward.all()
    assert backward.all()


def test_swapping_the_sides_swaps_the_directions():
    rng = np.random.default_rng(0)
    source = rng.normal(size=(200, 6))
    target = source + rng.normal(size=(200, 6))
    forward, backward = retrieval_hits(source, target)
    swapped_forward, swapped_backward = retrieval_hits(target, source)
    assert (forward == swapped_backward).all()
    assert (backward == swapped_forward).all()
    assert (forward != backward).any()


def test_chunks_do_not_change_hits(monkeypatch):
    rng = np.random.default_rng(0)
    source = rng.normal(size=(50, 6))
    target = source + 0.7 * rng.normal(size=(50, 6))
    whole = retrieval_hits(source, target)
    monkeypatch.setattr(retrieval, "_CHUNK", 120)
    for one, other in zip(whole, retrieval_hits(source, target), strict=True):
        assert (one == other).all()


def test_scale_does_not_matter_and_zero_is_no_error():
    rng = np.random.default_rng(0)
    source = rng.normal(size=(20, 4))
    target = source + 0.5 * rng.normal(size=(20, 4))
    scaled = target * rng.uniform(0.1, 9, size=(20, 1))
    assert (retrieval_hits(source, target)[0] == retrieval_hits(source, scaled)[0]).all()
    forward, _ = retrieval_hits(np.zeros((3, 4)), np.eye(4)[:3])
    assert forward.tolist() == [True, False, False]  # all similarities are 0: the first one counts


@pytest.mark.parametrize("n", [6, 205, 548])
def test_the_first_of_equal_candidates_counts(n):
    """Each sentence occurs twice. A plain matrix product rounds the two copies' similarities differently."""
    texts = [str(i) for i in range(n // 2)] + [str(i) for i in range(n - n // 2)]
    embeddings = np.random.default_rng(0).normal(size=(n, 48))[[int(text) for text in texts]]
    for margin_k in (None, 4):
        for hits in retrieval_hits(embeddings, embeddings, margin_k=margin_k):
            assert hits.tolist() == [text not in texts[:i] for i, text in enumerate(texts)]
    for hits in retrieval_hits(embeddings, embeddings, match_text=(texts, texts)):
        assert hits.all()


@pytest.mark.parametrize("n", [6, 205, 548])
def test_the_first_of_equal_texts_of_one_pool_counts(n):
    """Upper and lower case have the same embedding, and the translation of the first sentences is in lower case."""
    rng = np.random.default_rng(0)
    right_nh, other_nh = rng.normal(size=(2, n, 48))
    sources = tuple(f"{one}{at}" for one in ("Satz", "Anderes") for at in range(n))
    targets = tuple(f"{one}{at}" for one in ("text", "TEXT") for at in range(n))
    embeddings = np.concatenate([right_nh + 0.01 * other_nh, other_nh]), np.concatenate([right_nh, right_nh])
    forward, _ = pooled_hits({"de": ParallelSet("de", sources, targets)}, {"de": embeddings})["de"]
    assert forward[:n].all()


def test_text_equality_looks_at_the_side_that_is_searched():
    embeddings = np.eye(3)[[0, 1, 1]]
    forward, backward = retrieval_hits(embeddings, embeddings, match_text=(("a", "b", "b"), ("x", "y", "z")))
    assert forward.tolist() == [True, True, False]
    assert backward.tolist() == [True, True, True]


def test_bad_embeddings_are_refused():
    with pytest.raises(ValueError, match="2 sources and 3 targets"):
        retrieval_hits(np.ones((2, 2)), np.ones((3, 2)))
    broken = np.ones((3, 2))
    broken[1, 0] = np.nan
    with pytest.raises(ValueError, match="1 of 3 embeddings are NaN or infinite"):
        retrieval_hits(np.ones((3, 2)), broken)


# --- The result ---


def test_result_is_the_published_contract(toy):
    sets, good, _ = toy
    result = measured(good, sets, name="toy", resamples=500)
    assert json.loads(json.dumps(result)) == result
    assert (result["suite"], result["model"]) == ("retrieval", "toy")
    sw = result["languages"]["sw"]
    assert sw["n"] == 4
    assert sw["sha256"] == sets["sw"].sha256
    assert sw["source_to_target"]["accuracy"] == 75.0
    assert sw["source_to_target"]["hits"] == "1110"
    low, high = sw["source_to_target"]["interval"]
    assert 0 <= low < 75 < high <= 100
    assert sw["target_to_source"]["hits"] == "1110"
    assert result["languages"]["te"]["mean"] == {"accuracy": 100.0, "interval": [100.0, 100.0]}
    assert result["average"]["mean"]["accuracy"] == pytest.approx((75 + 100) / 2)
    assert result["average"]["n"] == 2
    assert result["groups"] == {}
    assert result["settings"]["prompt"] == ""
    assert result["settings"]["text_equality"] is False
    assert result["versions"].keys() >= {"metaphrase", "torch", "sentence-transformers", "python"}
    assert result["seconds"] >= 0


def test_a_sentence_of_several_languages_is_encoded_once(toy):
    sets, good, _ = toy
    measured(good, sets, resamples=10)
    ((texts, _),) = good.calls
    assert sorted(texts) == ["e0", "e1", "e2", "e3", "s0", "s1", "s2", "s3", "t0", "t1", "t2"]


def test_groups_are_means_of_their_languages_where_all_are_there():
    rng = np.random.default_rng(0)
    members = TATOEBA_GROUPS["8"]
    vectors = {f"e{i}": rng.normal(size=6) for i in range(20)}
    sets = {}
    for language in members:
        vectors |= {f"{language}{i}": vectors[f"e{i}"] + rng.normal(size=6) for i in range(20)}
        sets[language] = ParallelSet(
            language, tuple(f"{language}{i}" for i in range(20)), tuple(f"e{i}" for i in range(20))
        )
    result = measured(EchoModel(vectors), sets, resamples=50)
    assert list(result["groups"]) == ["8", "5", "4"]
    for key in ("source_to_target", "target_to_source", "mean"):
        by_hand = np.mean([result["languages"][language][key]["accuracy"] for language in TATOEBA_GROUPS["4"]])
        assert result["groups"]["4"][key]["accuracy"] == pytest.approx(by_hand)
    assert result["groups"]["8"] == result["average"]
    both = result["groups"]["5"]
    assert both["mean"]["accuracy"] == pytest.approx(
        (both["source_to_target"]["accuracy"] + both["target_to_source"]["accuracy"]) / 2
    )


def test_text_equality_counts_copies(toy):
    _, good, _ = toy
    doubled = {"sw": ParallelSet("sw", ("s0", "s1", "s2"), ("e0", "e1", "e1"))}
    strict = measured(good, doubled, resamples=10)
    lenient = measured(good, doubled, resamples=10, text_equality=True)
    assert strict["languages"]["sw"]["source_to_target"]["hits"] == "110"
    assert lenient["languages"]["sw"]["target_to_source"]["hits"] == "110"
    assert lenient["settings"]["text_equality"] is True
    copied = {"sw": ParallelSet("sw", ("s0", "s1", "s1"), ("e0", "e1", "e1"))}
    assert measured(good, copied, resamples=10)["average"]["mean"]["accuracy"] == pytest.approx(200 / 3)
    assert measured(good, copied, resamples=10, text_equality=True)["average"]["mean"]["accuracy"] == 100


def test_prompts(toy):
    sets, good, _ = toy
    e5 = EchoModel(good.vectors, prompts={"query": "query: ", "passage": "passage: "})
    assert resolve_prompt(e5, "auto") == "query: "
    assert resolve_prompt(e5, None) == ""
    assert resolve_prompt(e5, "passage: ") == "passage: "
    assert resolve_prompt(good, "auto") == ""
    for prompt in ("auto", None):
        result = measured(e5, sets, prompt=prompt, resamples=10)
        assert e5.calls[-1][1]["prompt"] == result["settings"]["prompt"] == resolve_prompt(e5, prompt)


def test_encode_can_be_replaced(toy):
    sets, good, bad = toy
    replaced = measured(bad, sets, resamples=10, encode=good.encode)
    assert bad.calls == []
    assert replaced["average"] == measured(good, sets, resamples=10)["average"]


# --- Comparing ---


def many_pairs(gain, n=120, seed=0):
    """A set and two models; the second finds ``gain`` more of the translations."""
    rng = np.random.default_rng(seed)
    parallel = ParallelSet("sw", tuple(f"s{i}" for i in range(n)), tuple(f"e{i}" for i in range(n)))
    vectors = {f"e{i}": vector for i, vector in enumerate(rng.normal(size=(n, 16)))}

    def model(found):
        return EchoModel(vectors | {f"s{i}": vectors[f"e{i if i < found else (i + 1) % n}"] for i in range(n)})

    return {"sw": parallel}, model(n // 2), model(n // 2 + gain)


@pytest.mark.parametrize(("gain", "word"), [(30, "better"), (1, "tie"), (-30, "worse")])
def test_verdicts(gain, word):
    sets, before, after = many_pairs(gain)
    old, new = (measured(model, sets, resamples=200) for model in (before, after))
    comparison = compare(old, new, resamples=2000)
    sw = comparison["languages"]["sw"]
    assert sw["verdict"] == comparison["pooled"]["verdict"] == word
    assert sw["difference"] == pytest.approx(sw["after"] - sw["before"])
    assert sw["before"] == pytest.approx(old["languages"]["sw"]["mean"]["accuracy"])
    assert sw["n"] == 120
    assert sw["interval"][0] <= sw["difference"] <= sw["interval"][1]
    assert json.loads(json.dumps(comparison)) == comparison


def test_verdicts_are_corrected_for_the_number_of_languages():
    sets, before, after = many_pairs(8)
    old, new = (measured(model, sets, resamples=200) for model in (before, after))
    alone = compare(old, new)
    assert alone["languages"]["sw"]["verdict"] == "better"
    for results in (old, new):
        results["languages"] |= {f"x{i}": old["languages"]["sw"] for i in range(40)}
    among = compare(old, new)
    assert among["languages"]["sw"]["p_value"] == alone["languages"]["sw"]["p_value"]
    assert among["languages"]["sw"]["p_adjusted"] == pytest.approx(min(1, 41 * alone["languages"]["sw"]["p_value"]))
    assert among["languages"]["sw"]["verdict"] == "tie"


def test_survives_json(toy):
    sets, good, bad = toy
    old, new = (measured(model, sets, resamples=50) for model in (bad, good))
    assert compare(json.loads(json.dumps(old)), new) == compare(old, new)


def test_other_data_is_refused(toy):
    sets, good, _ = toy
    result = measured(good, sets, resamples=10)
    shuffled = dict(sets, sw=ParallelSet("sw", sets["sw"].sources[::-1], sets["sw"].targets[::-1]))
    with pytest.raises(ValueError, match="'sw' are over different items"):
        compare(result, measured(good, shuffled, resamples=10))
    fewer = measured(good, {"te": sets["te"]}, resamples=10)
    with pytest.raises(ValueError, match="lacks sw; it has te"):
        compare(fewer, result)
    assert list(compare(result, fewer)["languages"]) == ["te"]
    with pytest.raises(ValueError, match="differ in text_equality: False before, True after"):
        compare(result, measured(good, sets, resamples=10, text_equality=True))


# --- Protocols of a real model ---

SENTENCES = ["the dog sleeps", "der Hund trinkt Wasser", "die Katze", "the cat drinks milk and water"]


@pytest.fixture(params=["tiny_encoder", "tiny_xlmr"])
def encoder(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("layer", "state"), [(0, 0), (1, 1), (2, 2), (-1, 2), (-2, 1), (-3, 0)])
def test_a_layer_is_that_hidden_state(encoder, layer, state):
    features = encoder.tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = encoder[0].auto_model.eval()(**features, output_hidden_states=True).hidden_states[state]
    prepared = prepare(encoder, layer=layer, pooling="cls")
    np.testing.assert_allclose(prepared.encode(SENTENCES), hidden[:, 0].numpy(), atol=1e-6)


def test_prepare_leaves_the_model_as_it_is_and_shares_its_weights(tiny_encoder):
    before, names = tiny_encoder.encode(SENTENCES), tiny_encoder.state_dict().keys()
    prepared = prepare(tiny_encoder, pooling="mean", layer=1, max_length=4)
    assert np.abs(prepared.encode(SENTENCES) - before).max() > 1e-3
    assert len(tiny_encoder[0].auto_model.encoder.layer) == 2
    assert (tiny_encoder.max_seq_length, prepared.max_seq_length) == (32, 4)
    assert tiny_encoder.state_dict().keys() == names
    np.testing.assert_array_equal(tiny_encoder.encode(SENTENCES), before)
    table, shared = (model[0].auto_model.get_input_embeddings().weight for model in (tiny_encoder, prepared))
    assert table.data_ptr() == shared.data_ptr()
    assert prepare(tiny_encoder) is tiny_encoder


def test_max_length_cuts(tiny_encoder):
    ids = tiny_encoder.tokenizer("the cat")["input_ids"]
    assert tiny_encoder.tokenizer("the cat drinks milk")["input_ids"][: len(ids) - 1] == ids[:-1]
    cut = prepare(tiny_encoder, max_length=len(ids)).encode(["the cat drinks milk"])
    np.testing.assert_allclose(cut, tiny_encoder.encode(["the cat"]), atol=1e-6)


def test_prepare_explains_what_it_cannot_do(tiny_encoder):
    with pytest.raises(ValueError, match="Layer 3 was requested, but the encoder has layers 0 to 2"):
        prepare(tiny_encoder, layer=3)
    with pytest.raises(ValueError, match="first"):
        prepare(tiny_encoder, pooling="first")
    with pytest.raises(ValueError, match="no pooling module"):
        prepare(SentenceTransformer(modules=[tiny_encoder[0]], device="cpu"), pooling="cls")
    tiny_encoder[0].auto_model.config.model_type = "modernbert"
    with pytest.raises(ValueError, match="modernbert"):
        prepare(tiny_encoder, layer=1)


def test_real_model_settings_and_prompt(tiny_encoder):
    texts = ["der Hund", "die Katze", "the dog", "the cat"]
    sets = {"de": ParallelSet("de", tuple(texts[:2]), tuple(texts[2:]))}
    tiny_encoder.prompts = {"query": "milk "}
    tiny_encoder.default_prompt_name = "query"
    plain = measured(tiny_encoder, sets, resamples=10)
    assert plain["settings"] | {"prompt": "", "pooling": "cls", "layer": 2, "max_length": 32} == plain["settings"]
    other = measured(prepare(tiny_encoder, layer=1, pooling="mean"), sets, prompt="auto", resamples=10)
    assert other["settings"] | {"prompt": "milk ", "pooling": "mean", "layer": 1} == other["settings"]
    seen = []

    def encode(texts, **kwargs):
        seen.append(tiny_encoder.encode(texts, **kwargs))
        return seen[-1]

    for prompt in (None, "auto"):
        measured(tiny_encoder, sets, prompt=prompt, resamples=10, encode=encode)
    unprompted = tiny_encoder.encode(texts, prompt="")
    np.testing.assert_allclose(seen[0], unprompted, atol=1e-6)  # None overrules the model's own default
    np.testing.assert_allclose(seen[1], tiny_encoder.encode([f"milk {text}" for text in texts], prompt=""), atol=1e-6)
    assert np.abs(seen[1] - unprompted).max() > 1e-3


# --- The training loop's evaluator ---


def test_evaluator(tiny_encoder, tmp_path):
    sets = {
        "sw": ParallelSet("sw", ("the dog", "the cat"), ("the dog", "the cat")),
        "xx": ParallelSet("xx", ("the dog", "the dog"), ("the cat", "the cat")),
    }
    evaluator = RetrievalEvaluator(sets, name="dev")
    for step in (10, 20):
        metrics = evaluator(tiny_encoder, str(tmp_path / "eval"), epoch=0, steps=step)
    assert tuple(metrics) == evaluator.metrics
    source, target = tiny_encoder.encode(["the dog", "the cat"], normalize_embeddings=True)
    cosine = float(source @ target)
    alike = (4 * cosine + 4) / 8  # of the second set: of eight pairs of rows that are no translations, four are equal
    assert metrics.pop("dev_unrelated_cosine") == pytest.approx((cosine + alike) / 2, abs=1e-6)
    assert metrics == {
        "dev_mean_accuracy": 0.75,
        "dev_source_to_target_accuracy": 0.75,
        "dev_target_to_source_accuracy": 0.75,
        "dev_sw_accuracy": 1.0,
        "dev_xx_accuracy": 0.5,
    }
    assert evaluator.primary_metric == "dev_mean_accuracy"
    assert evaluator.greater_is_better
    assert tiny_encoder.model_card_data.eval_results_dict[evaluator] == metrics
    with (tmp_path / "eval" / "retrieval_evaluation_dev_results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows] == ["10", "20"]
    assert float(rows[0]["mean_accuracy"]) == 0.75


def test_the_log_of_an_evaluator_is_in_percent(tiny_encoder, caplog):
    sets = {"sw": ParallelSet("sw", ("the dog", "the cat"), ("the dog", "the cat"))}
    with caplog.at_level(logging.INFO):
        metrics = RetrievalEvaluator(sets, name="dev", write_csv=False)(tiny_encoder, steps=5)
    assert metrics["dev_mean_accuracy"] == 1.0
    assert "dev at step 5: mean_accuracy 100.0 %" in caplog.text


@pytest.mark.parametrize("sets", ["my-test-sets", {}])
def test_evaluator_of_no_language_is_refused(sets):
    with pytest.raises(
        UsageError, match=rf"RetrievalEvaluator requires .* but got {sets!r}. Read .* load_parallel_folder"
    ):
        RetrievalEvaluator(sets)


def test_evaluator_writes_no_file_on_request(tiny_encoder, tmp_path):
    sets = {"sw": ParallelSet("sw", ("paka",), ("cat",))}
    RetrievalEvaluator(sets, write_csv=False)(tiny_encoder, str(tmp_path))
    RetrievalEvaluator(sets)(tiny_encoder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("n", "hidden"), [(2, 1), (3, 4), (17, 5)])
def test_unrelated_cosine_matches_loop(n, hidden):
    sides = np.random.default_rng(n).normal(size=(2, n, hidden))
    cosines = [
        one[i] @ other[j] / np.linalg.norm(one[i]) / np.linalg.norm(other[j])
        for one in sides
        for other in sides
        for i in range(n)
        for j in range(n)
        if i != j
    ]
    assert unrelated_cosine(*sides) == pytest.approx(np.mean(cosines), abs=1e-6)
    assert unrelated_cosine(sides[0][:1], sides[1][:1]) is None


def test_a_collapsed_encoder_triggers_a_warning(tiny_encoder, bitext, tmp_path, caplog, fault):
    sets = {"de": ParallelSet("de", tuple(row["source"] for row in bitext), tuple(row["target"] for row in bitext))}
    evaluator = RetrievalEvaluator(sets, name="dev")
    model = prepare(tiny_encoder, pooling="mean")
    torch.nn.init.normal_(model[0].auto_model.embeddings.word_embeddings.weight)
    sound = evaluator(model, str(tmp_path), steps=10)["dev_unrelated_cosine"]
    assert sound < retrieval.COLLAPSED_COSINE == diagnosis.COLLAPSED_COSINE
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    norm = model[0].auto_model.encoder.layer[-1].output.LayerNorm
    torch.nn.init.constant_(norm.weight, 1e-3)
    torch.nn.init.ones_(norm.bias)
    collapsed = evaluator(model, str(tmp_path), steps=20)["dev_unrelated_cosine"]
    assert collapsed > 0.9999
    assert evaluate_retrieval(model, sets, resamples=2).facts["unrelated_cosine"] == pytest.approx(collapsed)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("The embeddings have collapsed at step 20: unrelated sentences have")
    assert f"a mean cosine of {collapsed:.4f}, but at most 0.99 is expected" in warning
    assert "lower learning rate or larger batches" in warning
    with (tmp_path / "retrieval_evaluation_dev_results.csv").open() as file:
        assert [float(row["unrelated_cosine"]) for row in csv.DictReader(file)] == [sound, collapsed]
    fault("B2", "collapsed encoder, detected by the next evaluation", tried=1, survived=1)


@pytest.fixture
def pooled_sets():
    """Two languages that share an English sentence; a repeated pair, and one whose sides are the same text."""
    german = ParallelSet("de", ("Hund", "Katze", "Hund", "Haus", "OK"), ("dog", "cat", "dog", "house", "OK"))
    swahili = ParallelSet("sw", ("mbwa", "nyumba", "paka mdogo"), ("dog", "house", "kitten"))
    return {"de": german, "sw": swahili}


def pooled_hits_loop(sets, vectors):
    """For each sentence, the most similar other text of all sides, and whether any pairs with one target have both."""

    def cosine(a, b):
        return float(a @ b) / (float(a @ a) ** 0.5 * float(b @ b) ** 0.5)

    pairs = [pair for one in sets.values() for pair in zip(one.sources, one.targets, strict=True)]
    texts = sorted({text for pair in pairs for text in pair})

    def translations(text):
        targets = {target for source, target in pairs if text in (source, target)}
        return {other for pair in pairs if pair[1] in targets for other in pair} - {text}

    def hit(text):
        others = [other for other in texts if other != text]
        nearest = max(others, key=lambda other: cosine(vectors[text], vectors[other]))
        return nearest in translations(text) or not translations(text)

    return {
        language: ([hit(text) for text in one.sources], [hit(text) for text in one.targets])
        for language, one in sets.items()
    }


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("seed", range(5))
def test_one_pool_matches_loop(pooled_sets, monkeypatch, seed, block):
    texts = {text for one in pooled_sets.values() for text in (*one.sources, *one.targets)}
    rng = np.random.default_rng(seed)
    vectors = {text: rng.normal(size=3) for text in sorted(texts)}
    if block:
        monkeypatch.setattr(retrieval, "_CHUNK", block * len(texts))
    wanted = pooled_hits_loop(pooled_sets, vectors)
    result = measured(EchoModel(vectors), pooled_sets, one_pool=True)
    embeddings = {
        language: tuple(np.array([vectors[text] for text in side]) for side in (one.sources, one.targets))
        for language, one in pooled_sets.items()
    }
    found = pooled_hits(pooled_sets, embeddings)
    for language in pooled_sets:
        assert [side.tolist() for side in found[language]] == list(wanted[language])
        for side, direction in zip(wanted[language], ("source_to_target", "target_to_source"), strict=True):
            assert result["languages"][language][direction]["hits"] == "".join("01"[hit] for hit in side)
    assert wanted["de"][0][4]  # the only text of its pair
    assert {hit for both in wanted.values() for side in both for hit in side} == {False, True}
    assert result["settings"]["one_pool"]


def test_one_pool_finds_sentences_of_the_own_language():
    """Meaning on one axis, language on the others: the translation is nearest on its side, but not in one pool."""
    sets = {"de": ParallelSet("de", ("Hund", "Katze"), ("dog", "cat"))}
    plane = {"Hund": (1, 0.2), "Katze": (1, -0.2), "dog": (-0.1, 0.2), "cat": (-0.1, -0.2)}
    biased, unbiased = EchoModel(plane), EchoModel({text: (0.1, second) for text, (_, second) in plane.items()})
    scores = {
        (model is biased, one_pool): evaluate_retrieval(model, sets, one_pool=one_pool).average.score
        for model in (biased, unbiased)
        for one_pool in (False, True)
    }
    assert scores == {(True, False): 100, (True, True): 50, (False, False): 100, (False, True): 100}


def test_one_pool_and_retrieval_of_one_side_are_not_compared(pooled_sets):
    rng = np.random.default_rng(0)
    vectors = {text: rng.normal(size=4) for one in pooled_sets.values() for text in (*one.sources, *one.targets)}
    one, other = (evaluate_retrieval(EchoModel(vectors), pooled_sets, one_pool=pool) for pool in (True, False))
    with pytest.raises(ValueError, match="differ in one_pool"):
        compare(one, other)
    with pytest.raises(ValueError, match="ranks by cosine"):
        evaluate_retrieval(EchoModel(vectors), pooled_sets, one_pool=True, margin_k=2)
