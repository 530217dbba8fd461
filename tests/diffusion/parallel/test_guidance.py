"""Images over several ranks: guidance, sequences, and tiles of a VAE."""

import numpy as np
import pytest
import torch

import accel
from accel.diffusion.parallel.tiles import assign_tiles
from accel.errors import Refused
from accel.parallel.ranks import STARTED
from support.diffusion.tiny_models import make_unet
from support.parallel import diffusion_ranks as told_to
from support.parallel import sequences

ROUNDING = 2e-4  # of an image in 0..1, that float32 leaves after some steps of guidance


def close(a, b):
    return np.abs(a - b).max() <= ROUNDING


@pytest.mark.parametrize(("name", "model"), [("tiny-sd-digits", "unet"), ("tiny-dit-digits", "transformer")])
@pytest.mark.turns(4)
def test_a_pipeline_draws_what_one_process_draws(ranks, name, model):
    both = ranks.run(told_to.draw, name, model)
    for rank, found in enumerate(both):
        assert f"rank {rank} of 2" in found["site"][3]
        assert close(found["ours"], found["stock"]) and found["stock"].std() > 0.05
        assert found["rows"] == [1] * told_to.STEPS and not found["told"]
        assert close(found["three ours"], found["three"]) and found["three rows"] == [3] * told_to.STEPS
        assert not found["three told"]
        # Without guidance there is a single row.
        assert close(found["alone ours"], found["alone"]) and found["alone rows"] == [1] * told_to.STEPS
        (reason, calls), *others = found["alone told"]
        assert calls == told_to.STEPS and not others and "a batch of 1, which 2 ranks cannot share" in reason
        assert "are not the same on ranks 0 and 1" in found["refused"] and "one seed" in found["refused"]
        assert not found["refused rows"]
        assert np.array_equal(found["again"], found["ours"])
        assert found["restored"] and found["weights"]
    assert np.array_equal(*(found["ours"] for found in both))


@pytest.mark.turns(2)
def test_the_step_cache_goes_inside(ranks):
    for found in ranks.run(told_to.cached):
        assert close(found["ours"], found["one process"]) and not close(found["ours"], found["stock"])
        assert found["rows"] == [1] * told_to.STEPS and not found["told"]


def test_ranks_verify_together(ranks):
    for passed, rows, errors in ranks.run(told_to.verified):
        assert passed and set(rows) == {1} and errors <= 2e-5


@pytest.mark.turns(2)
def test_adapters_that_are_loaded_later(ranks):
    for found in ranks.run(told_to.adapted):
        assert found["off"] <= 2e-5 < found["by the adapter"] and found["rows"] == [1, 1]


@pytest.mark.turns(2)
def test_noise_that_a_scheduler_draws_is_of_one_seed(ranks):
    for found in ranks.run(told_to.noise_between_steps):
        assert close(found["ours"], found["wanted"])
        assert found["rows"] == [1]  # the second call is refused
        assert "one seed" in found["refused"]


