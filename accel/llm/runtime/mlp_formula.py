"""The MLP of a recorded layer: projections around an activation, a sum of blocks, or a mixture of experts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product

import torch
from accel_kernels.norm.norm import ACTIVATIONS

from accel.comparison import agree, is_sum
from accel.libraries.adapters import base
from accel.llm.attention.linear.linear_finder import multiplies
from accel.llm.parts.activation import activation_name
from accel.llm.parts.norm import norm_spec, normlike
from accel.llm.parts.normed_router import understand_router
from accel.llm.recording.record import NOTHING_STORED, Call, LayerRecord, NotUnderstood, Value, is_absent
from accel.llm.runtime.mlp import MlpSpec
from accel.patching.guard import plain_settings


def understand_mlp(layer: LayerRecord, others: Sequence[Call] = ()) -> tuple[MlpSpec | None, tuple[Call, ...]]:
    """The MLP of a recorded layer, and the calls of its modules: first the one that is given its input and the one that
    gives its output. others: calls of something else. None where the layer has nothing besides the attention that could
    be one. Raises NotUnderstood where it has none that can be told from the rest, or neither.
    """
    mixer = layer.mixers[-1] if layer.mixes else None
    around = {module for module in layer.layer.modules() if any(m in layer.mixers for m in module.modules())}
    around |= {call.module for call in others}
    mine = [call for call in layer.inside(layer.layer) if call.module not in around]
    if mixer is not None and not any(multiplies(call.module) for call in mine):
        return None, ()
    containers = [call for call in mine if multiplies(call.module) and base(call.module)._modules]
    if len(containers) > 1:
        inside = {module for call in containers for module in call.module.modules()}
        several = None
        if mixer is not None:
            several = _several(layer, mine, containers)
            several = several or _formula(layer, [call for call in layer.calls if call.module in inside], None)
        if several is None:
            raise NotUnderstood(NOTHING_STORED if mixer is None else "more than one block besides the attention")
        return several
    whole = containers[0] if containers else None
    found = _formula(layer, mine if whole is None else layer.inside(whole.module), whole)
    known = None if layer.known is None else layer.known.mlp
    if found is None and whole is not None and (known is None or known.first):  # rounding may hide what is added
        found = _with_residual(layer, whole)
    if found is not None:
        return found
    if whole is None:
        raise NotUnderstood(NOTHING_STORED if mixer is None else "no MLP that is known")
    given = (*whole.args, *whole.kwargs.values())
    if mixer is None and not all(is_absent(value) or isinstance(value, torch.Tensor) for value in given):
        raise NotUnderstood(NOTHING_STORED)  # but it is given a cache, or something else than its input
    if not whole.alone or whole.made is None:
        raise NotUnderstood("its MLP takes more than one tensor")
    if (found := _unnamed(layer, whole)) is not None:
        return found
    spec = _mixture(layer, whole) if layer.known is None or (known is not None and known.around) else None
    return spec or MlpSpec(layer.name(whole.module)), (whole, whole)


def _with_residual(layer: LayerRecord, whole: Call) -> tuple[MlpSpec, tuple[Call, ...]] | None:
    """The MLP inside a module that adds its own input to what that gives."""
    for call in layer.inside(whole.module):
        found = _formula(layer, layer.inside(call.module), call) if multiplies(call.module) else None
        if found is not None and whole.made is not None:
            x, given, total = whole.input.held, found[1][1].output.held, whole.output.held
            if x.shape == given.shape == total.shape and is_sum(x, given, 1.0, total):
                return found
    return None


def _mixture(layer: LayerRecord, whole: Call) -> MlpSpec | None:
    """A module that adds what experts give and what an MLP beside them gives, both of its own input."""
    x, y, calls = whole.input, whole.output.held, layer.inside(whole.module)
    width = y.shape[-1]
    sized = [call for call in calls if call.made is not None and call.output.held.numel() == y.numel()]
    alone = [call for call in calls if call.alone and call.input.same(x)]
    gates = [call for call in alone if call.made is not None and call.output.held.numel() * width == y.numel()]
    for experts in (call for call in sized if len(call.args) == 3 and not call.kwargs and call.input.same(x)):
        for router, shared, gate in product(
            alone, [call for call in sized if call.alone and call.input.same(x)], (None, *gates)
        ):
            results = router.result if isinstance(router.result, tuple) else ()
            places = [n for arg in experts.args[1:] for n, one in enumerate(results) if one is arg]
            found = _formula(layer, layer.inside(shared.module), shared) if len(places) == 2 else None
            if found is None or not isinstance(whole.result, torch.Tensor) or experts.input.held.dim() != 2:
                continue
            spec, (first, down, *_) = found
            given = shared.output.held.reshape(-1, width)
            if gate is not None:
                given = gate.output.held.reshape(-1, 1).sigmoid() * given
            base, total = experts.output.held.reshape(given.shape), y.reshape(given.shape)
            added = torch.equal(base + given, total) if layer.known is None else is_sum(base, given, 1.0, total)
            if added and first.input.same(x) and down.output.same(shared.made):
                own = (layer.name(whole.module), plain_settings(whole.module))
                return MlpSpec(
                    layer.name(experts.module),
                    settings=(own, *spec.settings),
                    beside=(replace(spec, settings=(), gate="" if gate is None else layer.name(gate.module)),),
                    around=own[0],
                    router=layer.name(router.module),
                    flat=router.input.held.dim() == 2,
                    chosen=(places[0], places[1]),
                )
    return None


def _several(layer: LayerRecord, mine: list[Call], containers: list[Call]) -> tuple[MlpSpec, tuple[Call, ...]] | None:
    """Blocks that all take the same, or norms of it, and whose results, or norms of these, are added."""
    norms = [call for call in mine if normlike(layer, call)]
    routed = {id(call): found for call in containers if (found := _router(call, containers)) is not None}
    routers = [router for router, _ in routed.values()]
    specs: list[MlpSpec] = []
    inner: list[Call] = []
    taken: list[tuple[Call | None, Value]] = []
    given: list[torch.Tensor] = []
    for call in containers:
        if any(call is router for router in routers):
            continue
        spec, (begin, end, *more) = MlpSpec(layer.name(call.module)), (call, call)
        if id(call) in routed:
            router, chosen = routed[id(call)]
            route = understand_router(layer, router)
            spec = replace(spec, router=layer.name(router.module), chosen=chosen, route=route)
            more = [router]
        elif not call.alone or call.made is None:
            return None
        else:
            spec, (begin, end, *more) = _formula(layer, layer.inside(call.module), call) or (spec, (call, call))
        post = next((norm for norm in norms if norm.input.same(end.made)), None)
        specs.append(spec if post is None else replace(spec, post=norm_spec(layer, post)))
        taken.append((next((norm for norm in reversed(norms) if norm.output.same(begin.taken)), None), begin.input))
        given.append((end if post is None else post).output.held)
        inner += [begin, end, *more, *([] if post is None else [post])]
    start = taken[0][1]
    if not all(one.same(start) for one in (*(value for _, value in taken), *(router.input for router in routers))):
        start = taken[0][1] if taken[0][0] is None else taken[0][0].input
        for place, (norm, value) in enumerate(taken):
            if not start.same(value if norm is None else norm.input):
                return None
            if norm is not None:
                specs[place] = replace(specs[place], before=norm_spec(layer, norm))
                inner.append(norm)
    if not all(router.input.same(start) for router in routers) or len({one.numel() for one in given}) > 1:
        return None
    total = torch.stack([one.double().flatten() for one in given]).sum(0)
    x = layer.call.output.held
    if total.numel() != x.numel():
        return None
    total = total.view(x.shape).to(x.dtype)
    normed = (norm.input for norm in norms if norm.input.held.shape == x.shape and agree(total, norm.input.held))
    begin, end = replace(inner[0], taken=start), replace(inner[0], made=next(normed, Value(total)))
    return replace(specs[0], beside=tuple(specs[1:])), (begin, end, *inner)


def _router(call: Call, others: list[Call]) -> tuple[Call, tuple[int, ...]] | None:
    """The call among others that gave a call what it takes besides a tensor, and at which places of its result."""
    x, *more = (*call.args, *call.kwargs.values())
    for other in others:
        result = other.result if isinstance(other.result, tuple) else ()
        places = [next((n for n, one in enumerate(result) if one is value), None) for value in more]
        if other is not call and other.alone and places and None not in places and isinstance(x, torch.Tensor):
            return other, tuple(place for place in places if place is not None)
    return None


def _formula(layer: LayerRecord, calls: list[Call], whole: Call | None) -> tuple[MlpSpec, tuple[Call, ...]] | None:
    calls = [call for call in calls if call.alone and call.made is not None]
    products = [call for call in calls if multiplies(call.module) and call.output.held.shape[-1] > 1]
    for act in calls:
        name = None if list(act.module.parameters()) else activation_name(act.module)
        for down in products if name is not None else ():
            others = [call for call in products if call is not down]
            first, halves, scale = _before(act, down, others, whole)
            inner = None if first else next((one for one in calls if one.output.same(down.taken)), None)
            if inner is not None and normlike(layer, inner):
                first, halves, scale = _before(act, inner, others, whole)
            if first:
                looked_at = (act,) if whole is None else (act, whole)
                spec = MlpSpec(
                    "" if whole is None else layer.name(whole.module),
                    alone=whole is None or (whole.alone and _gives(whole, down)),
                    first=tuple(layer.name(call.module) for call in first),
                    down=layer.name(down.module),
                    activation=name or "",
                    settings=tuple((layer.name(call.module), plain_settings(call.module)) for call in looked_at),
                    halves=halves,
                    scale=scale,
                    inner=None if inner is None else norm_spec(layer, inner),
                )
                return spec, (first[0], down, *first[1:], *looked_at, *([] if inner is None else [inner]))
    for up, down in permutations(products, 2) if whole is None else ():
        y, given = up.output.held, down.input.held
        names = [name for name, f in ACTIVATIONS.items() if y.shape == given.shape and agree(f(y), given)]
        if len(names) == 1:  # a function, as in ESM
            return MlpSpec(first=(layer.name(up.module),), down=layer.name(down.module), activation=names[0]), (
                up,
                down,
            )
    return None


def _unnamed(layer: LayerRecord, whole: Call) -> tuple[MlpSpec, tuple[Call, ...]] | None:
    """A gated MLP whose activation is no module: the only one by which its projections give what its last one takes."""
    calls = [call for call in layer.inside(whole.module) if call.alone and call.made is not None]
    first = [call for call in calls if call.input.same(whole.input)]
    known = None if layer.known is None or layer.known.mlp is None else layer.known.mlp.activation
    for down in (call for call in calls if call.output.same(whole.made) and len(calls) == 3):
        for gate, up in permutations(first, 2):
            y, given = gate.output.held, up.output.held
            if not y.shape == given.shape == down.input.held.shape:
                continue
            names = [name for name, f in ACTIVATIONS.items() if agree(f(y) * given, down.input.held)]
            if known in names or (layer.known is None and len(names) == 1):
                own = (layer.name(whole.module), plain_settings(whole.module))
                named = tuple(layer.name(call.module) for call in (gate, up))
                chosen = names[0] if known is None else known
                spec = MlpSpec(own[0], first=named, down=layer.name(down.module), activation=chosen, settings=(own,))
                return spec, (gate, down, up, whole)
    return None


def _gives(whole: Call, down: Call) -> bool:
    """Whether the module gives what its last projection does, and not a multiple of it."""
    given, made = down.output.held, None if whole.made is None else whole.made.held
    return made is not None and made.numel() == given.numel() and torch.equal(made.flatten(), given.flatten())


def _before(
    act: Call, down: Call, products: list[Call], whole: Call | None
) -> tuple[tuple[Call, ...], bool | None, float]:
    """Projections between the MLP's input and `down` or its norm, whether one holds gate and up, the gate's scale."""
    acted, taken = act.output.held, down.input.held
    held = () if whole is None else (x for x in vars(whole.module).values() if type(x) is float)
    numbers = tuple(dict.fromkeys((1.0, *held)))
    for gate in products:
        y = gate.output.held
        scale = next((x for x in numbers if y.shape == acted.shape and torch.equal(act.input.held, y * x)), None)
        if scale is not None:
            if scale == 1.0 and agree(acted, taken):
                return (gate,), None, scale
            for up in products:
                if up is not gate and up.input.same(gate.input) and up.output.held.shape == y.shape:
                    if agree(acted * up.output.held, taken):
                        return (gate, up), None, scale
        for gate_first, (first, second) in ((True, y.chunk(2, dim=-1)), (False, reversed(y.chunk(2, dim=-1)))):
            if first.shape == acted.shape == taken.shape and torch.equal(first, act.input.held):
                if agree(acted * second, taken):
                    return (gate,), gate_first, 1.0
    return (), None, 1.0
