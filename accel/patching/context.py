"""What a rule may use besides its site: options, kernels, the probe, and what the sites of a model share."""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from accel.options import Options
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import Kernels
from accel.patching.probe import Probe

T = TypeVar("T")


@dataclass
class Context:
    """Of one model. shared: objects that several sites use, by class, so that copies and pickles find them again. Its
    first map is the model's own, the second is common to all models that are optimized together.
    """

    options: Options
    kernels: Kernels
    log: FallbackLog
    probe: Probe = field(default_factory=Probe)
    graph_paths: tuple[str, ...] = ()
    shared: ChainMap[type, object] = field(default_factory=lambda: ChainMap({}, {}))

    def for_model(self) -> "Context":
        """The context of one more model: calls are counted apart, and its sites share nothing yet."""
        return replace(self, log=FallbackLog(), shared=ChainMap({}, self.shared.maps[-1]))

    def of(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """The one object of this class that the sites share; made when first asked for, as `kind()` unless told how."""
        found = self.find(kind)
        return self.put(kind() if make is None else make()) if found is None else found

    def find(self, kind: type[T]) -> T | None:
        """As `of`; None where there is none yet."""
        found = self.shared.get(kind)
        return found if isinstance(found, kind) else None

    def put(self, one: T) -> T:
        """From now on the sites of the model share this object, under its class."""
        self.shared[type(one)] = one
        return one
