import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.mining import search as mining
from metaphrase.mining.copies import without_copies
from metaphrase.mining.margins import (
    Pairs,
    best_threshold,
    f1_scores,
    margin_score,
    mine,
    neighbour_scores,
    one_to_one,
    select_pairs,
    suggest_threshold,
)
from metaphrase.mining.options import Index, Margin, Retrieval
from metaphrase.mining.search import Approximate, Neighbours, Rows, nearest_neighbours, unit_rows
from metaphrase.mining.shards import encode_shards, load_rows

COSINES = np.array([[0.9, 0.5, 0.1], [0.4, 0.8, 0.3], [0.2, 0.6, 0.7]], dtype=np.float32)


def neighbours_of(cosines, k):
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return Neighbours(np.take_along_axis(cosines, order, axis=1), order.astype(np.int32))


def random_sides(n, m, hidden=16, seed=0):
    rng = np.random.default_rng(seed)
    source = rng.normal(size=(n, hidden))
    target = np.concatenate([source + 0.9 * rng.normal(size=(n, hidden)), rng.normal(size=(m, hidden))])[-m:]
    return source.astype(np.float32), target.astype(np.float32)


# --- Loops, written from Artetxe and Schwenk 2019 ---


def knn_loop(queries, pool, k):
    found = []
    for query in queries:
        cosines = [float(query @ row) / (np.linalg.norm(query) * np.linalg.norm(row)) for row in pool]
        best = sorted(range(len(pool)), key=lambda j: (-cosines[j], j))[:k]
        found.append([(cosines[j], j) for j in best])
    return found


def margin_loop(a, b, margin):
    return {"ratio": a / max(b, 1e-6), "distance": a - b, "absolute": a}[margin]


def knn_products(queries, pool, k):
    """`knn_loop` by products of blocks in double precision, for unit rows."""
    found = []
    for first in range(0, len(queries), 1000):
        cosines = queries[first : first + 1000] @ pool.T
        best = np.argpartition(-cosines, k, axis=1)[:, :k]
        values = np.take_along_axis(cosines, best, axis=1)
        found += [
            sorted(zip(*row, strict=True), key=lambda pair: (-pair[0], pair[1]))
            for row in zip(values.tolist(), best.tolist(), strict=True)
        ]
    return found


def mine_loop(source, target, k, margin, retrieval, knn=knn_loop):
    source, target = source.astype(np.float64), target.astype(np.float64)
    there, back = knn(source, target, k), knn(target, source, k)
    source_mean = [sum(c for c, _ in row) / len(row) for row in there]
    target_mean = [sum(c for c, _ in row) / len(row) for row in back]
    forward, backward = [], []
    for i, row in enumerate(there):
        scored = [(margin_loop(c, (source_mean[i] + target_mean[j]) / 2, margin), i, j) for c, j in row]
        forward.append(max(scored, key=lambda pair: pair[0]))
    for j, row in enumerate(back):
        scored = [(margin_loop(c, (source_mean[i] + target_mean[j]) / 2, margin), i, j) for c, i in row]
        backward.append(max(scored, key=lambda pair: pair[0]))
    if retrieval == "forward":
        pairs = forward
    elif retrieval == "backward":
        pairs = backward
    elif retrieval == "intersection":
        both = {(i, j) for _, i, j in backward}
        pairs = [pair for pair in forward if pair[1:] in both]
    else:
        pairs, used_i, used_j = [], set(), set()
        for score, i, j in sorted(forward + backward, key=lambda pair: -pair[0]):
            if i not in used_i and j not in used_j:
                used_i.add(i)
                used_j.add(j)
                pairs.append((score, i, j))
    return sorted(pairs, key=lambda pair: -pair[0])


def one_to_one_loop(source, target):
    taken, used_s, used_t = [], set(), set()
    for at, (s, t) in enumerate(zip(source, target, strict=True)):
        if s not in used_s and t not in used_t:
            used_s.add(s)
            used_t.add(t)
            taken.append(at)
    return taken


def threshold_loop(scores, correct, gold):
    """The best F1 over every cut between two different scores, by counting again each time."""
    best = 0.0
    for cut in scores:
        kept = [right for score, right in zip(scores, correct, strict=True) if score >= cut]
        best = max(best, 2 * sum(kept) / (len(kept) + gold))
    return best


