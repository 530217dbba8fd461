"""The layers of an encoder, run all at once when the model's own code calls the last of them."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from accel.encoders.bidirectional_attention import BidirectionalSpec
from accel.encoders.packing import Packing, PaddedRows, packed, unpadded
from accel.encoders.position_bias import PositionBias
from accel.encoders.windows import Windows, seen_windows
from accel.errors import Unfit
from accel.libraries.attention import LONGEST, MASK
from accel.llm.attention.position_terms import POSITIONS
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.parts.step import Step
from accel.llm.recording.record import form, is_absent
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings

HIDDEN_STATES = "output_hidden_states"


class EncoderStep(Step):
    """One call of an encoder. Layers note what they are given, and hand on what the first one was given.

    So the layers run on packed tokens, and the code around them sees none of it. run: computes the layers that were
    called since it did so last, of the first one's input and of each one's keywords: all, or those up to one of
    `stops`, numbers of layers behind which somebody looks at what they gave. None where nothing is padding: then each
    runs when it is called, and what it gives may be looked at. begun: layers that have been computed. shape: (B, L) of
    the call; ids: of its words, where it is given these; padded: what the GPU was asked of its mask; packing: of its
    tokens. blind: see `shown`. biases: see `EncoderForward`; tables: what `bias` has made of them; packings: what
    `packed` has. shows: each layer's hidden states to the caller. windows: of the layer that runs; seen: those of
    layers before, by what their code was told.
    """

    __slots__ = (
        "begun", "biases", "blind", "calls", "hidden", "ids", "layers", "packing", "packings", "padded", "run", "seen",
        "shape", "shows", "stops", "tables", "windows",
    )  # fmt: skip
    packing: Packing
    windows: Windows

    def __init__(
        self,
        layers: "list[EncoderLayerForward]",
        run: Callable[["EncoderStep"], torch.Tensor] | None,
        biases: dict,
        stops: Collection[int] = (),
    ):
        super().__init__({})
        self.layers, self.run, self.biases, self.stops, self.begun = layers, run, biases, stops, 0
        self.blind = self.shows = False
        self.tables: dict[str, torch.Tensor] = {}
        self.packings: dict[int, tuple[Any, Packing]] = {}
        self.seen: dict[tuple, Windows] = {}
        self.calls: list[dict[str, Any]] = []
        self.hidden: torch.Tensor | None = None
        self.ids: torch.Tensor | None = None
        self.padded: PaddedRows | None = None

    def prepared(self) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor]]:
        """The rotations that were made so far, and where sequences begin as layers were told."""
        return [made for _, made in self._angles.values()], [one.starts for _, one in self.packings.values()]

    def settle(self, packing: Packing) -> None:
        """Takes this, of which rotations were made for more tokens."""
        self.packing = packing
        cut = {
            key: (source, tuple(one[0, : packing.size][None] for one in made))
            for key, (source, made) in self._angles.items()
        }
        self._angles = cut

    def prepare(self, angles: list[tuple[torch.Tensor, ...]], starts: list[torch.Tensor]) -> None:
        """Takes these in their place, and makes tables anew: a graph has its own."""
        self.tables = {}
        self._angles = {
            key: (source, made) for (key, (source, _)), made in zip(self._angles.items(), angles, strict=True)
        }
        held = zip(self.packings.items(), starts, strict=True)
        self.packings = {key: (told, one._replace(starts=mine)) for (key, (told, one)), mine in held}

    @property
    def rows(self) -> torch.Tensor:
        """What its layers are given, (B, L, C); tokens without rows are one."""
        assert self.hidden is not None
        return self.hidden.reshape(-1, *self.hidden.shape[-2:])

    @property
    def waiting(self) -> "list[tuple[EncoderLayerForward, dict[str, Any]]]":
        """Layers that were called and not computed, with their keywords."""
        return list(zip(self.layers, self.calls, strict=False))[self.begun :]

    @property
    def shown(self) -> torch.Tensor | None:
        """(B, L), the tokens that all see by the mask that layers are given, but for those of padding where these see
        nothing: then it is `blind`. None for all. Waits for the GPU. Raises Unfit where some see others.
        """
        mask = self.calls[0].get(MASK)
        if any(call.get(MASK) is not mask for call in self.calls):
            raise Unfit("its layers are given several masks")
        if mask is None or mask.dim() == 2:
            return mask
        seen = mask if mask.dtype == torch.bool else mask == 0
        shown, sees = seen[:, :1].any(2, keepdim=True), seen.any(-1, keepdim=True)
        known = ((seen == shown) | ~sees).all() & (sees.all() | (sees.mT == shown).all())
        if mask.is_floating_point():
            known &= (seen | (mask <= torch.finfo(mask.dtype).min)).all()
        known, self.blind = torch.stack([known, ~sees.all()]).tolist()
        if not known or (self.blind and not all(layer.inner for layer in self.layers)):  # else not all are computed
            raise Unfit("a mask by which tokens see different ones")
        return shown[:, 0, 0]

    @property
    def done(self) -> bool:
        return len(self.calls) == len(self.layers)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return self.packing.pack(x)[None]

    def to_rows(self, y: torch.Tensor) -> torch.Tensor:
        return self.packing.unpack(y[0], *self.shape)

    def bias(self, bias: PositionBias | None) -> torch.Tensor | None:
        """What is added to scores, (heads, 2 R + 1), by the weights as they are."""
        if bias is None:
            return None
        if bias.path not in self.tables:
            weight, rows = self.biases[bias.path]
            self.tables[bias.path] = weight[rows.flip(0) if self.packing.mirrored else rows].t().contiguous()
        return self.tables[bias.path]

    def packed(self, told: Any, graph: bool = False) -> Packing:
        """Of one row of sequences, by what a layer is told of them. graph: as of `padded`."""
        if id(told) not in self.packings:
            self.packings[id(told)] = told, packed(told, self.rows, graph)
        return self.packings[id(told)][1]

    def take(self, layer: "EncoderLayerForward", x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """What a layer gives to the code around it. Raises Unfit where that is not the code that was seen."""
        kwargs.pop(HIDDEN_STATES, None)  # they are what layers give
        if self.run is None:
            return self._at_once(layer, x, kwargs)
        if self.done or layer is not self.layers[len(self.calls)] or (self.calls and x is not self.hidden):
            raise Unfit("something stands between its layers")
        if (name := layer.unknown(kwargs)) is not None:
            raise Unfit(f"its layers are told {name}")
        self.hidden = x
        self.shape = self.rows.shape[:2]
        self.calls.append(kwargs)
        if self.done or len(self.calls) in self.stops:
            self.hidden = self.run(self)
            self.begun = len(self.calls)
        return self.hidden

    def _at_once(self, layer: "EncoderLayerForward", x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if (name := layer.unknown(kwargs)) is not None or x.dim() not in (2, 3):
            raise Unfit(f"its layers are told {name}" if name else "its layers are given no tokens")
        new = self.hidden is None or x.shape != self.hidden.shape
        self.hidden = x
        if new:
            self.shape, self.packing = self.rows.shape[:2], unpadded(self.rows)
        if layer.attention.windows:
            self._look(layer, x, kwargs)
        return layer.bound(layer.kernels, self, x.flatten(0, -2)[None].contiguous(), kwargs).reshape(x.shape)

    def _look(self, layer: "EncoderLayerForward", x: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Has the layer's own code tell in which windows it attends. A picture that is too small may change it."""
        settings = plain_settings(layer.module)
        key = x.shape[1], repr(kwargs), settings
        if key not in self.seen:
            self.windows = seen_windows(layer.module, layer.bound.attention.module, x, kwargs)
            if plain_settings(layer.module) != settings:
                return
            self.seen[key] = self.windows
        self.windows = self.seen[key]


