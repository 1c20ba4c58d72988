"""Shifts of embeddings that are made up."""

import numpy as np
import pytest

from metaphrase.corpus.shifts import SHIFTS, Shift, find_shift


def by_embeddings(source_nh, target_nh):
    return lambda at_r, below_r: np.einsum("rh,rh->r", source_nh[at_r], target_nh[below_r])


def random(seed, n=600, hidden=32):
    embedding_nh = np.random.default_rng(seed).normal(size=(n, hidden))
    return embedding_nh / np.linalg.norm(embedding_nh, axis=1, keepdims=True)


@pytest.mark.parametrize("by", SHIFTS)
def test_a_shift_is_found_where_it_begins(by):
    source_nh, row_n = random(0), np.arange(600)
    target_nh = source_nh.copy()
    target_nh[300:] = np.roll(target_nh[300:], by, axis=0)
    first, end = (300, 600 - by) if by > 0 else (300 - by, 600)
    of = end - first
    assert find_shift(by_embeddings(source_nh, target_nh), row_n) == Shift(first, end, by, of, of)
    assert find_shift(by_embeddings(source_nh, source_nh), row_n) is None
    others = [other for other in SHIFTS if other != by]
    assert find_shift(by_embeddings(source_nh, target_nh), row_n, shifts=others) is None


def test_rows_that_are_no_neighbours_in_the_file_are_not_compared():
    source_nh = random(0, 60)
    target_nh, row_n = np.roll(source_nh, 1, axis=0), np.arange(60)
    assert find_shift(by_embeddings(source_nh, target_nh), row_n) == Shift(0, 59, 1, 59, 59)
    assert find_shift(by_embeddings(source_nh, target_nh), 5 * row_n) is None
    assert find_shift(by_embeddings(source_nh, target_nh), row_n + 100) == Shift(100, 159, 1, 59, 59)


@pytest.mark.parametrize("hubs", [False, True], ids=["random", "hubs"])
def test_a_model_that_knows_nothing_finds_nothing(hubs):
    """Also if some targets are close to every source, as embeddings of high dimension have it."""
    for seed in range(300):
        target_nh = random(seed, 60)
        if hubs:
            target_nh[::7] += 0.5
        assert find_shift(by_embeddings(random(seed + 1000, 60) + 0.1 * hubs, target_nh), np.arange(60)) is None


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_handful_of_pairs(n):
    source_nh = random(0, n)
    assert find_shift(by_embeddings(source_nh, np.roll(source_nh, 1, axis=0)), np.arange(n)) is None


def test_of_two_shifts_the_clearest_is_found():
    source_nh, row_n = random(0), np.arange(600)
    for longer, shorter in ((1, 2), (2, 1), (-1, -3), (-3, -1)):
        target_nh = source_nh.copy()
        target_nh[20:400] = np.roll(target_nh[20:400], longer, axis=0)
        target_nh[450:550] = np.roll(target_nh[450:550], shorter, axis=0)
        assert find_shift(by_embeddings(source_nh, target_nh), row_n).by == longer
