"""Which calls of a model that packs its tokens become one graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel.fusion.loop import PerThread

MOST_TOKENS = 1024  # beyond, kernels take longer than their launches
TOKENS = ("input_ids", "inputs_embeds")
MASK = "attention_mask"
# Of what is packed too.
MASKS = (
    "pixel_attention_mask", "patch_attention_mask", "input_features_mask", "pixel_position_ids", "image_position_ids",
)  # fmt: skip


class SmallCalls(PerThread):
    """Calls of few tokens without padding, which one graph of the whole forward serves; of others the layers alone have
    graphs, by how many tokens are packed.

    packed: whether the model packs its tokens, so that it matters. weighs: whether it computes with the numbers of its
    mask, of which 1 alone shows a token. `unpadded`: this thread is in such a small call.
    """

    copied = "packed", "weighs"
    packed = weighs = False

    @property
    def unpadded(self) -> bool:
        return getattr(self._local, "unpadded", False)

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._local.unpadded = self.packed
        try:
            yield
        finally:
            self._local.unpadded = False

    def takes(self, given: dict[str, Any]) -> bool:
        """Whether such a call, of a model that packs, may be one graph. Waits for the GPU where there is a mask."""
        tokens = next((given[name] for name in TOKENS if isinstance(given.get(name), torch.Tensor)), None)
        mask = given.get(MASK)
        if any(given.get(name) is not None for name in MASKS) or (tokens is None and mask is not None):
            return False
        if tokens is None:  # images, of which no patch is padding
            return True
        if tokens.shape[:2].numel() > MOST_TOKENS:
            return False
        if not isinstance(mask, torch.Tensor):
            return mask is None
        return mask.dim() == 2 and bool((mask == 1 if self.weighs else mask).all())
