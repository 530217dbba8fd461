"""What a router computes: candidates compared with its own forward, on a twin with weights made to tell them apart.

Whatever a router is called and returns, it multiplies tokens by one matrix, chooses by a score of these logits, and
gives choices and their shares. Which score, bias, groups, sum, limit and factor, is found in two steps: by what it
chose, and then by the shares of that. Numbers are those that it holds or that stand in its code. Of choices with equal
scores any will do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from accel_kernels.moe.route import Routing, preferences_of, scores_of, shares_of
from torch import nn

from accel.comparison import rows_agree
from accel.errors import reason_of
from accel.patching.guard import BASE
from accel.patching.structure import mentioned, methods, twin
from accel.quantization.experts import stock_parameters
from accel.tolerances import SHARES, bound

LOGITS, INDEX, SHARE = "logits", "index", "shares"
GIVEN = "given by the caller"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Kind = tuple[torch.dtype, ...]  # of the input, and of all that the router holds, in order
# (spread, middle, lead of the largest) of the logits of each token: usual ones, some that stand out, and some far from
# zero, which 16 bits could not tell apart.
USUAL = ((1.0, 0.0, 0.0),) * 6 + ((6.0, 0.0, 0.0),) * 3 + ((1.0, 0.0, 12.0),)
ROWS = (*USUAL, (1.0, -12.0, 0.0), (1.0, -30.0, 0.0), (1.0, -80.0, 0.0), (1.0, -50.0, 20.0))
DENSE, SUMMED = 6, 64  # tokens beside them, whose logits are sums of so many products at most


@dataclass(frozen=True)
class RouterFormula:
    """weight, bias: paths of the matrix (E, H), and of what is added to logits. correction: of the bias that is added
    for the choice, or GIVEN. wide: logits are computed in fp32. outputs: what is returned, in order: LOGITS, INDEX,
    SHARE; logits, shares: their dtypes, None for logits that are not returned. dims: how many inputs may have.
    """

    weight: str
    bias: str | None
    correction: str | None
    routing: Routing
    outputs: tuple[str, ...]
    dims: tuple[int, ...]
    wide: bool = False
    logits: torch.dtype | None = None
    shares: torch.dtype = torch.float32


Formulas = dict[Kind, RouterFormula]


def holds_router(module: nn.Module) -> bool:
    """Whether a module has one matrix and besides it only numbers of its rows, takes tokens, and names a top-k."""
    if type(module).__module__.startswith("torch.") or any(child._modules for child in module.children()):
        return False
    tensors = held(module)
    matrix = _matrix(tensors)
    if matrix is None or len(tensors) > 3 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        return False
    experts = tensors[matrix].shape[0]
    numbers_of_rows = all(tensor.numel() == experts for path, tensor in tensors.items() if path != matrix)
    return numbers_of_rows and 1 <= len(stock_parameters(module)) <= 2 and "topk" in mentioned(_classes(module))


def router_settings(module: nn.Module) -> tuple:
    """All that can make the formulas of two routers differ; to be hashed."""
    names = mentioned(_classes(module))
    own = ((name, value) for name, value in vars(module).items() if name not in BASE and name in names)
    values = tuple((name, type(value), _hashed(value)) for name, value in own)
    tensors = tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in held(module).items())
    return (*_classes(module), values, tensors)


def router_formulas(module: nn.Module) -> Formulas | str:
    """By the dtypes they hold for: those of now, and those after a `.to(dtype)`. Else why there is none."""
    if "config" in mentioned(_classes(module)):
        return "reads its configuration at each call"
    numbers = cache(partial(RouterNumbers, module))
    found: Formulas = {}
    try:
        with torch.no_grad():
            formula = _in_fp32(RouterTrial(module, numbers, torch.float32, torch.float32))
            if isinstance(formula, str):
                return formula
            # Some keep their weights in float32, whatever the model has.
            for dtype, stored in ((one, kept) for one in FLOATS for kept in (None, one)):
                trial = RouterTrial(module, numbers, dtype, stored)
                if trial.kind not in found and (rounded := _rounded(trial, formula)) is not None:
                    found[trial.kind] = rounded
    except Exception as error:  # a router that takes, or gives, something else
        return f"could not be examined: {reason_of(error)}"
    return found


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by path, of the module and its children."""
    inside = ((f"{name}.", child) for name, child in module._modules.items() if child is not None)
    return {
        prefix + name: value
        for prefix, one in (("", module), *inside)
        for name, value in (*one._parameters.items(), *one._buffers.items())
        if value is not None
    }


