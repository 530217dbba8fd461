"""For which sizes of a call there are CUDA graphs, and which of them launch the same kernels."""

from accel_kernels.gemm.fused_linear import MOST_ROWS
from accel_kernels.gemm.quantized_weight import MOST_QUANTIZED_ROWS

# Rows of one new token each, up to which a step is a CUDA graph. Launching a step takes Python 15 to 45 ms, longer than
# a GPU takes for so many rows of a model of 8 billion weights. A graph keeps its logits: 131 MB, of 512 rows of 128,256
# words in 16 bits.
MOST_STEP_ROWS = 512


def by_graph(rows: int, new: int) -> bool:
    """Whether so many new tokens, behind stored ones, are worth a graph of their own.

    One token a row is a step of many alike. Several a row come in any number, and each number would be captured anew:
    of those only few, as of a draft to verify.
    """
    return rows * new <= MOST_ROWS or (new == 1 and rows <= MOST_STEP_ROWS)


def rows_of_kernels(leaves: list) -> int:
    """Of a call of a graph, tokens first: all calls for which this is the same launch the same kernels, about.

    Products are compiled for rows by powers of two, and for all from 65 to MOST_QUANTIZED_ROWS.
    """
    rows, new = leaves[0].shape[:2]
    if rows * new <= MOST_ROWS:
        return 1 << (rows * new - 1).bit_length()
    return MOST_QUANTIZED_ROWS if rows * new <= MOST_QUANTIZED_ROWS else 2 * MOST_QUANTIZED_ROWS
