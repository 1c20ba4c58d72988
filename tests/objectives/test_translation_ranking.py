import copy

import pytest
import torch

from metaphrase.encoders.starter import PROMPTS
from metaphrase.exceptions import UsageError
from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.functional import cosines, translation_ranking
from metaphrase.modeling.matryoshka import truncated
from tests.oracles import (
    assert_equal_gradients,
    both_sides_ranking_loop,
    guided_soft_ranking_loop,
    hard_negatives_ranking_loop,
    several_positives_loop,
)


@pytest.mark.parametrize("direction", ["source_to_target", "target_to_source", "symmetric"])
def test_it_is_the_pure_function(make_loss, encodings_of, bitext, direction):
    loss = make_loss("tr", direction=direction, margin=0.1, temperature=0.2)
    encodings = encodings_of(loss, bitext[:6])
    wanted = translation_ranking(
        encodings["source"].sentence_bh,
        encodings["target"].sentence_bh,
        direction=direction,
        margin=0.1,
        temperature=0.2,
    )
    torch.testing.assert_close(loss.objectives["tr"](encodings), wanted)


def test_identical_targets_can_leave_the_denominator(make_loss, encodings_of, bitext):
    twin = {**bitext[1], "target": bitext[0]["target"]}
    rows = [bitext[0], twin, bitext[2]]
    losses = {}
    for mask in (False, True):
        loss = make_loss("tr", mask_duplicates=mask)
        encodings = encodings_of(loss, rows)
        losses[mask] = loss.objectives["tr"](encodings)
    target = encodings["target"].sentence_bh
    torch.testing.assert_close(target[0], target[1])
    source = encodings["source"].sentence_bh
    pair = torch.tensor([[False, True, False], [True, False, False], [False, False, False]])
    torch.testing.assert_close(losses[True], translation_ranking(source, target, duplicate_bp=pair))
    assert losses[True] < losses[False]


def test_identical_sources_can_leave_the_denominator(make_loss, encodings_of, bitext):
    rows = [bitext[0], {**bitext[1], "source": bitext[0]["source"]}, bitext[2]]
    plain, masked = (
        loss.objectives["tr"](encodings_of(loss, rows))
        for loss in (make_loss("tr"), make_loss("tr", mask_duplicates=True))
    )
    assert masked < plain


def test_the_projection_trains_and_is_only_in_the_heads(make_loss, encodings_of, bitext):
    loss = make_loss("tr", projection="mlp")
    loss.objectives["tr"](encodings_of(loss, bitext[:5])).backward()
    grads = [parameter.grad.abs().max() for parameter in loss.heads.parameters()]
    assert len(grads) == 2
    assert min(grads) > 0
    assert not list(make_loss("tr").heads.parameters())


@pytest.fixture
def moved_encodings(batch_of):
    """The encodings of a loss whose encoder has moved, and those of the encoder before."""

    def build(loss, rows):
        original, batch = copy.deepcopy(loss.model), batch_of(loss, rows)
        with torch.no_grad():
            for parameter in loss.model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        return encode_views(loss.model, batch), encode_views(original, batch)

    return build


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("soft_weight", [1.0, 0.3])
@pytest.mark.parametrize("size", [32, 8])
def test_soft_targets_and_guidance_match_loop(make_loss, moved_encodings, bitext, guided, soft_weight, size):
    loss = make_loss(
        "tr",
        direction="symmetric",
        temperature=0.2,
        targets="soft",
        soft_weight=soft_weight,
        soft_temperature=0.1,
        guided=guided,
    )
    new, old = (truncated(encodings, size) for encodings in moved_encodings(loss, bitext[:6]))
    fast = loss.objectives["tr"](new)
    sides = [of[side].sentence_bh for of in (new, old) for side in ("source", "target")]
    slow = guided_soft_ranking_loop(
        *sides[:2],
        *(side.detach() for side in sides[2:]),
        temperature=0.2,
        soft_temperature=0.1,
        soft_weight=soft_weight,
        guided=guided,
    )
    assert_equal_gradients(fast, slow, loss.model)