class EncoderLayerForward(LayerForward):
    """One layer: of a step its own part, see `EncoderStep`; outside of one the stock forward."""

    made_up = False

    def __init__(self, *place: Any, **more: Any) -> None:
        super().__init__(*place, **more)
        if self.attention.windows:
            del self.layer_guard.records[""]  # what its own code reads of itself, it tells

    @property
    def attention(self) -> BidirectionalSpec:
        assert isinstance(self.spec.attention, BidirectionalSpec)
        return self.spec.attention

    def _own_code(self, kernels: Kernels, step: Any, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """Of rows, which convolutions must not mix."""
        return step.to_tokens(super()._own_code(kernels, step, step.to_rows(x), kwargs))

    def unknown(self, kwargs: dict[str, Any]) -> str | None:
        """A keyword that the layer was not seen with; masks are those of the step."""
        known = {*self.spec.given, (POSITIONS, (2, False)), (LONGEST, int)}
        told = ((name, one) for name, one in kwargs.items() if not is_absent(one) and "mask" not in name)
        if self.attention.windows:  # its own code is told
            return next((name for name, one in told if isinstance(one, torch.Tensor)), None)
        return next((name for name, one in told if (name, form(one)) not in known), None)

    def fast(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop(self.names[0])
        y = step.take(self, x, kwargs)
        return y if self.spec.returns is None else (y, *(None,) * (self.spec.returns - 1))