# --- Search ---


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(("n", "m", "k"), [(1, 1, 4), (7, 30, 4), (40, 3, 1), (9, 2, 5), (2000, 1500, 5)])
def test_neighbours_are_those_of_a_loop(device, n, m, k, fault):
    source, target = (unit_rows(side) for side in random_sides(n, m))
    found = nearest_neighbours(source, target, k, device=device)
    cosines = source.astype(np.float64) @ target.T.astype(np.float64)
    order = np.argsort(-cosines, axis=1, kind="stable")[:, : min(k, m)]
    assert np.array_equal(found.row_qk, order)
    np.testing.assert_allclose(found.similarity_qk, np.take_along_axis(cosines, order, axis=1), atol=1e-6)
    assert found.similarity_qk.dtype == np.float32
    if k > m:
        fault("I1", "more neighbours requested than available", tried=1, survived=int(found.row_qk.shape == (n, m)))


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("size", [1, 3, 10, 64])
def test_blocks_give_what_one_array_gives(device, size):
    source, target = (unit_rows(side) for side in random_sides(20, 60))
    whole = nearest_neighbours(source, target, 4)
    blocks = Rows([target[at : at + size] for at in range(0, 60, size)])
    assert len(blocks) == 60
    found = nearest_neighbours(source, blocks, 4, device=device)
    assert np.array_equal(found.row_qk, whole.row_qk)
    np.testing.assert_allclose(found.similarity_qk, whole.similarity_qk, atol=1e-6)


def test_tiles_give_what_one_tile_gives(monkeypatch):
    source, target = (unit_rows(side) for side in random_sides(20, 60))
    whole = nearest_neighbours(source, target, 4, device="cpu")
    monkeypatch.setattr(mining, "_CPU_TILE", 7)
    monkeypatch.setattr(mining, "QUERIES", 6)
    assert np.array_equal(nearest_neighbours(source, target, 4, device="cpu").row_qk, whole.row_qk)
    assert np.array_equal(nearest_neighbours(source, target, 4).row_qk, whole.row_qk)


def test_without_faiss_search_is_torchs(monkeypatch):
    source, target = (unit_rows(side) for side in random_sides(20, 60))
    with_faiss = nearest_neighbours(source, target, 4)
    monkeypatch.setattr(mining, "faiss", None)
    assert np.array_equal(nearest_neighbours(source, target, 4).row_qk, with_faiss.row_qk)
    with pytest.raises(ImportError, match=r"\[mining\]"):
        mine(source, target, index="ivf")


