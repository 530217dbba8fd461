"""Every module inside fused blocks of every kind, changed in every way: what stock then computes is what comes."""

import copy

import pytest
import torch

import accel
from support.diffusion.denoisers import DITS, given, transformer
from support.diffusion.tiny_models import UNETS, make_unet, make_vae, unet_inputs
from support.everything import EVERYTHING
from support.llm.outputs import flat, same
from support.module_changes import CHANGES, answers, dropping
from support.patched import fast_forwards
from support.video.tiny_videos import VIDEOS, latents, make_video


def unet(name):
    return make_unet(name), lambda model: model(**unet_inputs(model))


def vae(name):
    image = torch.randn(1, 3, 16, 16)
    return make_vae(), lambda model: model(image)


def dit(name):
    return transformer(name), lambda model: model(**given(name))


def video(name):
    return make_video(name), lambda model: model.decode(latents(model))


MAKERS = {unet: UNETS, vae: ("vae",), dit: DITS, video: VIDEOS}
MODELS = {name: maker for maker, names in MAKERS.items() for name in names}


def one_of_each(model):
    """Paths of modules inside fused blocks, but those of a block like another."""
    found, paths = {}, {module: path for path, module in model.named_modules()}
    for module in fast_forwards(model):
        if module is not model:
            for path, part in module.named_modules():
                make = tuple((name, type(child)) for name, child in part._modules.items())
                found.setdefault((type(module), path, type(part), make), paths[part])
    return sorted(set(found.values()))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.share(60)
@torch.no_grad()
def test_a_changed_module_inside_a_block_is_noticed(name, change):
    stock, call = MODELS[name](name)
    ours = accel.optimize(copy.deepcopy(dropping(stock)))

    def called(model):
        torch.manual_seed(7)
        return flat(call(model))

    def fallbacks():
        return sum(calls for *_, calls in accel.report(ours).fallbacks)

    plain = called(stock)
    for _ in range(2):  # a block is recorded at its first call
        same(called(ours), plain)
    before, paths = fallbacks(), one_of_each(ours)
    assert paths
    paths = paths if EVERYTHING else paths[::3]
    modules = ((ours.get_submodule(path), stock.get_submodule(path)) for path in paths)
    for found, wanted in answers(modules, change, lambda: called(ours), lambda: called(stock)):
        if all(bool(one.isfinite().all()) for one in wanted.values()):
            same(found, wanted, share=1e-4)
    told = fallbacks()
    assert told > before or change == "contents"
    same(called(ours), plain)
    assert fallbacks() == told, "it is fast again"
