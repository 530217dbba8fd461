"""Looking at a model leaves no trace on it, nor does an error meanwhile."""

import pytest
import torch

import accel
from accel.llm.recording.recorder import NAME
from support.llm.edits.modules import llama_with
from support.llm.families import make


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-alibi", "llama-rope-dynamic", "phi3-longrope", "mamba"])
def test_looking_leaves_no_trace(name, tiny):
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model = make(name).train()
    before, registries = tiny.snapshot(model), [AttentionInterface, AttentionMaskInterface]
    entries = [dict(registry._global_mapping) for registry in registries]
    config, rng = model.config.to_dict(), torch.get_rng_state()
    accel.restore(accel.optimize(model))
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert [registry._global_mapping for registry in registries] == entries
    assert NAME not in AttentionInterface._global_mapping
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_error_while_looking_leaves_no_trace(tiny):
    def broken(layer):
        layer.mlp.__class__ = type("Broken", (type(layer.mlp),), {"forward": lambda self, x: 1 / 0})

    model = llama_with(broken)
    before = tiny.snapshot(model)
    sites = accel.report(accel.optimize(model)).sites
    reason = "its forward refuses the examined call: ZeroDivisionError: division by zero"
    assert sites[0] == ("", "language model", "skipped", reason)
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_optimizing_twice_plans_anew(tiny):
    model = make("llama")
    before = tiny.snapshot(model)
    accel.optimize(model)
    accel.optimize(model, graphs=False)
    assert accel.report(model).summary().startswith("5 sites patched, 0 skipped")
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
