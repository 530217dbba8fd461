"""What a router computes: candidates compared with its own forward, on a copy with weights made to tell them apart.

Whatever a router is called and returns, it multiplies tokens by one matrix, chooses by a score of these logits, and
gives choices and their shares. Which score, bias, groups, sum, limit and factor, is found in two steps: by what it
chose, and then by the shares of that. Numbers are those that it holds or that stand in its code.

Choices need not be equal, but as good: rounding makes equal scores, of which anybody may take any.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from accel_kernels.moe.route import Routing, preferences_of, scores_of, shares_of
from torch import nn

from accel.errors import reason_of
from accel.llm.analysis.router_trial import GIVEN, ROWS, Kind, RouterNumbers, RouterTrial, held, matrix_of
from accel.patching.guard import BASE
from accel.patching.structure import mentioned, methods
from accel.quantization.experts import stock_parameters
from accel.tolerances import SHARES, bound

LOGITS, INDEX, SHARE = "logits", "index", "shares"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
    matrix = matrix_of(tensors)
    if matrix is None or len(tensors) > 3 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        return False
    experts = tensors[matrix].shape[0]
    others = [tensor for path, tensor in tensors.items() if path != matrix]
    if any(tensor.numel() != experts for tensor in others) or not 1 <= len(stock_parameters(module)) <= 2:
        return False
    return "topk" in mentioned(_kinds(module))


def router_settings(module: nn.Module) -> tuple:
    """All that can make the formulas of two routers differ; to be hashed."""
    names = mentioned(_kinds(module))
    own = ((name, value) for name, value in vars(module).items() if name not in BASE and name in names)
    values = tuple((name, type(value), _hashed(value)) for name, value in own)
    tensors = tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in held(module).items())
    return (*_kinds(module), values, tensors)


def router_formulas(module: nn.Module) -> Formulas | str:
    """By the dtypes they hold for: those of now, and those after a `.to(dtype)`. Else why there is none."""
    if "config" in mentioned(_kinds(module)):
        return "reads its configuration at each call"
    try:
        with torch.no_grad():
            numbers = cache(partial(RouterNumbers, module))
            formula = _found(RouterTrial(module, numbers, torch.float32))
            if isinstance(formula, str):
                return formula
            return dict(_in_dtypes(module, numbers, formula))
    except Exception as error:  # a router that takes, or gives, something else
        return f"could not be examined: {reason_of(error)}"


def _found(trial: RouterTrial) -> RouterFormula | str:
    """The formula, in fp32."""
    dims, output = _dims(trial)
    ints = [place for place, one in output.items() if one.dtype == torch.int64]
    if len(ints) != 1 or output[ints[0]].dim() != 2 or len(output[ints[0]]) != len(trial.x):
        return "it returns something else than choices of each token"
    index = output.pop(ints[0])
    if not _distinct(index, trial.experts):
        return "it chooses an expert twice, or none"
    weight = matrix_of(trial.tensors) or ""
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
            routing = _routing(trial.module, trial.correction(path), *rows)
            if routing is not None:
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
            if near(shares_of(logits, scores, index, way), shares):
                return way
    return None


def _in_dtypes(
    module: nn.Module, numbers: Callable[[bool], RouterNumbers], formula: RouterFormula
) -> Iterator[tuple[Kind, RouterFormula]]:
    """The formula with what rounding it has, for dtypes of inputs and of what is stored; where there is one."""
    # Some keep their weights in float32, whatever the model has.
    cases = [(dtype, stored) for dtype in FLOATS for stored in (None, dtype)]
    done: set[Kind] = set()
    for dtype, stored in cases:
        trial = RouterTrial(module, numbers, dtype, stored)
        if trial.kind not in done:
            done.add(trial.kind)
            try:
                output = trial.run(formula.dims[0])
            except Exception as error:  # of dtypes that it cannot multiply
                reason_of(error)
                continue
            found = _rounded(trial, formula, {name: output[place] for place, name in enumerate(formula.outputs)})
            if found is not None:
                yield trial.kind, found


def _rounded(trial: RouterTrial, formula: RouterFormula, output: dict[str, torch.Tensor]) -> RouterFormula | None:
    index, shares, wanted = output[INDEX][: len(ROWS)], output[SHARE][: len(ROWS)], output.get(LOGITS)
    correction = trial.correction(formula.correction)
    operands = [path for path in (formula.weight, formula.bias) if path is not None]
    for wide, rounded in product((False, True), repeat=2):
        if not wide and any(trial.x.dtype != trial.tensors[path].dtype for path in operands):
            continue
        logits = trial.logits(formula.weight, formula.bias, wide)
        if wanted is not None and not near(logits, wanted, SHARES[torch.float32]):
            continue
        routing = formula.routing._replace(rounded=rounded)
        full = logits[: len(ROWS)].float()
        scores = scores_of(full, routing, logits.dtype)
        if _as_good(full, scores, routing, correction, index):
            found = shares_of(full, scores, index, routing).to(shares.dtype)
            if near(found, shares, bound(SHARES, shares.dtype)):
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
    for more, score in product(({}, *grouped), ("none", "softmax", "sigmoid")):
        yield Routing(chosen, score, **more)


def _ways_to_share(module: nn.Module, routing: Routing) -> Iterator[Routing]:
    numbers = _numbers(module)
    scales = dict.fromkeys((1.0, *(value for value in numbers if value > 0)))
    small = [value for value in numbers if 0 < value < 1]
    if routing.score == "none":
        ways = [routing._replace(share="softmax"), routing]
    else:
        summed = routing._replace(share="sum")
        ways = [routing, summed, *(summed._replace(eps=value) for value in small)]
        ways += [summed._replace(floor=value) for value in small]
    for way, scale in product(ways, scales):
        yield way._replace(scale=scale)


def _numbers(module: nn.Module) -> list[float]:
    """What it holds, and what stands in its code."""
    own = [float(value) for value in vars(module).values() if type(value) in (int, float)]
    codes = (getattr(one, "__code__", None) for one in methods(type(module)).values())
    written = [value for code in codes if code is not None for value in code.co_consts if type(value) is float]
    return list(dict.fromkeys((*own, *written)))


def _as_good(
    logits: torch.Tensor, scores: torch.Tensor, routing: Routing, correction: torch.Tensor | None, index: torch.Tensor
) -> bool:
    """Whether these are the largest, or some of equal ones: of scores, which may be equal where logits are not."""
    plain = correction is None and routing.groups == 1
    preferences = scores if plain else preferences_of(logits, scores, routing, correction)
    best = preferences.topk(index.shape[1]).values
    found = preferences.gather(1, index).sort(descending=True).values
    return near(found, best)


def near(found: torch.Tensor, wanted: torch.Tensor, allowed: float = SHARES[torch.float32]) -> bool:
    """Whether no number of a row is further off than so much of its largest."""
    if found.shape != wanted.shape:
        return False
    found, wanted = found.float(), wanted.float()
    return bool(((found - wanted).abs() <= allowed * wanted.abs().amax(-1, keepdim=True)).all())


def _role(one: torch.Tensor, logits: torch.Tensor, index: torch.Tensor) -> str:
    if near(one, logits):
        return LOGITS
    return SHARE if one.shape == index.shape and one.is_floating_point() else ""


def _dims(trial: RouterTrial) -> tuple[tuple[int, ...], dict[int, torch.Tensor]]:
    """Of inputs that it takes and makes rows of, and what it returns. Raises what it raises where it takes none."""
    flat = _attempt(lambda: trial.run(2))
    if isinstance(flat, Exception):
        return (3,), trial.run(3)
    deep = _attempt(lambda: trial.run(3))
    same = isinstance(deep, dict) and all(
        one.shape == deep[place].shape and bool((one == deep[place]).all()) for place, one in flat.items()
    )
    return ((2, 3) if same else (2,)), flat


def _attempt(run: Callable[[], dict]) -> dict | Exception:
    try:
        return run()
    except Exception as error:  # of inputs that it does not take
        reason_of(error)
        return error


def _distinct(index: torch.Tensor, experts: int) -> bool:
    ordered = index.sort().values
    return bool((ordered >= 0).all() and (ordered < experts).all() and (ordered.diff() > 0).all())


def _kinds(module: nn.Module) -> tuple[type, ...]:
    return type(module), *map(type, module.children())


def _hashed(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