@pytest.mark.parametrize("mask_duplicates", [False, True])
def test_the_own_side_matches_loop(make_loss, moved_encodings, bitext, mask_duplicates):
    rows = [*bitext[:5], {**bitext[5], "target": bitext[0]["target"]}]
    loss = make_loss("tr", direction="symmetric", temperature=0.2, own_side=True, mask_duplicates=mask_duplicates)
    new, _ = moved_encodings(loss, rows)
    sides = (new[side].sentence_bh for side in ("source", "target"))
    slow = both_sides_ranking_loop(*sides, [{0, 5}] if mask_duplicates else [], temperature=0.2)
    assert_equal_gradients(loss.objectives["tr"](new), slow, loss.model)


def test_guidance_excludes_sentences_of_the_own_side(make_loss, moved_encodings, bitext):
    losses = {}
    for guided in (False, True):
        loss = make_loss("tr", direction="symmetric", temperature=0.2, own_side=True, guided=guided)
        new, old = moved_encodings(loss, bitext[:6])
        losses[guided] = loss.objectives["tr"](new)
    source, target = (old[side].sentence_bh for side in ("source", "target"))
    own = cosines(source, target).diagonal()
    preferred = [(cosines(side, side) > own[:, None]).sum() - len(own) for side in (source, target)]
    assert max(preferred) > 0  # beside each sentence itself
    assert losses[True] < losses[False]


def test_the_own_side_has_no_part_in_soft_targets(make_loss):
    with pytest.raises(UsageError, match="'own_side', or use hard targets"):
        make_loss("tr", own_side=True, targets="soft")


def test_soft_targets_without_weight_are_hard(make_loss, moved_encodings, bitext):
    values = []
    for args in ({}, {"targets": "soft", "soft_weight": 0.0}):
        loss = make_loss("tr", **args)
        values.append(loss.objectives["tr"](moved_encodings(loss, bitext[:6])[0]))
    assert values[0] == values[1]


def test_cold_soft_targets_are_hard():
    """A sentence is most similar to itself."""
    source, target = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    soft = cosines(target, target) / 0.01
    torch.testing.assert_close(translation_ranking(source, target, soft_bp=soft), translation_ranking(source, target))


def test_soft_targets_leave_duplicates_out(make_loss, moved_encodings, bitext):
    rows = [bitext[0], {**bitext[1], "target": bitext[0]["target"]}, bitext[2]]
    loss = make_loss("tr", targets="soft", soft_temperature=0.05, mask_duplicates=True)
    value = loss.objectives["tr"](moved_encodings(loss, rows)[0])
    value.backward()
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in loss.model.parameters() if p.grad is not None)


def test_the_sides_of_soft_targets_differ(make_loss, moved_encodings, bitext):
    values = {}
    for sides in ("source", "target", "both"):
        loss = make_loss("tr", targets="soft", soft_sides=sides, soft_temperature=0.001)
        values[sides] = loss.objectives["tr"](moved_encodings(loss, bitext[:6])[0]).item()
    assert len(set(values.values())) == 3


def test_guidance_removes_what_the_original_prefers(make_loss, encodings_of, bitext):
    losses = {}
    for guided in (False, True):
        loss = make_loss("tr", guided=guided)
        encodings = encodings_of(loss, bitext[:6])
        losses[guided] = loss.objectives["tr"](encodings)
    source, target = (encodings[side].sentence_bh for side in ("source", "target"))
    similarity = torch.nn.functional.normalize(source) @ torch.nn.functional.normalize(target).T
    preferred = similarity > similarity.diagonal()[:, None]
    assert preferred.any()
    torch.testing.assert_close(losses[True], translation_ranking(source, target, duplicate_bp=preferred))
    assert losses[True] < losses[False]


