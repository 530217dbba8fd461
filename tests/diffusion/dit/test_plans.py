"""What decides that a plan holds for a call: arguments that are one, strides, numbers, and what blocks hold."""

import copy
import dataclasses
import gc

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from accel.diffusion.dit import block as block_file
from accel.diffusion.dit.block import BlockForward
from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.recorder import recorded, tensors_in
from accel.options import Options
from accel.patching import structure
from accel.planning.plan import create_context
from support.compatibility.transformer_pair import FLUX, SD3, alike
from support.together import together


class BlockPair:
    """The first block of a pair of transformers, and the arguments that it is called with."""

    def __init__(self, pair):
        self.pair, self.call = pair, {}
        self.ours, self.stock = pair.block(pair.ours), pair.block(pair.stock)

        def keep(module, args, kwargs):
            self.call = kwargs

        handle = self.stock.register_forward_pre_hook(keep, with_kwargs=True)
        with torch.no_grad():
            pair.stock(**pair.inputs)
        handle.remove()

    def given(self, **changed):
        """The arguments with some changed, and rotations of as many rows as there are tokens."""
        call = self.call | changed
        if "image_rotary_emb" in call:
            rows = call["hidden_states"].shape[1] + call["encoder_hidden_states"].shape[1]
            call["image_rotary_emb"] = tuple(torch.cat([one, one])[:rows] for one in call["image_rotary_emb"])
        return call

    def run(self, module, call):
        with torch.no_grad():
            return list(tensors_in(module(**call)))

    def agree(self, plans=1, **changed):
        call, before = self.given(**changed), self.pair.plans
        for got, wanted in zip(self.run(self.ours, call), self.run(self.stock, call), strict=True):
            alike(got, wanted)
        assert self.pair.plans - before == plans and self.pair.report().fallbacks == []

    @property
    def plan(self):
        return list(self.ours.forward.known.values())[-1]


@pytest.fixture
def block(pair):
    return BlockPair(pair)


either = pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)


@either
def test_a_tensor_given_twice_is_no_plan_for_two_tensors(block):
    one, other = torch.randn(2, 2, 7, 32)
    block.agree(hidden_states=one, encoder_hidden_states=one)
    block.agree(hidden_states=one, encoder_hidden_states=other)
    block.agree(hidden_states=other, encoder_hidden_states=other)


@either
def test_tensors_that_lie_otherwise_have_a_plan_of_their_own(block):
    rows = block.call["hidden_states"]
    for given in (
        rows,
        rows.mT.contiguous().mT,
        rows[:1].expand(2, -1, -1),
        torch.randn(*rows.shape[:2], 64)[..., ::2],
        torch.randn(rows.numel() + 3)[3:].view(rows.shape),
    ):
        for _ in range(2):
            block.agree(hidden_states=given)
    assert len(block.ours.forward.known) == 4  # where the first lies does not count


