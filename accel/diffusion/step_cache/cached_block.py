"""A block under the step cache, of a UNet or of a transformer."""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from accel.diffusion.step_cache.cache import StepCacheState
from accel.diffusion.step_cache.step_call import StepCall
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.ledger import Ledger


class CachedBlock(FastForward):
    """Outside of a call of the cache it runs as it is: by its fast forward, `inner`, or stock where it has none."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        kernels: Kernels,
        ledger: Ledger,
        state: StepCacheState,
        inner: FastForward | None,
    ) -> None:
        super().__init__(module, path, kernels, ledger)
        self.state, self.inner = state, inner
        self.names = tuple(self.__signature__.parameters)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else self.state.current
        if call is None:
            return self.whole(*args, **kwargs)
        return self.fast(call, *args, **kwargs)

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """The block itself."""
        return (self.inner or self.stock)(*args, **kwargs)

    def given(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip(self.names, args, strict=False)) | kwargs

    @abstractmethod
    def fast(self, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        """The block in a call of the cache."""