@pytest.mark.parametrize(
    ("name", "prompts", "wanted"),
    [
        ("intfloat/multilingual-e5-small", {}, 0.01),
        ("models/e5-base-v2", {}, 0.01),
        ("somewhere", PROMPTS, 0.01),
        ("intfloat/e5-mistral-7b-instruct", {}, None),
        ("my/base5-large", {"query": "query: "}, None),
    ],
)
@pytest.mark.parametrize(("objective", "default"), [("tr", 0.05), ("sentence-contrast", 0.1)])
def test_the_temperature_is_the_encoders_own_where_it_is_known(
    tiny_encoder, make_loss, name, prompts, wanted, objective, default
):
    tiny_encoder[0].auto_model.config.name_or_path = name
    tiny_encoder.prompts = prompts
    loss = make_loss(objective, temperature="auto", model=tiny_encoder)
    assert loss.objectives[objective].temperature == (wanted or default)
    assert make_loss(objective, model=tiny_encoder).objectives[objective].temperature == default


@pytest.mark.parametrize("guided", [False, True])
def test_hard_negatives_match_loop(make_loss, moved_encodings, bitext, guided):
    """Some pairs have more negatives than are read, some none; one is the translation of another pair, one is a list."""
    texts = [row["target"] for row in bitext]
    negatives = [" ||| ".join([texts[9], texts[1], texts[10]]), "", [texts[11]], texts[8]]
    rows = [row | {"negatives": one} for row, one in zip(bitext, negatives, strict=False)]
    loss = make_loss("tr", direction="symmetric", temperature=0.2, negatives=2, guided=guided)
    new, old = moved_encodings(loss, rows)
    read = [texts[9], texts[1], texts[11], texts[8]]
    assert new["negatives-2"].features["real"].tolist() == [True] * 4
    excluded = [{n for n, text in enumerate(read) if text == row["target"]} for row in rows]
    assert excluded[1] == {1}
    sides = [new[name].sentence_bh for name in ("source", "target", "negatives-2")]
    if guided:
        source, target, wrong = (old[name].sentence_bh for name in ("source", "target", "negatives-2"))
        own = cosines(source, target).diagonal()
        for i, row in enumerate(cosines(source, wrong).tolist()):
            excluded[i] |= {n for n, cosine in enumerate(row) if cosine > own[i]}
    fast = loss.objectives["tr"](new)
    if guided:
        masks = [
            torch.cat(
                [
                    cosines(source, target) > own[:, None],
                    torch.tensor([[n in one for n in range(len(read))] for one in excluded]),
                ],
                dim=1,
            ),
            cosines(target, source) > own[:, None],
        ]
        pools = [torch.cat([sides[1], sides[2]]), sides[0]]
        slow = (
            sum(
                translation_ranking(query, pool, temperature=0.2, duplicate_bp=mask)
                for query, pool, mask in zip(sides[:2], pools, masks, strict=True)
            )
            / 2
        )
    else:
        slow = hard_negatives_ranking_loop(*sides, excluded, temperature=0.2)
    assert_equal_gradients(fast, slow, loss.model)


def test_a_batch_without_negatives_is_ranked_as_without_the_option(make_loss, moved_encodings, bitext):
    rows = [row | {"negatives": ""} for row in bitext[:5]]
    values = []
    for count in (0, 3):
        loss = make_loss("tr", negatives=count)
        values.append(loss.objectives["tr"](moved_encodings(loss, rows)[0]))
    torch.testing.assert_close(*values)
    with pytest.raises(UsageError, match="hard targets and a direction other"):
        make_loss("tr", negatives=1, targets="soft")
    with pytest.raises(ValueError, match="metaphrase filter CORPUS --negatives"):
        moved_encodings(loss, bitext[:5])


@pytest.fixture
def shared_rows(bitext):
    """Rows 0, 2 and 3 have the same target, 4 is a copy of 1, 5 has the source of 0, and 6 is a copy of 2."""
    rows = [dict(row) for row in bitext[:7]]
    rows[2]["target"] = rows[3]["target"] = rows[0]["target"]
    rows[4] = dict(rows[1])
    rows[5]["source"] = rows[0]["source"]
    rows[6] = dict(rows[2])
    return rows