def test_half_precision_rows_are_brought_to_length_one():
    rows = unit_rows(random_sides(50, 50)[0])
    half = Rows([rows[:30].astype(np.float16), rows[30:].astype(np.float16)])
    np.testing.assert_allclose(np.linalg.norm(half.block(1), axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(half.take(np.array([49, 0, 30])), rows[[49, 0, 30]], atol=2e-3)


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_approximate_search_is_ranked_exactly(kind, tmp_path, caplog):
    source, target = (unit_rows(side) for side in random_sides(300, 2000))
    pool = Rows([target[:1500], target[1500:]])
    added: list[int] = []
    index = Approximate.build(pool, kind, probes=8, advance=added.append)
    assert sum(added) == len(pool)
    index.save(tmp_path / "index.faiss")
    found = Approximate.load(tmp_path / "index.faiss").search(source, pool, 4)
    cosines = source @ target.T
    np.testing.assert_allclose(found.similarity_qk, np.take_along_axis(cosines, found.row_qk, axis=1), atol=1e-6)
    assert (np.diff(found.similarity_qk, axis=1) <= 0).all()
    share = mining.recall(found, nearest_neighbours(source, target, 4))
    assert 0.7 < share <= 1
    with caplog.at_level("INFO", "metaphrase.mining"):
        mine(source, target, index=kind, probes=8)
    assert f"The {kind} index finds" in caplog.text


def test_too_few_candidates_are_no_neighbours():
    there = Neighbours(np.array([[0.9, -np.inf], [-np.inf, -np.inf]], np.float32), np.array([[0, -1], [-1, -1]]))
    back = Neighbours(np.array([[0.9, 0.1]], np.float32), np.array([[0, 1]]))
    assert there.mean_q[0] == pytest.approx(0.9)
    pairs = select_pairs(there, back)
    assert (pairs.source_c.tolist(), pairs.target_c.tolist()) == ([0], [0])
    assert pairs.score_c[0] == pytest.approx(0.9 / ((0.9 + 0.5) / 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, t: (s[:0], t), "0 queries and 5 rows"),
        (lambda s, t: (s, t[:0]), "Both sides need sentences"),
        (lambda s, t: (s, t[:, :3]), "16 and 3 dimensions"),
        (lambda s, t: (s, t[0]), "shape"),
        (lambda s, t: (np.full_like(s, np.nan), t), "4 of 4 embeddings are NaN or infinite"),
    ],
)
def test_unusable_embeddings_are_refused(change, message, fault):
    with pytest.raises(ValueError, match=message):
        mine(*change(*random_sides(4, 5)))
    fault("I1", "embeddings that are empty, of different dimensions, NaN or infinite", tried=1, survived=1)


def test_unknown_options_are_refused():
    source, target = random_sides(4, 5)
    for option, known in (
        ("margin", get_args(Margin)),
        ("retrieval", get_args(Retrieval)),
        ("index", get_args(Index)),
    ):
        with pytest.raises(ValueError, match=f"'{option}' of mine must be one of {', '.join(map(repr, known))}"):
            mine(source, target, **{option: "best"})
    with pytest.raises(ValueError, match=r"'k' of mine must be a whole number from 1 .* but is 0"):
        mine(source, target, k=0)


# --- Scores and selection ---


def test_worked_example():
    """Three sources and targets, k = 2, computed by hand."""
    there, back = neighbours_of(COSINES, 2), neighbours_of(COSINES.T, 2)
    np.testing.assert_allclose(there.mean_q, [0.7, 0.6, 0.65], atol=1e-6)
    np.testing.assert_allclose(back.mean_q, [0.65, 0.7, 0.5], atol=1e-6)
    ratios = margin_score(COSINES, there.mean_q[:, None], back.mean_q[None, :])
    expected = [[1.333333, 0.714286, 0.166667], [0.64, 1.230769, 0.545455], [0.307692, 0.888889, 1.217391]]
    np.testing.assert_allclose(ratios, expected, atol=1e-6)
    halved = COSINES / (there.mean_q[:, None] + back.mean_q[None, :])  # DAP's equation 8
    np.testing.assert_allclose(halved, ratios / 2, rtol=1e-6)
    pairs = select_pairs(there, back)
    assert list(zip(pairs.source_c.tolist(), pairs.target_c.tolist(), strict=True)) == [(0, 0), (1, 1), (2, 2)]
    correct = [True, False, True]
    f1 = [best_threshold(pairs.score_c[:n], correct[:n], 2).f1 for n in (1, 3)]
    assert f1 == pytest.approx([2 / 3, 0.8])
    best = best_threshold(pairs.score_c, correct, 2)
    assert best.kept == 3
    assert best.threshold < pairs.score_c[2]
    assert best.threshold == pytest.approx(float(pairs.score_c[2]))


def test_a_mean_that_is_not_positive_does_not_turn_the_order_around():
    """Texts of few sentences have neighbours with negative cosines, and a text without known words a zero embedding."""
    similarity = np.array([0.2, 0.0, -0.3])
    for mean in (0.0, -0.1):
        score = margin_score(similarity, np.full(3, mean), np.full(3, mean))
        assert np.isfinite(score).all()
        assert (np.diff(score) < 0).all()
    zero = np.zeros((1, 4), dtype=np.float32)
    assert mine(zero, zero).score_c.tolist() == [0.0]


@pytest.mark.parametrize("margin", get_args(Margin))
@pytest.mark.parametrize("retrieval", get_args(Retrieval))
@pytest.mark.parametrize(("n", "m", "k"), [(1, 1, 4), (5, 9, 2), (60, 45, 4), (30, 80, 1)])
def test_pairs_are_those_of_a_loop(margin, retrieval, n, m, k):
    source, target = random_sides(n, m)
    found = mine(source, target, k=k, margin=margin, retrieval=retrieval)
    expected = mine_loop(source, target, k, margin, retrieval)
    assert set(zip(found.source_c.tolist(), found.target_c.tolist(), strict=True)) == {p[1:] for p in expected}
    assert len(found.score_c) == len(expected)
    np.testing.assert_allclose(found.score_c, [score for score, _, _ in expected], atol=1e-5)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40))
