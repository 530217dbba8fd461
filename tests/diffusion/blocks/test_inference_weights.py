"""Weights made under torch.inference_mode, which count no versions: optimized, called and restored in and out of it."""

import pytest
import torch

import accel


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("optimized", [False, True])
def test_weights_made_under_inference_mode(tiny, made, optimized):
    """Called both ways; what they were, inference tensors or not, they are still, in the layout and after it."""
    with torch.inference_mode(made):
        models = tiny.unet(), tiny.vae()
    for model in models:
        inputs = (
            tiny.inputs(model) if hasattr(model.config, "cross_attention_dim") else {"sample": torch.ones(1, 3, 8, 8)}
        )

        def run(inside, model=model, inputs=inputs):
            with torch.inference_mode() if inside else torch.no_grad():
                return model(**inputs).sample

        def told(model=model):
            return [(id(p), p.stride(), p.is_inference()) for p in model.parameters()]

        before, wanted = told(), run(False)
        with torch.inference_mode(optimized):
            accel.optimize(model, layout="channels_last")
        assert [row[2] for row in told()] == [made] * len(before) and told() != before
        for inside in (True, False):
            torch.testing.assert_close(run(inside), wanted, rtol=1e-4, atol=1e-4)
        assert accel.report(model).fallbacks == []
        with torch.inference_mode(not optimized):
            accel.restore(model)
        assert told() == before and torch.equal(run(False), wanted)


def test_a_pipeline_loaded_optimized_and_called_inside(pipe, live, tiny):
    twin_image = live.draw(pipe)
    with torch.inference_mode():
        for model in live.models(pipe).values():
            model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
        accel.optimize(pipe, layout="channels_last")
        assert all(p.is_inference() for p in pipe.unet.parameters())
        assert live.rms(live.draw(pipe), twin_image) < 1e-3
        accel.restore(pipe)
    assert (live.draw(pipe) == twin_image).all()