def dtypes_of(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Kind:
    """Of the input and of the parameters."""
    return (x.dtype, *(tensor.dtype for tensor in tensors.values()))


class RouterNumbers:
    """All float32, for the trials of one router. tensors: in the place of what it holds, by path; given: by callers;
    x: tokens, each 1 in one place, so that logits are read straight from the weights and reach far. Scores are so small
    that a limit of a sum shows. far: some logits lie so far from zero that 16 bits could not tell them apart.
    """

    def __init__(self, module: nn.Module, far: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        own = held(module)
        matrix = _matrix(own) or ""
        self.experts, self.hidden = own[matrix].shape
        if self.hidden < len(ROWS) + 8:
            raise ValueError(f"{self.hidden} inputs")
        self.tensors = {
            path: _logits(self.experts, self.hidden, far, generator) if path == matrix else
                  _small_and_large(tensor.numel(), generator).view(tensor.shape)
            for path, tensor in own.items()
        }  # fmt: skip
        self.given = _small_and_large(self.experts, generator)
        self.x = torch.eye(len(ROWS) + DENSE, self.hidden, device="cpu")
        self.x[len(ROWS) :, len(ROWS) :] = torch.randn(
            DENSE, self.hidden - len(ROWS), generator=generator, device="cpu"
        )


class RouterTrial:
    """A router's twin on the CPU. dtype: of tokens; stored: of what it holds, or None. numbers: see `RouterNumbers`."""

    def __init__(
        self,
        module: nn.Module,
        numbers: Callable[[bool], RouterNumbers],
        dtype: torch.dtype,
        stored: torch.dtype | None,
    ) -> None:
        self.module, self.many = module, len(stock_parameters(module))
        made, own = numbers(dtype == stored == torch.float32), held(module)
        self.experts, self.hidden = made.experts, made.hidden
        # Copied: a router may count in a buffer.
        self.tensors = {path: made.tensors[path].to(stored or one.dtype, copy=True) for path, one in own.items()}
        self.given, self.x = made.given.clone(), made.x.to(dtype)  # given: float32, as callers keep it
        places = {id(one): self.tensors[path] for path, one in own.items()}
        self.twin = twin(module, lambda tensor: places[id(tensor)])
        for one in self.twin.modules():
            vars(one)["training"] = False
        self.kind = dtypes_of(self.x, self.tensors)

    def run(self, dims: int) -> dict[int, torch.Tensor]:
        """What the twin returns, by place. Raises ValueError where these are not tensors."""
        x = self.x if dims == 2 else self.x.view(2, -1, self.hidden)
        output = type(self.twin).forward(self.twin, x.clone(), *(self.given,) * (self.many - 1))
        if type(output) is not tuple or not all(type(one) is torch.Tensor for one in output):
            raise ValueError("it returns something else than tensors")
        return dict(enumerate(output))

    def attempt(self, dims: int) -> dict[int, torch.Tensor] | None:
        """As `run`; None for inputs that it does not take."""
        try:
            return self.run(dims)
        except Exception as error:
            reason_of(error)
            return None

    def logits(self, weight: str, bias: str | None, wide: bool) -> torch.Tensor:
        shift = None if bias is None else self.tensors[bias]
        if wide:
            return F.linear(self.x.float(), self.tensors[weight].float(), None if shift is None else shift.float())
        return F.linear(self.x, self.tensors[weight], shift)

    def correction(self, path: str | None) -> torch.Tensor | None:
        return None if path is None else self.given if path == GIVEN else self.tensors[path].reshape(-1)


def _in_fp32(trial: RouterTrial) -> RouterFormula | str:
    output, deep = trial.attempt(2), trial.attempt(3)
    if output is None:
        dims: tuple[int, ...] = (3,)
        output = trial.run(3)
    else:
        alike = deep is not None and all(
            one.shape == deep[place].shape and bool((one == deep[place]).all()) for place, one in output.items()
        )
        dims = (2, 3) if alike else (2,)
    ints = [place for place, one in output.items() if one.dtype == torch.int64]
    if len(ints) != 1 or output[ints[0]].dim() != 2 or len(output[ints[0]]) != len(trial.x):
        return "it returns something else than choices of each token"
    index = output.pop(ints[0])
    ordered = index.sort().values
    if not bool((ordered >= 0).all() and (ordered < trial.experts).all() and (ordered.diff() > 0).all()):
        return "it chooses an expert twice, or none"
    weight = _matrix(trial.tensors) or ""
    others = [None, *(path for path in trial.tensors if path != weight)]
    for bias in others:
        logits = trial.logits(weight, bias, False)
        names = {place: _role(one, logits, index) for place, one in output.items()} | {ints[0]: INDEX}
        if sorted(names.values()) not in ([INDEX, LOGITS, SHARE], [INDEX, SHARE]):
            continue
        outputs = tuple(names[place] for place in sorted(names))
        shares = output[outputs.index(SHARE)]
        corrections = [path for path in others if path is None or path != bias] + [GIVEN] * (trial.many - 1)
        for path in corrections:
            rows = (one[: len(ROWS)] for one in (logits, index, shares))
            if (routing := _routing(trial.module, trial.correction(path), *rows)) is not None:
                return RouterFormula(weight, bias, path, routing, outputs, dims)
    return "it chooses in a way of its own"


def _routing(
    module: nn.Module, correction: torch.Tensor | None, logits: torch.Tensor, index: torch.Tensor, shares: torch.Tensor
) -> Routing | None:
    for routing in _ways_to_choose(module, index.shape[1], logits.shape[1]):
        scores = scores_of(logits, routing, logits.dtype)
        if not _as_good(logits, scores, routing, correction, index):
            continue
        for way in _ways_to_share(module, routing):
            if rows_agree(shares_of(logits, scores, index, way), shares):
                return way
    return None


def _rounded(trial: RouterTrial, formula: RouterFormula) -> RouterFormula | None:
    """The formula with what rounding it has in the dtypes of this trial; None where there is none."""
    given = trial.attempt(formula.dims[0])
    if given is None:  # of dtypes that it cannot multiply
        return None
    output = {name: given[place] for place, name in enumerate(formula.outputs)}
    index, shares, wanted = output[INDEX][: len(ROWS)], output[SHARE][: len(ROWS)], output.get(LOGITS)
    correction = trial.correction(formula.correction)
    operands = [path for path in (formula.weight, formula.bias) if path is not None]
    for wide, rounded in product((False, True), repeat=2):
        if not wide and any(trial.x.dtype != trial.tensors[path].dtype for path in operands):
            continue
        logits = trial.logits(formula.weight, formula.bias, wide)
        if wanted is not None and not rows_agree(logits, wanted, SHARES[torch.float32]):
            continue
        routing = formula.routing._replace(rounded=rounded)
        full = logits[: len(ROWS)].float()
        scores = scores_of(full, routing, logits.dtype)
        if _as_good(full, scores, routing, correction, index):
            found = shares_of(full, scores, index, routing).to(shares.dtype)
            if rows_agree(found, shares, bound(SHARES, shares.dtype)):
                kept = None if wanted is None else wanted.dtype
                return replace(formula, routing=routing, wide=wide, logits=kept, shares=shares.dtype)
    return None


def _ways_to_choose(module: nn.Module, chosen: int, experts: int) -> Iterator[Routing]:
    whole = dict.fromkeys(value for value in vars(module).values() if type(value) is int)
    grouped = [
        {"groups": groups, "kept": kept, "best": best, "outside": outside}
        for groups, kept, best, outside in product(whole, whole, (2, 1), (-torch.inf, 0.0))
        if 1 < groups < experts and 1 <= kept < groups and experts % groups == 0 and best <= experts // groups
        if kept * (experts // groups) >= chosen
    ]
    for more, score in product(({}, *grouped, {"by_logits": True}), ("none", "softmax", "sigmoid")):
        yield Routing(chosen, score, **more)


def _ways_to_share(module: nn.Module, routing: Routing) -> Iterator[Routing]:
    """By the numbers that the module holds, and those that stand in its code."""
    held_numbers = [float(value) for value in vars(module).values() if type(value) in (int, float)]
    codes = (getattr(one, "__code__", None) for one in methods(type(module)).values())
    written = [value for code in codes if code is not None for value in code.co_consts if type(value) is float]
    numbers = dict.fromkeys((*held_numbers, *written))
    small = [value for value in numbers if 0 < value < 1]
    if routing.score == "none":
        ways = [routing._replace(share="softmax"), routing]
    else:
        summed = routing._replace(share="sum")
        ways = [routing, summed, *(summed._replace(eps=value) for value in small)]
        ways += [summed._replace(floor=value) for value in small]
    for way, scale in product(ways, dict.fromkeys((1.0, *(value for value in numbers if value > 0)))):
        yield way._replace(scale=scale)


def _as_good(
    logits: torch.Tensor, scores: torch.Tensor, routing: Routing, correction: torch.Tensor | None, index: torch.Tensor
) -> bool:
    """Whether these are the largest, or some of equal ones: of scores, which may be equal where logits are not."""
    plain = correction is None and routing.groups == 1
    preferences = scores if plain else preferences_of(logits, scores, routing, correction)
    best = preferences.topk(index.shape[1]).values
    found = preferences.gather(1, index).sort(descending=True).values
    return rows_agree(found, best)


def _role(one: torch.Tensor, logits: torch.Tensor, index: torch.Tensor) -> str:
    if rows_agree(one, logits):
        return LOGITS
    return SHARE if one.shape == index.shape and one.is_floating_point() else ""


def _classes(module: nn.Module) -> tuple[type, ...]:
    return type(module), *map(type, module.children())


def _hashed(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _matrix(tensors: dict[str, torch.Tensor]) -> str | None:
    """The path of the one matrix; a row of numbers is none."""
    found = [path for path, tensor in tensors.items() if tensor.dim() == 2 and min(tensor.shape) > 1]
    return found[0] if len(found) == 1 else None


def _logits(experts: int, hidden: int, far: bool, generator: torch.Generator) -> torch.Tensor:
    """A matrix whose columns are the logits of tokens, no two equal, numbers of every dtype unless far from zero."""
    made = torch.zeros(experts, hidden, device="cpu")
    dense = made[:, len(ROWS) : len(ROWS) + SUMMED]
    dense.copy_(torch.randn(dense.shape, generator=generator, device="cpu") * SUMMED**-0.5)
    for column, (spread, middle, lead) in enumerate(ROWS):
        drawn = (torch.randn(16 * experts, generator=generator, device="cpu") * spread).bfloat16().float().unique()
        if len(drawn) < experts:
            raise ValueError(f"{experts} experts")
        drawn = drawn[torch.randperm(len(drawn), generator=generator, device="cpu")[:experts]]
        drawn[drawn.argmax()] += lead
        made[:, column] = drawn + middle if far else drawn.bfloat16().float()
    return made


def _small_and_large(many: int, generator: torch.Generator) -> torch.Tensor:
    """Biases that matter beside scores of every size. Below zero, so that other groups, if they count as 0, show."""
    return -(10 ** (-4 * torch.rand(many, generator=generator, device="cpu"))).bfloat16().float()