def test_one_to_one_is_the_loop(edges):
    source = np.array([s for s, _ in edges], dtype=np.int32)
    target = np.array([t for _, t in edges], dtype=np.int32)
    found = one_to_one(Pairs(np.arange(len(edges), dtype=float), source, target))
    assert found.score_c.tolist() == one_to_one_loop(source.tolist(), target.tolist())


def test_one_to_one_of_a_long_chain():
    """Each pair is in the way of the next: as many rounds as pairs."""
    n = 500
    source, target = (np.arange(n) + 1) // 2, np.arange(n) // 2
    found = one_to_one(Pairs(np.arange(n, 0, -1.0), source, target))
    assert found.score_c.tolist() == [n - at for at in one_to_one_loop(source.tolist(), target.tolist())]


@pytest.mark.parametrize("retrieval", ["max", "intersection"])
def test_no_sentence_is_used_twice(retrieval):
    pairs = mine(*random_sides(200, 300), retrieval=retrieval)
    assert len(set(pairs.source_c.tolist())) == len(set(pairs.target_c.tolist())) == len(pairs.score_c)
    assert len(pairs.score_c) > 50
    assert (np.diff(pairs.score_c) <= 0).all()


def test_scale_and_order_do_not_matter():
    source, target = random_sides(80, 90)
    pairs = mine(source, target)
    scaled = mine(7 * source, 0.2 * target)
    assert np.array_equal(scaled.source_c, pairs.source_c)
    np.testing.assert_allclose(scaled.score_c, pairs.score_c, atol=1e-5)
    order = np.random.default_rng(1).permutation(80)
    shuffled = mine(source[order], target)
    as_set = lambda p, rows: set(zip(rows.tolist(), p.target_c.tolist(), strict=True))  # noqa: E731
    assert as_set(shuffled, order[shuffled.source_c]) == as_set(pairs, pairs.source_c)


def test_swapping_the_sides_swaps_the_pairs():
    source, target = random_sides(40, 50)
    pairs, swapped = mine(source, target, retrieval="forward"), mine(target, source, retrieval="backward")
    assert np.array_equal(pairs.source_c, swapped.target_c)
    assert np.array_equal(pairs.target_c, swapped.source_c)


# --- Thresholds ---


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.7, 0.9, 1.3]), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 5),
)
def test_threshold_is_the_best_of_all(items, missed):
    scores, correct = [s for s, _ in items], [c for _, c in items]
    gold = sum(correct) + missed + (not any(correct))
    best = best_threshold(scores, correct, gold)
    assert best.f1 == pytest.approx(threshold_loop(scores, correct, gold))
    for keeps in (np.greater, np.greater_equal):
        kept = keeps(scores, best.threshold)
        assert kept.sum() == best.kept
        assert np.sum(np.array(correct)[kept]) == best.correct
    assert best.precision == (best.correct / best.kept if best.kept else 0)
    assert best.recall == best.correct / gold


def test_threshold_lies_between_scores():
    assert best_threshold([0.9, 0.5], [True, False], 1).threshold == pytest.approx(0.7)
    assert best_threshold([0.5, 0.9], [False, True], 1).threshold == pytest.approx(0.7)


def test_scores_without_a_number_between_them_are_not_separated():
    low = 0.5
    high = float(np.nextafter(low, 1))
    best = best_threshold([high, low, 0.1], [True, False, False], 1)
    assert best.kept == 2
    assert 0.1 < best.threshold < low


def test_nothing_right_keeps_nothing():
    best = best_threshold([0.9, 0.5], [False, False], 3)
    assert (best.kept, best.f1) == (0, 0)
    assert best.threshold > 0.9
    assert best_threshold([], [], 3).kept == 0
    with pytest.raises(ValueError, match="gold"):
        best_threshold([0.9], [True], 0)


