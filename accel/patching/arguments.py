"""Which calls of a stock forward its fast forward takes too, told without calling either."""

import inspect
import sys
from collections.abc import Callable
from inspect import Parameter

NOWHERE = sys.maxsize  # the position of an argument that has none


class Arguments:
    """The calls that two methods accept with the same meaning.

    Positional arguments after the first must have the same names in both. A name of one may be taken by `**` of the
    other; extra positional arguments, if both have `*`. A fast method of `*args, **kwargs` alone takes all of stock's.
    names: of the stock forward's positional parameters.
    """

    def __init__(self, stock: Callable, fast: Callable):
        ours, theirs = _Parameters(fast), _Parameters(stock)
        self.names = tuple(theirs.order)
        self.places = {name: place for name, place in theirs.places.items() if name in ours.places or ours.open}
        if theirs.open:
            self.places = {name: NOWHERE for name in ours.places} | self.places
        self.open = ours.open and theirs.open
        self.most = _alike(ours, theirs)
        required = ours.required | theirs.required
        # The first argument may have two names; given by name, one of the methods would not know it.
        self.required = tuple((name if name in self.places else None, place) for name, place in required.items())

    def take(self, args: tuple, kwargs: dict) -> bool:
        """Whether both methods take this call. Called before every fast forward, so it is kept cheap."""
        given = len(args)
        if given > self.most:
            return False
        for name in kwargs:
            place = self.places.get(name)
            if place is None:
                if not self.open:
                    return False
            elif place < given:
                return False
        for name, place in self.required:
            if place >= given and name not in kwargs:
                return False
        return True


class _Parameters:
    """The parameters of a method but for self. places: of those that can be named, by name: the position, if any."""

    def __init__(self, method: Callable):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        single = [one for one in parameters if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        self.order = [one.name for one in single if one.kind is not Parameter.KEYWORD_ONLY]
        places = {one.name: NOWHERE for one in single} | {name: place for place, name in enumerate(self.order)}
        self.required = {one.name: places[one.name] for one in single if one.default is Parameter.empty}
        self.places = {one.name: places[one.name] for one in single if one.kind is not Parameter.POSITIONAL_ONLY}
        kinds = {one.kind for one in parameters}
        self.open, self.many = Parameter.VAR_KEYWORD in kinds, Parameter.VAR_POSITIONAL in kinds


def _alike(ours: _Parameters, theirs: _Parameters) -> int:
    """How many positional arguments mean the same in both."""
    if ours.many and not ours.order:
        return NOWHERE if theirs.many else len(theirs.order)
    pairs = list(zip(ours.order, theirs.order, strict=False))
    same = next((place for place, (a, b) in enumerate(pairs) if place and a != b), len(pairs))
    everything = same == len(ours.order) == len(theirs.order)
    return NOWHERE if everything and ours.many and theirs.many else same
