"""How a kernel runs: device functions in plain Python, run by torch on tensors and compiled to the same bits.

Public are the names in `__all__`: what an update rule of one's own calls besides + - * / (`sqrt`, `divide`, `maximum`,
`sign_of`, `select`, `floor`), which engine runs (`engine`, `count_fallbacks`), and how bits are compared (`same_bits`,
`KernelMismatchError`). The others serve the packages of halfulp and may change without notice.
"""

# ruff: noqa: F401
from .. import _needs_torch
from ._canary import (
    KernelMismatchError,
    check_bits,
    compute_float32_square_root,
    disable_callers_modes,
    require_float64,
    require_same_bits_as_cpu,
    same_bits,
    to_float64,
)
from ._engine import count_fallbacks, engine, note_fallback, select_engine, warn_once_of_fallback
from ._index_map import CHUNK_ELEMENTS, IndexMap, cut_into_chunks, make_chunk_table
from ._interpreter import run_trace_on_tensors
from ._operations import divide, floor, maximum, select, sign_of, sqrt
from ._operator import (
    assume_constant_result,
    break_graph_and_run_eagerly,
    define_operator,
    find_operator_namespace,
    hide_own_frames_from_compiler,
    is_under_transform,
    list_absent_operators,
    list_present_operators,
)
from ._plain_memory import (
    address,
    checksum,
    compute_row_checksums,
    get_plain_address_or_zero,
    has_strided_values,
    overlaps_itself,
    to_plain_memory,
    to_plain_memory_unless_traced,
)
from ._threads import MOST_SERIAL_ELEMENTS, keeping_subnormals, run_chunks
from ._trace import (
    Trace,
    Traced,
    Value,
    exponent,
    gather,
    is_computed_in_float64,
    is_finite,
    power_of_two,
    power_of_two_below,
    product_error,
    record_function,
    record_out_of_line,
    round_to_float32,
    round_to_integer,
    scale_by_power_of_two,
    square_root,
)
from .vector._loop import BROADCAST_COPIES, FastPathTrace, compile_trace
from .vector._machine_function import compute_source_digest, get_array_address
from .vector._processor import find_vector_bits
from .vector._reductions import BLOCK_ROWS, LANES_OF_NARROW_MATRIX, ReductionSteps, compile_reduction

__all__ = ["KernelMismatchError", "count_fallbacks", "divide", "engine", "floor", "maximum", "same_bits"]
__all__ += ["select", "sign_of", "sqrt"]
