"""What one decoder layer computes, put together from its parts."""

from dataclasses import dataclass, field

from accel.llm.attention.attention import AttentionSpec
from accel.llm.attention.stock.stock_attention import StockSpec
from accel.llm.parts.norm import NormSpec
from accel.llm.parts.residual import Widths
from accel.llm.parts.tail import TailSpec
from accel.llm.runtime.mlp import MlpSpec


@dataclass(frozen=True)
class Behind:
    """What a module gives in a tuple behind its output: names of its parameters and buffers, "" for None, which stands
    for weights of the attention too; no tuple where it is None.
    """

    rest: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer, on input x, through `entering` where there is that norm:

        a = post_attention(attention(before_attention(x)))       each norm left out where it is None
        s = bases[0] * x + scales[0] * a, through after_attention    s = x where there is no attention
        m = post_mlp(mlp(before_mlp(s, or x where `parallel`)))
        y = bases[1] * s + scales[1] * m, through after_mlp          y = s where there is no MLP; then through `tail`

    shared: attention and MLP get the output of the one norm `before_attention`. widths: of a and y. returns: how many
    things the layer's forward gives back as a tuple, y first; None for y alone. around: where the rest is not known,
    and the layer's own code runs around its attentions: what the module of each gives behind its output. settings: of
    the layer itself. given: the keywords that carry a value when the model reads plain text, each with its `form`.
    """

    settings: tuple
    attention: AttentionSpec | None
    mlp: MlpSpec | None = None
    entering: NormSpec | None = None
    before_attention: NormSpec | None = None
    post_attention: NormSpec | None = None
    after_attention: NormSpec | None = None
    before_mlp: NormSpec | None = None
    post_mlp: NormSpec | None = None
    after_mlp: NormSpec | None = None
    tail: TailSpec | None = None
    parallel: bool = False
    shared: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    bases: tuple[float, float] = (1.0, 1.0)
    widths: Widths = field(compare=False, repr=False)  # of the dtypes of this run
    returns: int | None
    around: tuple[Behind, ...] = ()
    given: frozenset[tuple[str, object]]

    @property
    def place(self) -> int | None:
        """In the cache; None for a layer that keeps nothing there."""
        return next(iter(self.places), None)

    @property
    def places(self) -> tuple[int, ...]:
        """All that it has in a store, see `KeptState`."""
        return tuple(one.index for one in self.stored)

    @property
    def cached(self) -> tuple[int, ...]:
        """Those of layers of the cache: a state beside keys and values has none of its own."""
        several = len(self.stored) > 1
        return tuple(one.index for one in self.stored if not (several and one.keeps_state))

    @property
    def stored(self) -> tuple[AttentionSpec, ...]:
        """The attentions that have something in a store."""
        return () if self.attention is None or self.borrows or self.runs_stock else self.attention.mixers

    @property
    def keeps_more(self) -> str | None:
        """As of its attention."""
        return None if self.attention is None else self.attention.keeps_more

    @property
    def runs_stock(self) -> str | None:
        """Why its attention runs stock; None where it does not."""
        return self.attention.reason if isinstance(self.attention, StockSpec) else None

    @property
    def borrows(self) -> bool:
        """Whether its attention reads what another layer has stored."""
        return self.attention is not None and self.attention.borrows

    @property
    def keywords(self) -> tuple[str, ...]:
        """Those of the layer's call that it computes by."""
        mine = (self.tail.embedding,) if self.tail is not None and self.tail.embedding else ()
        return mine if self.attention is None else (*self.attention.keywords, *mine)

    @property
    def window(self) -> int | None:
        """How many tokens back it sees; None for all, or where that does not matter."""
        return None if self.attention is None else self.attention.window

    @property
    def has_position_bias(self) -> bool:
        return self.attention is not None and self.attention.has_position_bias

    @property
    def keeps_state(self) -> bool:
        return self.attention is not None and self.attention.keeps_state

    @property
    def norms(self) -> list[NormSpec]:
        """All there are, those inside the attention too."""
        around = (self.entering, self.before_attention, self.post_attention, self.after_attention)
        mine = (*around, self.before_mlp, self.post_mlp, self.after_mlp, *(() if self.mlp is None else self.mlp.norms))
        inside = [] if self.attention is None else [*self.attention.norms]
        inside += [] if self.tail is None or self.tail.norm is None else [self.tail.norm]
        return [norm for norm in (*mine, *inside) if norm is not None and norm.name]

    @property
    def called(self) -> tuple[str, ...]:
        """The names of all linears, and of an MLP that is called as a whole."""
        attention, mlp = self.attention, self.mlp
        parts = () if attention is None else attention.mixers
        mixer = [name for part in parts for name in part.linears]
        tail = () if self.tail is None else self.tail.linears
        return (*mixer, *tail) if mlp is None else (*mixer, *mlp.called, *tail)
