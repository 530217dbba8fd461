"""A quantized weight as plain numbers, for an op that reads no others: written out, and again where it has changed."""

import torch
from torch.utils._pytree import tree_leaves

from accel.llm.parts.linear import Weights


class WrittenWeight:
    """numbers: (out, in) of this dtype, at an address that graphs read."""

    def __init__(self, linear: Weights, dtype: torch.dtype):
        self.linear, self.dtype, module = linear, dtype, linear.module
        with torch.inference_mode(False), torch.no_grad():  # else only such a mode could write them again
            self.numbers = self._read()
        leaves = tree_leaves((*module.parameters(), *module.buffers(), linear.operands()[0]))
        self.sources = [one for one in leaves if isinstance(one, torch.Tensor)]
        self.versions = self._versions()

    def write(self) -> None:
        """Writes them again."""
        self.numbers.copy_(self._read())

    def renew(self) -> None:
        """The same where what they are made of was changed in place since, as far as autograd counts."""
        now = self._versions()
        if now is None or now != self.versions:
            self.write()
            self.versions = now

    def follow(self, before: "WrittenWeight") -> None:
        """Lies from now on where this one lay, which it replaces: graphs of earlier states of the model read there."""
        mine, theirs = self.numbers, before.numbers
        if (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device):
            self.numbers = theirs.copy_(mine)

    def _read(self) -> torch.Tensor:
        return self.linear.operands()[0].dequantized(self.dtype)

    def _versions(self) -> tuple[int, ...] | None:
        """None where inference mode made one of them, which counts nothing."""
        try:
            return tuple([one._version for one in self.sources])
        except RuntimeError:
            return None