def positives_by_text(rows, query, *, own_side):
    """The positives and the excluded candidates of each sentence, as numbers of the other side and then of its own."""
    other = "target" if query == "source" else "source"
    pool = [(side, at) for side in (other, query)[: 1 + own_side] for at in range(len(rows))]
    positives, excluded = [], []
    for i, pair in enumerate(rows):
        positives.append({i})
        excluded.append(set())
        for at, (side, j) in enumerate(pool):
            if at == i:
                continue
            if rows[j][side] in (
                pair["source"],
                pair["target"],
            ):  # a copy of the translation or of the sentence itself
                excluded[i].add(at)
            elif rows[j]["target"] == pair["target"]:
                is_copy = any(
                    one["source"] == rows[j]["source"] for one in rows[:j] if one["target"] == pair["target"]
                )
                (excluded if is_copy else positives)[i].add(at)
            elif rows[j]["source"] == pair["source"]:
                excluded[i].add(at)
    return positives, excluded


@pytest.mark.parametrize("own_side", [False, True])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("direction", ["symmetric", "target_to_source"])
def test_pairs_with_the_same_target_match_loop(make_loss, moved_encodings, shared_rows, direction, own_side, guided):
    args = {"direction": direction, "own_side": own_side, "guided": guided, "margin": 0.1, "temperature": 0.2}
    loss = make_loss("tr", positives="shared_target", **args)
    new, old = moved_encodings(loss, shared_rows)
    sides = {side: new[side].sentence_bh for side in ("source", "target")}
    slow, most = [], 0
    for query in ("source", "target") if direction == "symmetric" else ("target",):
        other = "target" if query == "source" else "source"
        positives, excluded = positives_by_text(shared_rows, query, own_side=own_side)
        most = max(most, *map(len, positives))
        if guided:
            original = {side: old[side].sentence_bh for side in sides}
            own = cosines(original[query], original[other]).diagonal().tolist()
            pool = torch.cat([original[other], original[query]]) if own_side else original[other]
            for i, row in enumerate(cosines(original[query], pool).tolist()):
                excluded[i] |= {j for j, cosine in enumerate(row) if cosine > own[i]}
        pool = torch.cat([sides[other], sides[query]]) if own_side else sides[other]
        slow.append(several_positives_loop(sides[query], pool, positives, excluded, temperature=0.2, margin=0.1))
    assert most == 3  # the two other sources of its target, besides its own
    assert_equal_gradients(loss.objectives["tr"](new), sum(slow) / len(slow), loss.model)


def test_pairs_with_the_same_target_and_hard_negatives_match_loop(make_loss, moved_encodings, shared_rows, bitext):
    texts = [bitext[9]["target"], shared_rows[0]["target"], bitext[10]["target"]]
    rows = [row | {"negatives": text} for row, text in zip(shared_rows, [*texts, "", "", "", ""], strict=True)]
    args = {"direction": "symmetric", "own_side": True, "temperature": 0.2, "negatives": 1}
    loss = make_loss("tr", positives="shared_target", **args)
    new, _ = moved_encodings(loss, rows)
    source, target, wrong = (new[name].sentence_bh for name in ("source", "target", "negatives-1"))
    forward, backward = (positives_by_text(rows, query, own_side=True) for query in ("source", "target"))
    for row, excluded in zip(rows, forward[1], strict=True):
        excluded |= {2 * len(rows) + n for n, text in enumerate(texts) if text == row["target"]}
    slow = several_positives_loop(source, torch.cat([target, source, wrong]), *forward, temperature=0.2)
    slow = slow + several_positives_loop(target, torch.cat([source, target]), *backward, temperature=0.2)
    assert_equal_gradients(loss.objectives["tr"](new), slow / 2, loss.model)