@pytest.mark.parametrize("margin", ["ratio", "distance"])
def test_the_suggested_threshold_has_nearly_the_best_f1(margin):
    """Texts of 400 sentences of which 150 are translations, some of them found by chance only."""
    draw = np.random.default_rng(0).normal
    shared = draw(size=(150, 24))
    source, target = (np.concatenate([shared + 0.45 * draw(size=shared.shape), draw(size=(250, 24))]) for _ in "st")
    ways = [
        nearest_neighbours(unit_rows(one), unit_rows(other), 4) for one, other in ((source, target), (target, source))
    ]
    pairs = select_pairs(*ways, margin=margin)
    is_correct = (pairs.source_c == pairs.target_c) & (pairs.source_c < 150)
    suggestion, wrong = suggest_threshold(pairs, *ways, margin=margin)
    kept = pairs.score_c >= suggestion.threshold
    assert suggestion.kept == kept.sum()
    precision, _, f1 = f1_scores(int(is_correct[kept].sum()), suggestion.kept, int(is_correct.sum()))
    assert f1 > best_threshold(pairs.score_c, is_correct, int(is_correct.sum())).f1 - 0.03
    assert precision == pytest.approx(suggestion.precision, abs=0.05)
    assert f1 == pytest.approx(suggestion.f1, abs=0.05)
    assert np.median(wrong) == pytest.approx(np.median(pairs.score_c[~is_correct]), rel=0.05)


def test_no_threshold_is_suggested_without_a_second_neighbour():
    ways = neighbours_of(COSINES, 1), neighbours_of(COSINES.T, 1)
    assert suggest_threshold(select_pairs(*ways), *ways)[0] is None


# --- Cost ---

COST = """
import re, sys, time
import numpy as np
from metaphrase.mining import margins, search as mining
def unit(n):
    rows = np.random.default_rng(n).standard_normal((20_000, 384), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows
source, target = unit(0), unit(1)
source[:10_000] = mining.unit_rows(source[:10_000] + target[:10_000])
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
margins.mine(source[:500], target[:500])
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
start = time.process_time()
there, back = mining.nearest_neighbours(source, target, 4), mining.nearest_neighbours(target, source, 4)
searched = time.process_time()
pairs = margins.select_pairs(there, back)
done = time.process_time()
results = sum(array.nbytes for side in (there, back) for array in side)
extra = status("VmHWM") - before - results
np.savez(sys.argv[1], source=source, target=target, **pairs._asdict())
print((done - searched) / (done - start), extra / (source.nbytes + target.nbytes + results))
"""

MEMORY = """
import re, sys
import numpy as np
from pathlib import Path
from metaphrase.mining import margins
from metaphrase.mining.options import SearchOptions
from metaphrase.mining.resources import estimate_needs
from metaphrase.mining.shards import encode_shards, load_neighbours, search_shards
from metaphrase.mining.workflow import SIDES
kind, half, folder = sys.argv[1], sys.argv[2] == "half", sys.argv[3]
n, hidden = 12_000, 256
encoder = SearchOptions(half=half, index=kind, shard_size=4096)
rng = np.random.default_rng(0)
def draw(texts):
    return rng.standard_normal((len(texts), hidden), dtype=np.float32)
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
class Model:
    def get_embedding_dimension(self):
        return hidden
    def parameters(self):
        return []
margins.mine(draw(range(500)), draw(range(500)), index=kind)
rows = [encode_shards(range(n), Path(folder) / side, draw, size=4096, half=half) for side in SIDES]
for side in rows:
    for block in side.blocks:
        block.sum()  # its pages are then in the system's cache, and mapped
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
ways = []
for name, sides in zip(SIDES, (rows, rows[::-1])):
    search_shards(*sides, Path(folder) / name, encoder)
    ways.append(load_neighbours(Path(folder) / name, n, encoder, str)[0])
margins.suggest_threshold(margins.select_pairs(*ways), *ways)
print(status("VmHWM") - before, estimate_needs(n, n, Model(), encoder, 0)["memory"])
"""


