"""cuBLASLt, called directly: the fastest of the algorithms its heuristic names for a product, found by timing them.

torch takes the first one named. For the small and odd products of a UNet a later one is often 5-20 % faster.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import torch

COMPUTE_32F, REAL_32F = 68, 0
TYPES = {torch.float16: 2, torch.bfloat16: 14}
TRANSPOSE_A, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 3, 7, 8, 26
EPILOGUE_BIAS, EPILOGUE_GELU = 4, 32  # GELU by the tanh formula; both where both are set
MAX_WORKSPACE_BYTES = 1
WORKSPACE = 32 * 2**20
CANDIDATES = 4  # later ones were the fastest of no product of SD1.5 by more than the noise (H200)


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLt:
    """One handle of the library that torch has loaded. Raises OSError where there is none."""

    def __init__(self):
        version = (torch.version.cuda or "0").split(".")[0]
        self.library = ctypes.CDLL(f"libcublasLt.so.{version}")
        self.handle = c_void_p()
        self._call("Create", byref(self.handle))

    def _call(self, name: str, *args) -> None:
        status = getattr(self.library, f"cublasLt{name}")(*args)
        if status:
            raise RuntimeError(f"cublasLt{name} failed with status {status}")


class Product:
    """y = x W^T (+ bias) (+ residual), x: (M, K), W: (N, K), all contiguous, one 16-bit dtype; algorithms by rank.

    gelu: y = gelu_tanh(x W^T + bias), rounded once. apart: elements from one row of y to the next, N if contiguous.
    """

    def __init__(
        self, lt: CublasLt, rows: int, outs: int, depth: int, dtype: torch.dtype, bias: bool, gelu: bool = False,
        apart: int | None = None,
    ):  # fmt: skip
        self.lt, self.shape, self.dtype, self.bias = lt, (rows, outs, depth), dtype, bias
        self.description = c_void_p()
        lt._call("MatmulDescCreate", byref(self.description), COMPUTE_32F, REAL_32F)
        self._set(TRANSPOSE_A, c_int32(1))
        if bias or gelu:
            self._set(EPILOGUE, c_int32(EPILOGUE_BIAS * bias | EPILOGUE_GELU * gelu))
        if bias:
            self._set(BIAS_TYPE, c_int32(TYPES[dtype]))
        # Column-major to the library: y^T (N, M) = W^T' x^T, each leading dimension a row of ours.
        self.weight, self.input, self.output = (
            self._layout(*sizes) for sizes in ((depth, outs, depth), (depth, rows, depth), (outs, rows, apart or outs))
        )
        self.algorithms = self._algorithms()

    def _set(self, attribute: int, value) -> None:
        self.lt._call(
            "MatmulDescSetAttribute", self.description, attribute, byref(value), c_size_t(ctypes.sizeof(value))
        )

    def _layout(self, rows: int, columns: int, apart: int) -> c_void_p:
        layout = c_void_p()
        sizes = (c_uint64(rows), c_uint64(columns), c_int64(apart))
        self.lt._call("MatrixLayoutCreate", byref(layout), TYPES[self.dtype], *sizes)
        return layout

    def _algorithms(self) -> list[Algorithm]:
        preference, found, results = c_void_p(), c_int(), (Algorithm * CANDIDATES)()
        self.lt._call("MatmulPreferenceCreate", byref(preference))
        limit = c_uint64(WORKSPACE)
        self.lt._call("MatmulPreferenceSetAttribute", preference, MAX_WORKSPACE_BYTES, byref(limit), c_size_t(8))
        layouts = (self.weight, self.input, self.output, self.output)
        self.lt._call(
            "MatmulAlgoGetHeuristic", self.lt.handle, self.description, *layouts, preference, CANDIDATES, results,
            byref(found),
        )  # fmt: skip
        self.lt._call("MatmulPreferenceDestroy", preference)
        return [result for result in results[: found.value] if result.state == 0]

    def run(self, rank: int, x, weight, bias, residual, y) -> None:
        """Writes y on the current stream. A product is not shared between threads: the bias is set on it.

        residual: (M, N), added in float32 before y is rounded, or None.
        """
        algorithm, one, share = self.algorithms[rank], c_float(1), c_float(0 if residual is None else 1)
        if self.bias:
            self._set(BIAS_POINTER, c_void_p(bias.data_ptr()))
        workspace = (
            torch.empty(algorithm.workspace, dtype=torch.uint8, device=x.device) if algorithm.workspace else None
        )
        pointer = c_void_p(0 if workspace is None else workspace.data_ptr())
        stream = c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        output = c_void_p(y.data_ptr())
        added = output if residual is None else c_void_p(residual.data_ptr())
        self.lt._call(
            "Matmul", self.lt.handle, self.description, byref(one), c_void_p(weight.data_ptr()), self.weight,
            c_void_p(x.data_ptr()), self.input, byref(share), added, self.output, output, self.output,
            byref(algorithm.algo), pointer, c_size_t(algorithm.workspace), stream,
        )  # fmt: skip
