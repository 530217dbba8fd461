"""Linears computed together give what each would alone, once, and never what was true before a change."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from accel.cuda_graphs.entry import LoopConstant
from accel.fusion.loop import ForwardCounter
from accel.fusion.stacked_linears import Stacked, StackedLinears, project_together, stacked_rows, stacked_tensors
from accel.fusion.tensor_notes import TensorNotes


@pytest.fixture
def joint():
    passes = ForwardCounter()
    passes.tracked = True
    group = StackedLinears(passes)
    layers = [nn.Linear(6, n) for n in (4, 3, 5)]
    patches = [patch for layer in layers for patch in group.add(layer)]
    assert len(patches) == 1
    patches[0].apply()
    with torch.no_grad():
        yield group, layers


def close(got, layer, x):
    torch.testing.assert_close(got, copy.deepcopy(layer)(x))


def test_each_takes_its_own_from_one_product(joint):
    group, layers = joint
    x = torch.randn(2, 6)
    outputs = [group.of(layer, x) for layer in layers]
    for output, layer in zip(outputs, layers, strict=True):
        close(output, layer, x)
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1
    assert TensorNotes.on(x).outputs is None


@pytest.mark.parametrize("change", ["x in place", "weights, in a new forward", "weights, uncounted", "taken before"])
@pytest.mark.share(1)
def test_nothing_of_before_a_change_is_given(joint, change):
    """Where nobody counts forwards, each is computed alone."""
    group, (first, second, _) = joint
    x = torch.randn(2, 6)
    group.passes.tracked = change != "weights, uncounted"
    group.of(first, x)
    assert group.passes.tracked or not vars(x)
    if change == "taken before":
        group.of(second, x)
    if change == "x in place":
        x.mul_(-1)
    else:
        second.weight.data.mul_(-1)
    if change == "weights, in a new forward":
        group.passes.begin()
    close(group.of(second, x), second, x)


@pytest.mark.parametrize("changed", [lambda one: prune.l1_unstructured(one, "weight", 0.5), weight_norm])
def test_undo_of_weights_that_have_other_names_since(changed):
    layers = nn.ModuleList(nn.Linear(6, n) for n in (4, 3))
    patch = Stacked(layers)
    patch.apply()
    changed(layers[1])
    patch.undo()
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in layers.parameters())


def test_what_is_kept_is_made_anew_in_the_same_memory(joint):
    group, layers = joint
    x = torch.randn(2, 6)
    group.keep(x)
    places = [group.of(layer, x).data_ptr() for layer in layers]
    before = group.versions()
    x.mul_(-2)
    layers[0].weight.mul_(3)
    assert group.versions() > before
    group.keep(x)
    assert [group.of(layer, x).data_ptr() for layer in layers] == places
    for layer in layers:
        close(group.of(layer, x), layer, x)


def test_a_dtype_that_does_not_fit_is_torchs_to_refuse(joint):
    group, layers = joint
    with pytest.raises(RuntimeError, match="dtype"):
        group.of(layers[0], torch.randn(2, 6, dtype=torch.float64))


def test_a_bias_on_some_alone(joint):
    bare = nn.Linear(6, 2, bias=False)
    x = torch.randn(2, 6)
    for layer, output in zip((bare, joint[1][0]), project_together((bare, joint[1][0]), x), strict=True):
        close(output, layer, x)


def test_zeros_stand_for_a_bias_that_is_missing_and_nothing_else_does():
    """As in Whisper, whose keys have none."""
    layers = [nn.Linear(6, 4), nn.Linear(6, 3, bias=False), nn.Linear(6, 5)]
    assert stacked_tensors(layers, True) is None and stacked_rows([layer.weight for layer in layers]) is None
    weight, bias = stacked_tensors(layers, True, fill=True)
    with torch.no_grad():
        layers[2].bias.add_(1.0)
    x = torch.randn(2, 6)
    got = F.linear(x, weight, bias).split([4, 3, 5], dim=-1)
    for layer, output in zip(layers, got, strict=True):
        close(output, layer, x)
    assert stacked_tensors([layers[1], layers[0]], True, fill=True) is None
    every = [nn.Linear(6, 4) for _ in range(3)]
    assert stacked_tensors(every, True) is not None
    every[1].bias = None
    assert stacked_tensors(every, False, fill=True) is None  # what lies there is the bias that it had


@pytest.mark.parametrize("moved", [lambda layer: layer.double(), lambda layer: layer.to(torch.float64), copy.deepcopy])
def test_after_a_move_they_lie_in_one_storage_again(joint, moved):
    group, layers = joint
    for layer in layers:
        layer.weight.data = moved(layer).weight.data.clone()
        layer.bias.data = layer.bias.data.to(layer.weight.dtype).clone()
    assert stacked_rows([layer.weight for layer in layers]) is None
    x = torch.randn(2, 6, dtype=layers[0].weight.dtype)
    outputs = [group.of(layer, x) for layer in layers]
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1
    assert stacked_rows([layer.weight for layer in layers]) is not None
    for output, layer in zip(outputs, layers, strict=True):
        close(output, layer, x)


def test_a_prompt_that_is_kept_is_another_after_each_change(joint):
    """Of it, of a weight, of a bias; and in another loop: what is kept of it is then computed again."""
    group, layers = joint
    prompt = torch.randn(2, 6)

    def source(loop=1):
        held, *rest = LoopConstant(prompt, group, loop).source()
        assert held is prompt
        return rest

    first = source()
    assert source() == first and source(2) != first
    changes = (lambda: prompt.mul_(2), lambda: layers[1].weight.mul_(2), lambda: layers[2].bias.add_(1))
    for change in changes:
        before = source()
        change()
        assert source() != before


def test_a_copy_or_a_file_of_a_tensor_has_no_notes(joint, tmp_path):
    group, (first, *_) = joint
    x = torch.randn(2, 6)
    group.of(first, x)
    assert TensorNotes.on(x).outputs
    torch.save(x, tmp_path / "x.pt")
    for copied in (copy.deepcopy(x), torch.load(tmp_path / "x.pt", weights_only=True)):
        assert torch.equal(copied, x) and TensorNotes.on(copied) is None
        close(group.of(first, copied), first, x)


def test_what_is_kept_outlives_a_change_and_what_waits_does_not(joint):
    group, (first, _second, _) = joint
    x = torch.randn(2, 6)
    group.keep(x)
    kept = group.of(first, x)
    TensorNotes.begin(x).channel_stats = "of x"
    x.add_(1)
    assert group.of(first, x) is kept and TensorNotes.valid(x) is None
    assert TensorNotes.begin(x).channel_stats is None and group.of(first, x) is kept
