"""Autoencoders within a budget: images that are too large for it are cut into tiles."""

import pytest
import torch

from accel.diffusion.tiling import tiles_within
from accel.offload.budget import Budget
from accel.patching.owner import PLAN
from support.video.tiny_videos import make_video

CUT = [("images", "decode", (40, 48)), ("images", "encode", (80, 96))]
CUT += [("frames", "decode", (10, 12)), ("frames", "encode", (40, 48))]


@pytest.mark.parametrize(("kind", "name", "sides"), CUT)
@torch.no_grad()
def test_an_image_that_would_not_fit_is_cut_into_tiles(kind, name, sides, tiny):
    """As diffusers would with tiles of that size, and for as long as there is the pipeline."""
    vae, frames = (tiny.vae().eval(), ()) if kind == "images" else (make_video("qwen"), (1,))
    for size, value in {"min_height": 32, "min_width": 32, "stride_height": 24, "stride_width": 24}.items():
        setattr(vae, f"tile_sample_{size}", value)  # which an `AutoencoderKL` does not look at
    part, tiles = vae.get_submodule(f"{name}r"), []
    part.register_forward_hook(lambda module, given, made: tiles.append(max(given[0].shape[-2:])))
    given = torch.randn(1, 4 if name == "decode" else 3, *frames, *sides)

    def run():
        tiles.clear()
        made = getattr(vae, name)(given, return_dict=False)[0]
        return getattr(made, "parameters", made)

    def as_before():
        same = all(vars(vae)[one] is value for one, value in settings.items() if isinstance(value, int | bool))
        return same and vars(vae).keys() - {"decode", "encode", "__getstate__"} == settings.keys()

    wanted, settings, pipe = run(), dict(vars(vae)), torch.nn.Identity()
    patches = tiles_within(pipe, [vae, torch.nn.Linear(1, 1)], Budget(10**9))
    for patch in patches:
        patch.apply()
    assert torch.equal(run(), wanted) and len(tiles) == 1
    for patch in patches:
        patch.value.room = 1
    cut, count, side = run(), len(tiles), max(tiles)
    assert cut.shape == wanted.shape and count > 1 and side < 40 and as_before()
    broken = part.register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run()
    broken.remove()
    method = next(one for one in (f"_tiled_{name}", f"tiled_{name}") if hasattr(vae, one))
    vars(vae)[method] = lambda *given, **more: 1 / 0
    assert torch.equal(run(), wanted)  # as a whole then
    del vars(vae)[method]
    assert as_before()
    vae.enable_tiling()  # their own comes first
    if kind == "images":
        vae.tile_latent_min_size, vae.tile_sample_min_size = (side, 2 * side) if name == "decode" else (side // 2, side)
    assert torch.equal(run(), cut) and len(tiles) == count
    vars(vae)[PLAN] = None
    del pipe
    assert not {"decode", "encode", "__getstate__"} & set(vars(vae))
