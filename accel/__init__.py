"""accel: make Hugging Face pipelines and models fast without changing the code that calls them.

>>> import accel
>>> accel.optimize(pipe)  # the same object, faster
>>> print(accel.report(pipe))
>>> accel.restore(pipe)  # exactly the stock object again
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel import errors
    from accel.api import Report, load, optimize, optimized, quantize, report, restore, verify
    from accel.options import Options
    from accel.patching.user_ops import register_op
    from accel.verification.metrics import Quality
else:  # there is nothing else to a type checker

    def __getattr__(name: str) -> Any:
        """What `import accel` gives, loaded with torch when it is first asked for: the command's help needs neither."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in MODULES:
            return import_module(f"{__name__}.{name}")
        module = HOMES.get(name, "api")
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value


__version__ = "0.1.0"
__all__ = [
    "Options",
    "Quality",
    "Report",
    "__version__",
    "errors",
    "load",
    "optimize",
    "optimized",
    "quantize",
    "register_op",
    "report",
    "restore",
    "verify",
]

# Where they stand that are not functions of `api`.
HOMES = {"Options": "options", "Quality": "verification.metrics", "register_op": "patching.user_ops"}
MODULES = ("errors",)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class Package(ModuleType):
    """This package. Some functions are called as the module they stand in, such as `report`: Python sets a module it
    has loaded as an attribute of the package, and the function's name stays the function's."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in MODULES or not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = Package
