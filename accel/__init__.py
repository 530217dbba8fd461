"""accel: make Hugging Face pipelines and models fast without changing the code that calls them.

>>> import accel
>>> accel.optimize(pipe)  # the same object, faster
>>> print(accel.report(pipe))
>>> accel.restore(pipe)  # exactly the stock object again
"""

from accel.api import Report, load, optimize, optimized, quantize, report, restore, verify
from accel.options import Options
from accel.quality import Quality

__version__ = "0.1.0"
__all__ = [
    "Options",
    "Quality",
    "Report",
    "__version__",
    "load",
    "optimize",
    "optimized",
    "quantize",
    "report",
    "restore",
    "verify",
]
