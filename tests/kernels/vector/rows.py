"""Calling a compiled loop over rows by hand."""

import array


def run_rows(kernel, per_row: int, inputs: list, steps: list, outputs: list) -> None:
    """Run a kernel of `compile_trace`; ``steps``: of each input, elements from row to row, and from one to the next."""
    words = [per_row, outputs[0].numel()]
    for part, (row, neighbour) in zip(inputs, steps):
        words += (part.data_ptr(), row, neighbour)
    for part in outputs:
        words += (part.data_ptr(), per_row, 1)
    table = array.array("q", words)
    kernel(0, -(-outputs[0].numel() // per_row), table.buffer_info()[0])
