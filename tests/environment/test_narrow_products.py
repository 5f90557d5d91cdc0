"""Which products are computed in float32: what oneDNN says, what ONEDNN_MAX_CPU_ISA leaves, what the variable says."""

import os
import subprocess
import sys

import pytest

from halfulp.environment._narrow_products import (
    SIXTEEN_BIT_DTYPES,
    find_natively_multiplied_dtypes,
    list_dtypes_multiplied_in_float32,
)

PROGRAM = """
import torch
from halfulp.environment._narrow_products import list_dtypes_multiplied_in_float32
print([str(dtype) for dtype in list_dtypes_multiplied_in_float32()])
"""


def test_every_dtype_is_native_or_widened():
    if list_dtypes_multiplied_in_float32() != SIXTEEN_BIT_DTYPES:
        assert sorted(map(str, find_natively_multiplied_dtypes() + list_dtypes_multiplied_in_float32())) == sorted(
            map(str, SIXTEEN_BIT_DTYPES)
        )


@pytest.mark.parametrize(("wish", "wanted"), [("always", SIXTEEN_BIT_DTYPES), ("never", ())])
def test_a_wish_is_read(wish, wanted, in_bare_process):
    assert in_bare_process(PROGRAM, HALFULP_FLOAT32_PRODUCTS=wish).strip() == str([str(dtype) for dtype in wanted])


def test_the_variable_of_onednn_is_read():
    # When torch loads it: a process of its own.
    variables = {"HALFULP_FLOAT32_PRODUCTS": "auto", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([str(dtype) for dtype in SIXTEEN_BIT_DTYPES])


def test_an_unknown_wish_is_refused(in_bare_process):
    script = """
        import torch
        try:
            from halfulp.environment._narrow_products import list_dtypes_multiplied_in_float32
            list_dtypes_multiplied_in_float32()
        except ValueError as error:
            print(error)
    """
    said = in_bare_process(script, HALFULP_FLOAT32_PRODUCTS="sometimes")
    assert said.strip() == "HALFULP_FLOAT32_PRODUCTS='sometimes' is unknown: choose one of auto, always, never"