@pytest.mark.turns(4)
def test_arguments_of_many_kinds_are_divided(ranks):
    for found in ranks.run(told_to.unets):
        for name, (off, rows, told) in found.items():
            batch = int(name.split()[1])
            assert off <= 2e-5 and rows == [batch // 2] * 2 and not told, name


@pytest.mark.turns(4)
def test_what_cannot_be_divided_runs_whole_and_is_told(ranks):
    reasons = {
        "rows that depend on each other": "its rows depend on each other",
        "a tensor of another length": "a tensor of (3,) in a call of 2 rows",
        "hooks inside": "forward hooks",
        "gradients": "gradients are on",
        "odd": "a batch of 3, which 2 ranks cannot share equally",
    }
    for found in ranks.run(told_to.what_stays_whole):
        assert found.keys() == reasons.keys()
        for name, (off, rows, told, seen) in found.items():
            batch = 3 if name == "odd" else 2
            assert off <= 2e-5 and rows == [batch] * 2, name
            assert any(reasons[name] in reason and calls == 2 for reason, calls in told), (name, told)
            assert seen == ([2, 2] if name == "hooks inside" else [])


@pytest.mark.turns(2)
def test_ranks_that_do_not_do_the_same_are_refused_on_both(ranks):
    wanted = {
        "options": "option parallel is not the same on all ranks",
        "model": "the model is not the same on all ranks",
        "shapes": "the shapes of its tensors is not the same on all ranks",
        "timestep": "the numbers of 'timestep' are not the same",
        "prompt": "the numbers of 'encoder_hidden_states' are not the same",
        "weights": "load the same weights and adapters on all ranks",
    }
    for found in ranks.run(told_to.what_is_refused):
        assert found.pop("untouched") == "False"
        assert found.keys() == wanted.keys()
        assert all(words in found[name] for name, words in wanted.items()), found


@pytest.mark.turns(2)
def test_copies_divide_too_and_what_rests_on_a_cpu(ranks):
    for found in ranks.run(told_to.copies):
        assert found.keys() == {"copy", "pickle", "stock"}
        assert all(off <= 2e-5 and rows == [1] for off, rows in found.values()), found


@pytest.mark.parametrize("parallel", ["guidance", "tiles"])
def test_a_process_alone_is_refused_and_the_model_as_it_was(monkeypatch, tiny, parallel):
    for name in STARTED:
        monkeypatch.delenv(name, raising=False)
    model = accel.optimize(make_unet())
    before = tiny.snapshot(model)
    with pytest.raises(Refused, match=f"parallel='{parallel}': this process is alone"):
        accel.optimize(model, parallel=parallel)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_copy_in_a_process_alone_runs_whole(monkeypatch):
    """As one that was saved by a rank, and is loaded elsewhere."""
    from accel.diffusion.parallel import guidance
    from accel.options import Options
    from accel.planning.plan import create_context

    model = make_unet()
    forward = guidance.GuidanceForward(model, "", create_context(Options()).for_model(), None)
    given = told_to.tiny_models.unet_inputs(model)
    with torch.no_grad():
        assert torch.equal(forward(**given).sample, type(model).forward(model, **given).sample)
    ((_, reason, calls),) = forward.log.rows()
    assert "this process is alone" in reason and calls == 1


NAMES = ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.turns(2)
def test_blocks_are_planned_on_the_local_sequence(ranks, name):
    for found in ranks.run(sequences.sequence, name, False):
        assert found.pop("stock") <= 1e-5
        for off, ran, told, restored in found.values():
            assert off <= 1e-5 and ran and all(ran) and not told and restored, name


def test_attention_that_writes_into_tensors_of_others_runs_stock(ranks):
    """Sequences of any length: ranks tell each other their sizes."""
    for found in ranks.run(sequences.sequence, NAMES[0], True):
        assert found.pop("stock") <= 1e-5
        for off, ran, told, restored in found.values():
            assert off == 0 and ran and not any(ran) and restored
            assert told and all("cannot be recorded: ranks write into tensors of each other" in one for one, _ in told)


@pytest.mark.turns(4)
def test_tiles_are_decoded_once_and_blended_as_stock_does(ranks):
    first, second = ranks.run(told_to.tiles)
    for found in (first, second):
        assert "are not the same on ranks 0 and 1" in found["refused"] and found["restored"]
    for name in ("odd", "batch", "row", "overlap"):
        counts = [found[name][2] for found in (first, second)]
        for off, same, _, every, told in (first[name], second[name]):
            assert off <= 2e-5 and same and not told, name
            assert every > 2 and sum(counts) == every and max(counts) - min(counts) <= every // 2, (name, counts)
    for off, same, own, every, told in (first["small"], second["small"]):  # no larger than a tile: stock cuts nothing
        assert off <= 2e-5 and same and own == every == 1 and not told


def test_tiles_are_shared_out_by_their_size():
    for ranks in (1, 2, 3, 4):
        work = [9, 9, 3, 9, 9, 3, 3, 3, 1]
        shares = assign_tiles(work, ranks)
        assert sorted(place for share in shares for place in share) == list(range(9))
        loads = [sum(work[place] for place in share) for share in shares]
        assert max(loads) - min(loads) <= max(work)
        assert all(share == sorted(share) for share in shares)
