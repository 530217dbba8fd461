"""What the host knows of a call's integers: read without the device, which here has no numbers at all."""

import copy

import pytest
import torch
from transformers.utils import torch_compilable_check

import accel
from accel.fusion import host_numbers
from accel.fusion.host_numbers import HostNumbers
from support.llm.multimodal import make
from support.llm.outputs import generate, same

IDS, GRID = torch.tensor([[5, 9, 9, 9, 9, 7]]), torch.tensor([[1, 4, 4]])


@pytest.fixture
def there():
    return IDS.to("meta"), GRID.to("meta")


def test_what_library_code_asks_of_pictures(there):
    ids, grid = there
    embeddings, features = torch.empty(1, 6, 8, device="meta"), torch.empty(4, 8, device="meta")
    with HostNumbers(zip(there, (IDS, GRID), strict=True)) as known:
        assert (grid.prod(-1) // 4).tolist() == [4] and grid[0, 1].item() == 4 and int(max(grid[0, 1:])) == 4
        count = (ids == 9).sum()
        torch_compilable_check(count * embeddings.shape[-1] == features.numel(), f"{count} tokens")
        with pytest.raises(ValueError, match="4 tokens"):
            torch_compilable_check(count * 7 == features.numel(), f"{count} tokens")
        assert embeddings[ids == 9, :].shape == features.shape
        known.leave()
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_mask_chooses_and_stays_known():
    ids, x = IDS.clone(), torch.zeros(1, 6, 2)
    with HostNumbers([(ids, IDS)]) as known:
        mask = ids == 9
        x[mask] = x[mask, :] + torch.arange(8.0).view(4, 2)
        assert id(mask) in known.known and known.chosen
    wanted = torch.zeros(1, 6, 2).masked_scatter(mask[..., None], torch.arange(8.0))
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("change", ["__iadd__", "add_", "__setitem__", "out"])
def test_nothing_is_known_of_what_was_changed(there, change):
    _, grid = there
    with HostNumbers([(grid, GRID)]):
        if change == "out":
            torch.add(grid, 1, out=grid)
        else:
            getattr(grid.view(-1), change)(*((0, 1) if change == "__setitem__" else (1,)))
        with pytest.raises(RuntimeError):
            grid.tolist()


@pytest.mark.turns(4)
def test_a_prompt_with_a_picture_is_counted_on_the_host(monkeypatch):
    """Of what the tower gives and what the prompt holds; the host's numbers are copies here too."""
    read = []

    def noting(self, func, types, args=(), kwargs=None, stock=HostNumbers.__torch_function__):
        if getattr(func, "__name__", "") in host_numbers.READS and id(args[0]) in self.known:
            read.append(func.__name__)
        return stock(self, func, types, args, kwargs)

    model, _, image = make("qwen3-vl")
    stock = copy.deepcopy(model)
    accel.optimize(model)
    monkeypatch.setattr(host_numbers, "elsewhere", lambda one: True)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    monkeypatch.setattr(HostNumbers, "__torch_function__", noting)
    same(*({"logits": one(**image, use_cache=True).logits} for one in (model, stock)))
    assert {"tolist", "item"} <= {*read}
    read.clear()
    ids, more = image["input_ids"], {name: one for name, one in image.items() if name != "input_ids"}
    call = {"max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
    same(*(generate(one, ids, None, **more, **call) for one in (model, stock)))
    assert {"tolist", "item", "__bool__"} <= {*read} and not torch.overrides._get_current_function_mode_stack()
