import json

import pytest

from metaphrase.evaluation.result import Measurement, Result
from metaphrase.exceptions import DataError


@pytest.fixture
def result():
    sw = Measurement(4, 75.0, (50.0, 100.0), "x", {"items": [1, 1, 0, 1], "majority": 50.0})
    return Result(
        suite="nli",
        model="m",
        measure="accuracy",
        languages={"sw": sw},
        average=Measurement(1, 75.0),
        groups={"without English": Measurement(1, 75.0)},
        statistic="items",
        protocol="p",
        settings={"seed": 0},
        facts={"hardware": {}},
    )


def test_results_are_read_as_they_were_written(result):
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_details_are_next_to_the_score(result):
    content = result.to_dict()
    assert content["languages"]["sw"] == {
        "n": 4,
        "sha256": "x",
        "score": 75.0,
        "interval": [50.0, 100.0],
        "items": [1, 1, 0, 1],
        "majority": 50.0,
    }
    assert content["average"] == {"n": 1, "score": 75.0}
    assert content["groups"] == {"without English": {"n": 1, "score": 75.0}}


def test_items_are_what_is_resampled(result):
    assert result.items("sw").tolist() == [1, 1, 0, 1]
    with pytest.raises(DataError, match="keeps no items"):
        Result.from_dict(result.to_dict() | {"statistic": None}).items("sw")


def test_a_missing_key_is_named(result):
    content = result.to_dict()
    del content["measure"]
    with pytest.raises(DataError, match="the key 'measure' is missing"):
        Result.from_dict(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"average": {"score": "x"}}, "'score' of a result must be a number, but is 'x'"),
        ({"languages": {"sw": {"n": 4, "score": None}}}, "'score' of a result must be a number, but is None"),
        ({"languages": None}, "is not a result of"),
        ({"languages": {"sw": None}}, "is not a result of"),
        ({"settings": None}, "'settings' of a result must be keys and values, but is None"),
        ({"statistic": ["items"]}, "'statistic' of a result must be text"),
    ],
)
def test_values_of_the_wrong_type_are_named(result, change, message):
    with pytest.raises(DataError, match=message):
        Result.from_dict(result.to_dict() | change)


def test_a_result_is_a_dictionary():
    with pytest.raises(DataError, match="This is not a result of `metaphrase evaluate`"):
        Result.from_dict(None)


def test_damaged_ids_are_refused(result):
    for ids in (None, [1, 2, 3], ["a", "b", "c", "d"]):
        content = result.to_dict()
        content["languages"]["sw"]["item_ids"] = ids
        with pytest.raises(DataError, match="The ids of the items of 'sw' are damaged"):
            Result.from_dict(content).item_ids()