@either
def test_outputs_without_numbers_say_nothing_about_a_plan(block):
    rows = torch.full((2, 9, 32), torch.nan)
    for _ in range(2):
        call = block.given(hidden_states=rows)
        assert all(bool(one.isnan().all()) for one in block.run(block.ours, call))
        assert not block.plan.compared and not block.plan.reason
    rows = torch.randn(2, 9, 32)
    block.agree(hidden_states=rows)
    assert block.plan.compared
    block.agree(hidden_states=rows)
    rows[1, 0, 0] = torch.nan
    ours, stock = (block.run(module, block.given(hidden_states=rows)) for module in (block.ours, block.stock))
    for got, wanted in zip(ours, stock, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@either
def test_a_wrong_plan_is_not_taken_for_right_without_numbers(block):
    forward = block.ours.forward

    def wrong(*tensors, outputs, **more):
        rowwise(*tensors, outputs=outputs, **more)
        for one in outputs:
            one.neg_()

    rowwise = forward.kernels.rowwise
    forward.kernels = dataclasses.replace(forward.kernels, rowwise=wrong)
    block.run(block.ours, block.given(hidden_states=torch.full((2, 9, 32), torch.nan)))
    call = block.given(hidden_states=torch.randn(2, 9, 32))
    for _ in range(2):
        for got, wanted in zip(block.run(block.ours, call), block.run(block.stock, call), strict=True):
            alike(got, wanted)
    assert any("computes something else" in reason for _, reason, _ in block.pair.report().fallbacks)


@either
def test_tensors_made_under_inference_mode(block):
    with torch.inference_mode():
        block.agree(**{name: one.clone() for name, one in block.call.items() if isinstance(one, torch.Tensor)})
    block.agree()


@either
def test_a_plan_is_run_for_one_of_its_blocks_where_launches_only_compile(pair, monkeypatch):
    """Its outputs have the shapes, strides and dtypes that another block's would have; nothing of it stays."""
    pair.agree()
    ran, real = [], Executable.__call__
    monkeypatch.setattr(Executable, "__call__", lambda self, *given: ran.append(id(self)) or real(self, *given))
    monkeypatch.setattr(block_file, "warming_up", lambda: True)
    with torch.no_grad():
        dry = pair.ours(**pair.inputs)
        once = list(ran)
        pair.ours(**pair.inputs)
    monkeypatch.setattr(block_file, "warming_up", lambda: False)
    assert once == ran and len(once) == pair.blocks
    wanted = list(tensors_in(pair.stock(**pair.inputs)))
    for got, one in zip(tensors_in(dry), wanted, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (one.shape, one.stride(), one.dtype)
    pair.agree()


@either
def test_threads_that_record_at_once(block):
    calls = [block.given(hidden_states=torch.randn(2, 9 + number % 3, 32)) for number in range(6)]
    got = [[] for _ in calls]

    def work(number):
        for _ in range(2):
            got[number] += [block.run(block.ours, calls[number])]

    together(work, ((number,) for number in range(len(calls))))
    for call, results in zip(calls, got, strict=True):
        assert len(results) == 2
        for result in results:
            for one, wanted in zip(result, block.run(block.stock, call), strict=True):
                alike(one, wanted)
    assert block.pair.report().fallbacks == []


@either
def test_weights_are_read_where_they_are(block):
    """Other numbers, another tensor, none, and one that was not there; of another dtype where stock takes it."""

    def change(function):
        for module in (block.ours, block.stock):
            torch.manual_seed(3)
            function(module.attn.to_q)

    block.agree()
    change(lambda q: q.weight.data.mul_(2))
    block.agree()
    change(lambda q: setattr(q, "weight", nn.Parameter(torch.randn(32, 32))))
    block.agree()
    change(lambda linear: setattr(linear, "bias", None))
    block.agree()
    block.agree()
    change(lambda linear: setattr(linear, "bias", nn.Parameter(torch.randn(linear.out_features))))
    block.agree()
    block.agree()
    for module in (block.ours, block.stock):
        for norm in (module.attn.norm_q, module.attn.norm_k):
            if norm is not None:
                norm.weight.data = norm.weight.data.bfloat16()
    block.agree()
    block.agree()
    for module in (block.ours, block.stock):
        module.attn.to_k.weight = module.attn.to_v.weight  # what was recorded reads both
    block.agree()


@either
def test_weights_of_another_kind_of_tensor(block):
    """As quantizers put in. torch exchanges such a weight when a model is converted, unless something watches it."""
    gc.disable()
    try:
        block.agree(), block.agree()
        for module in (block.ours, block.stock):
            half = module.attn.to_q.weight.detach() / 2
            module.attn.to_q.weight = nn.Parameter(TwoTensor(half, half), requires_grad=False)
        for _ in range(2):
            call = block.given()
            for got, wanted in zip(block.run(block.ours, call), block.run(block.stock, call), strict=True):
                alike(got, wanted)
        assert "takes a weight that is a TwoTensor" in block.plan.reason
        block.ours.bfloat16()
    finally:
        gc.enable()


class Odd(nn.Module):
    """Forwards that no plan can hold."""

    def __init__(self, how):
        super().__init__()
        self.how, self.table, self.dropout = how, torch.randn(16), nn.Dropout(0.5)
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.one.weight
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x, sizes, weight):
        return self.how(self, x, sizes, weight)


def counts(self, x, *_):
    self.count += 1
    return x + self.count


def in_place(self, x, *_):
    x += 1
    return x * 2


BY_NUMBERS = "tensor holds"
NOTED = {
    "tied": (lambda self, x, *_: self.other(self.one(x)), "several places"),
    "count": (counts, "or weights"),
    "in place": (in_place, "its arguments"),
    "by a method": (lambda self, x, *_: x.mul_(2) + 1, "its arguments"),
    "slice": (lambda self, x, sizes, _: x[: sizes[0]] + 1, f"goes by what a {BY_NUMBERS}"),
    "size": (lambda self, x, sizes, _: x.new_zeros((sizes[0], 16)) + x[:1], f"goes by what a {BY_NUMBERS}"),
    "arange": (lambda self, x, sizes, _: x[:1] + torch.arange(sizes[1]), f"goes by what a {BY_NUMBERS}"),
    "item": (lambda self, x, *_: x * x.sum().item(), BY_NUMBERS),
    "bool": (lambda self, x, *_: x if x.sum() > 0 else -x, BY_NUMBERS),
    "mask": (lambda self, x, *_: x[x > 0].sum() + x, BY_NUMBERS),
    "nonzero": (lambda self, x, *_: x * torch.nonzero(x)[0, 0], BY_NUMBERS),
    "output": (lambda self, x, *_: Transformer2DModelOutput(sample=x + 1), "returns a Transformer2DModelOutput"),
    "weight": (lambda self, x, _, weight: weight + self.one.bias, "its own weight"),
    "sparse": (lambda self, x, *_: x + x.to_sparse().to_dense(), "a sparse tensor"),
    "table": (lambda self, x, *_: x * self.table, "neither an argument nor a weight"),
    "dropout": (lambda self, x, *_: self.dropout(x), "random"),
    "rand": (lambda self, x, *_: x + torch.rand(16), "random"),
}


@pytest.mark.parametrize("name", NOTED)
@pytest.mark.share(1)
def test_what_no_plan_can_hold_is_told_and_gives_what_it_gives(name):
    """Under inference mode tensors have no versions, by which writes would be noticed."""
    how, said = NOTED[name]

    def given(module):
        return torch.ones(2, 16), torch.tensor([1, 16]), module.one.bias if name == "weight" else None

    for mode in (torch.no_grad, torch.inference_mode):
        module = Odd(how)
        stock = copy.deepcopy(module)
        weights = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers()])
        with mode():
            torch.manual_seed(0)
            output, program = recorded(module, weights, given(module), {})
            torch.manual_seed(0)
            wanted = stock(*given(stock))
        assert isinstance(program, str) and said in program
        assert all(map(torch.equal, tensors_in(output), tensors_in(wanted)))


