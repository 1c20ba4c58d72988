"""Prompts: the text before each sentence."""

from types import SimpleNamespace

import pytest

from metaphrase.encoders.prompts import resolve_prompt


def test_the_name_of_a_stored_prompt_is_text_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = SimpleNamespace(prompts={"question": "question of a test: ", "same": "same"})
    assert [resolve_prompt(model, prompt) for prompt in ("question", "question", "same", "other")] == [
        *("question", "question", "same", "other")
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "The prompt 'question' is used as text, but it is the name of a stored prompt. Pass the text 'question of a test: ' "
        "to use that prompt."
    ]
