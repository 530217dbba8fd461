"""Operations that a user put in the place of accel's own.

They are held in a context variable, so that they end with a `with`, and do not affect models of other threads.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from accel_kernels import Op
from accel_kernels.accuracy import Wrong, check

from accel.patching.fast_forward import Kernels


@dataclass(frozen=True, eq=False)
class UserOp:
    """A user's function in the place of an op, which runs where the function returns NotImplemented."""

    op: Op
    function: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        return self.op(*args, **kwargs) if result is NotImplemented else result

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def reference(self) -> Callable:
        return self.op.reference

    @property
    def supports(self) -> Callable:
        return self.op.supports

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{getattr(self.function, '__module__', None) or type(self.function).__module__}.{name}"


REGISTERED: ContextVar[tuple[UserOp, ...]] = ContextVar("accel_user_ops", default=())  # the last of a name counts


class Registration:
    """What `register_op` returns: `remove()` ends it, and so does leaving a `with`."""

    def __init__(self, op: UserOp):
        self.op = op
        REGISTERED.set((*REGISTERED.get(), op))

    def remove(self) -> None:
        """Models optimized from now on run what they would without it. Does nothing a second time."""
        REGISTERED.set(tuple(op for op in REGISTERED.get() if op is not self.op))

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def register_op(name: str, function: Callable) -> Registration:
    """Puts function in the place of one of accel's operations, in all models that are optimized from now on.

    name: an op of `accel_kernels` that fused forwards call, such as "rms_norm" or "fused_linear". function: takes what
    `accel_kernels.<name>.reference` takes and returns what that returns, in new memory. For a call that it leaves to
    accel's own op it returns NotImplemented, such as for tensors on a CPU where it launches a kernel of a GPU. It must
    allow to be captured into a CUDA graph, unless graphs=False; models are pickled if it can be.
    Returns a handle whose `remove()` ends it; `with accel.register_op(name, function): ...` ends it by itself. Of two
    functions for one op the last counts. It holds in this thread, and in the tasks that are started from it.
    A model keeps the operations that it was optimized with, in its CUDA graphs too, until `accel.optimize` or
    `accel.restore` is called on it: to use the function in a model that is optimized already, optimize it again; to be
    rid of it, do so after `remove()`. `accel.report` names it.
    A norm that is replaced is called by itself, where accel would have fused it with the product after it.
    A function for "quantized_linear" is called by the fused layers of language models; a quantized linear that stands
    alone, or in an image model, calls accel's own.
    The function is called on the op's own cases, on the CPU and the GPU if there is one, in float32, float16 and
    bfloat16. Raises ValueError for another name, and where it took none of these calls, or raised. So it does where the
    result is further from float64 than twice torch's own error in that dtype. Nothing is registered then.
    """
    ops = replaceable()
    if name not in ops:
        raise ValueError(f"no op {name!r} can be replaced; those that can: {', '.join(sorted(ops))}")
    op = UserOp(ops[name], function)
    try:
        taken = check(op.op, function)
    except Wrong as wrong:
        raise ValueError(f"{op} cannot replace {name}: {wrong}") from wrong
    if not taken:
        raise ValueError(f"{op} cannot replace {name}: it returned NotImplemented for each of the cases here")
    return Registration(op)


def replaceable() -> dict[str, Op]:
    """The ops that fused forwards call, by name."""
    return {one.name: one.default for one in fields(Kernels) if isinstance(one.default, Op)}


def registered() -> dict[str, UserOp]:
    """What counts now, by the op's name."""
    return {op.name: op for op in REGISTERED.get()}