@pytest.mark.parametrize("own_side", [False, True])
def test_without_shared_targets_the_translation_is_the_only_positive(make_loss, moved_encodings, bitext, own_side):
    rows = [*bitext[:5], {**bitext[5], "source": bitext[0]["source"]}]
    values = []
    for args in ({"positives": "shared_target"}, {"mask_duplicates": True}):
        loss = make_loss("tr", direction="symmetric", own_side=own_side, **args)
        values.append(loss.objectives["tr"](moved_encodings(loss, rows)[0]))
    torch.testing.assert_close(*values)


def test_the_order_of_pairs_that_share_targets_does_not_matter(make_loss, moved_encodings, shared_rows):
    values = []
    for rows in (shared_rows, shared_rows[::-1]):
        loss = make_loss("tr", positives="shared_target", direction="symmetric", own_side=True, temperature=0.2)
        values.append(loss.objectives["tr"](moved_encodings(loss, rows)[0]))
    torch.testing.assert_close(*values)


def test_options_that_contradict_shared_targets_are_refused(make_loss):
    with pytest.raises(UsageError, match="requires hard targets"):
        make_loss("tr", positives="shared_target", direction="symmetric", targets="soft")
    with pytest.raises(UsageError, match="has no effect in the direction 'source_to_target'"):
        make_loss("tr", positives="shared_target")
    make_loss("tr", positives="shared_target", own_side=True)


@pytest.mark.parametrize("temperature", [0.2, 0.5])
def test_soft_targets_have_the_temperature_of_the_ranking_by_default(make_loss, encodings_of, bitext, temperature):
    values = []
    for args in ({}, {"soft_temperature": temperature}):
        loss = make_loss("tr", targets="soft", temperature=temperature, **args)
        values.append(loss.objectives["tr"](encodings_of(loss, bitext[:6])))
    assert values[0] == values[1]


def test_soft_targets_of_both_sides_are_their_mean(make_loss, encodings_of, bitext):
    loss = make_loss("tr", targets="soft", soft_sides="both", temperature=0.2, soft_temperature=0.001)
    encodings = encodings_of(loss, bitext[:6])
    sides = [encodings[side].sentence_bh for side in ("source", "target")]
    soft = sum(cosines(side, side) for side in sides).detach() / 2 / 0.001  # those of the original
    for at, side in enumerate(sides):
        side.data.normal_(generator=torch.Generator().manual_seed(at))
    wanted = translation_ranking(*sides, temperature=0.2, soft_bp=soft)
    torch.testing.assert_close(loss.objectives["tr"](encodings), wanted)


def test_the_dot_product_ranks_as_the_pure_function(make_loss, encodings_of, bitext):
    loss = make_loss("tr", similarity="dot", temperature=0.2)
    encodings = encodings_of(loss, bitext[:6])
    sides = [encodings[side].sentence_bh for side in ("source", "target")]
    wanted = translation_ranking(*sides, similarity="dot", temperature=0.2)
    assert abs(wanted - translation_ranking(*sides, temperature=0.2)) > 1e-4
    torch.testing.assert_close(loss.objectives["tr"](encodings), wanted)


def test_both_sides_and_negatives_are_ranked_by_their_projections(make_loss, encodings_of, bitext):
    rows = [row | {"negatives": bitext[9]["target"]} for row in bitext[:4]]
    loss = make_loss("tr", projection="mlp", negatives=1, temperature=0.2)
    encodings = encodings_of(loss, rows)
    for at, encoding in enumerate(encodings.values()):
        encoding.sentence_bh.data.normal_(generator=torch.Generator().manual_seed(at))
    linear = loss.objectives["tr"].head[0]
    source, target, wrong = (
        torch.tanh(encodings[name].sentence_bh @ linear.weight.T + linear.bias)
        for name in ("source", "target", "negatives-1")
    )
    wanted = translation_ranking(source, torch.cat([target, wrong]), temperature=0.2)
    torch.testing.assert_close(loss.objectives["tr"](encodings), wanted)