def alone(script, *arguments):
    """The numbers that a script prints in a process of its own, on one thread."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return [float(number) for number in done.stdout.split()]


@pytest.mark.slow
def test_twenty_thousand_sentences(tmp_path):
    time_share, memory_share = alone(COST, tmp_path / "pairs.npz")
    assert time_share <= 0.03
    assert memory_share <= 0.10
    done = np.load(tmp_path / "pairs.npz")
    expected = mine_loop(done["source"], done["target"], 4, "ratio", "max", knn=knn_products)
    score_of = {pair[1:]: pair[0] for pair in expected}
    found = list(zip(done["source_c"].tolist(), done["target_c"].tolist(), strict=True))
    assert len(found) > 10_000
    assert set(found) == set(score_of)
    np.testing.assert_allclose(done["score_c"], [score_of[pair] for pair in found], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("index", "half"), [("exact", ""), ("exact", "half"), ("ivf", ""), ("hnsw", "half")])
def test_a_search_stays_within_the_memory_that_is_stated(index, half, tmp_path):
    peak, stated = alone(MEMORY, index, half, tmp_path)
    assert 0 < peak <= stated


def test_products_find_what_the_loop_finds():
    source, target = (unit_rows(side).astype(np.float64) for side in random_sides(30, 40))
    rows = [[row for _, row in found] for found in knn_products(source, target, 4)]
    assert rows == [[row for _, row in found] for found in knn_loop(source, target, 4)]


def test_the_library_names_its_extra():
    text = Path(mining.__file__).read_text()
    assert "install_command('mining')" in text


def test_more_neighbours_than_a_tile_has_rows(monkeypatch):
    source, target = (unit_rows(side) for side in random_sides(20, 60))
    whole = nearest_neighbours(source, target, 20, device="cpu")
    monkeypatch.setattr(mining, "_CPU_TILE", 7)
    assert np.array_equal(nearest_neighbours(source, target, 20, device="cpu").row_qk, whole.row_qk)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files")
def test_more_shards_than_files_may_be_open(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 200, hard)
    )
    try:
        texts = [str(at) for at in range(300)]
        made = encode_shards(texts, tmp_path, lambda texts: np.ones((len(texts), 2), np.float32), size=1)
        for rows in (made, load_rows(tmp_path, 300, 1)):
            assert rows.take(np.arange(300)).shape == (300, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("retrieval", ["forward", "backward", "intersection", "max"])
def test_a_neighbour_that_must_not_form_a_pair_forms_none(retrieval):
    """The nearest neighbour of the first source is marked as missing, as by `without_copies`; it counts in the mean."""
    there = Neighbours(np.array([[0.9, 0.5], [0.8, 0.1]], np.float32), np.array([[-1, 0], [0, -1]], np.int32))
    back = Neighbours(np.array([[0.8, 0.5], [0.9, 0.1]], np.float32), np.array([[1, 0], [-1, -1]], np.int32))
    scores = neighbour_scores(there, back)
    assert np.isneginf(scores).tolist() == [[True, False], [False, True]]
    assert scores[1, 0] == pytest.approx(0.8 / ((0.45 + 0.65) / 2))
    pairs = select_pairs(there, back, retrieval=retrieval)
    found = set(zip(pairs.source_c.tolist(), pairs.target_c.tolist(), strict=True))
    assert found == ({(1, 0), (0, 0)} if retrieval == "forward" else {(1, 0)})


def test_a_sentence_of_both_texts_is_paired_where_its_margin_is_larger():
    """ "ok" is translated as "okay" in one direction, and is untranslated in the other."""
    vectors = {"ok": [1, 0, 0], "okay": [0.9, 0.3, 0], "gut": [0, 1, 0.2], "good": [0, 1, 0], "OK": [1, 0, 0]}
    texts = ["ok", "gut"], ["OK", "good", "okay"]
    sides = [unit_rows(np.array([vectors[text] for text in side], np.float32)) for side in texts]
    for order in (slice(None), slice(None, None, -1)):
        one, other = sides[order]
        ways, shared = without_copies(
            (nearest_neighbours(one, other, 3), nearest_neighbours(other, one, 3)), texts[order]
        )
        pairs = select_pairs(*ways)
        found = zip(*(rows.tolist() for rows in pairs[1:][order]), strict=True)
        assert (shared, set(found)) == (1, {(0, 2), (1, 1)})