class Holding(nn.Module):
    """Four layers, and tensors among the attributes: `scales` are read, `seen` is what was given last."""

    def __init__(self, keeps):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.scales, self.table, self.keeps, self.seen = {"one": torch.tensor(2.0)}, torch.randn(16), keeps, None

    def forward(self, x):
        for layer in self.layers:
            x = torch.sigmoid(layer(x) * self.scales["one"] + self.table)
        if self.keeps:
            x, self.seen = x + (0 if self.seen is None else self.seen), x
        return x


@torch.no_grad()
@pytest.mark.parametrize("keeps", [False, True])
def test_tensors_among_the_attributes(keeps, monkeypatch):
    """Read where they are; a block that puts another one there is no plan."""
    monkeypatch.setattr(structure, "LIBRARIES", structure.LIBRARIES | {__name__.partition(".")[0]})
    module = Holding(keeps).eval()
    stock = copy.deepcopy(module)
    forward = BlockForward(module, "blocks.0", create_context(Options()))
    forward.remember()

    def both():
        x = torch.randn(2, 5, 16)
        for _ in range(3):
            alike(forward(x), stock(x))

    both()
    for one in (module, stock):
        one.scales["one"].fill_(0.5)
        one.table = torch.arange(16.0)
    both()
    assert any(plan.executable for plan in forward.known.values()) != keeps
    assert any("its own settings" in reason for _, reason, _ in forward.log.rows()) == keeps
