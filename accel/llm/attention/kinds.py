"""All kinds of attention, and the search among them."""

from accel.llm.attention.attention import AttentionSpec, UnderstoodAttention
from accel.llm.attention.borrowed_attention import BorrowedSpec, NarrowValuesSpec, NormedValuesSpec
from accel.llm.attention.gated_attention import GatedSpec, QueryGatedSpec
from accel.llm.attention.latent_attention import LatentSpec
from accel.llm.attention.linear.lightning_attention import LightningSpec
from accel.llm.attention.linear.linear_attention import LinearSpec
from accel.llm.attention.selective_scan import SelectiveScanSpec
from accel.llm.attention.short_convolution import ShortConvolutionSpec
from accel.llm.attention.softmax_attention import SoftmaxSpec
from accel.llm.attention.stock.indexed_attention import IndexedSpec
from accel.llm.recording.record import LayerRecord, NotUnderstood, Record

# Tried in turn.
ATTENTION_KINDS: tuple[type[AttentionSpec], ...] = (
    LinearSpec,
    LightningSpec,
    ShortConvolutionSpec,
    SelectiveScanSpec,
    IndexedSpec,
    LatentSpec,
    SoftmaxSpec,
    GatedSpec,
    QueryGatedSpec,
    NormedValuesSpec,
    NarrowValuesSpec,
    BorrowedSpec,
)


def understand_attention(layer: LayerRecord, record: Record) -> UnderstoodAttention:
    """By the first kind that knows it. Raises NotUnderstood, with the reason of the first kind that has one."""
    reasons = []
    for kind in ATTENTION_KINDS if layer.known is None else (type(layer.known.attention),):
        try:
            found = kind.understand(layer, record)
        except NotUnderstood as reason:
            reasons.append(str(reason))  # an error kept here would keep this frame, and with it the model
        else:
            if found is not None:
                return found
    raise NotUnderstood(reasons[0] if reasons else "its attention is of no kind that is known")
