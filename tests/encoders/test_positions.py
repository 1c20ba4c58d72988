"""Questions to an encoder about its positions leave it as it was."""

import pytest

from metaphrase.encoders.positions import evaluating


def test_every_part_is_in_its_mode_again_after_an_error(tiny_encoder):
    tiny_encoder.train()
    tiny_encoder[0].auto_model.embeddings.eval()  # as of a frozen part
    before = [module.training for module in tiny_encoder.modules()]

    def fail():
        with evaluating(tiny_encoder):
            assert not any(module.training for module in tiny_encoder.modules())
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert [module.training for module in tiny_encoder.modules()] == before
    assert len({*before}) == 2
