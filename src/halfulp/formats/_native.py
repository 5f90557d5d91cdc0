"""Which layouts torch and ml_dtypes have a dtype for, by name: formats are data, and need neither library."""

IEEE = (True, "ieee", True, True, True, True)
FN = (False, "all_ones", True, True, True, True)
FNUZ = (False, "negative_zero", True, True, False, True)
FINITE = (False, None, True, True, True, True)
SCALE = (False, "all_ones", False, False, False, False)

# Format.layout -> name in torch. A packed dtype (float4_e2m1fn_x2: two values a byte) is no element dtype.
TORCH: dict[tuple, str] = {
    (11, 52, 1023, *IEEE): "float64",
    (8, 23, 127, *IEEE): "float32",
    (5, 10, 15, *IEEE): "float16",
    (8, 7, 127, *IEEE): "bfloat16",
    (5, 2, 15, *IEEE): "float8_e5m2",
    (5, 2, 16, *FNUZ): "float8_e5m2fnuz",
    (4, 3, 7, *FN): "float8_e4m3fn",
    (4, 3, 8, *FNUZ): "float8_e4m3fnuz",
    (8, 0, 127, *SCALE): "float8_e8m0fnu",
}

# Format.layout -> name in ml_dtypes (numpy's own types are not repeated there).
ML_DTYPES: dict[tuple, str] = {
    (8, 7, 127, *IEEE): "bfloat16",
    (5, 2, 15, *IEEE): "float8_e5m2",
    (5, 2, 16, *FNUZ): "float8_e5m2fnuz",
    (4, 3, 7, *IEEE): "float8_e4m3",
    (4, 3, 7, *FN): "float8_e4m3fn",
    (4, 3, 8, *FNUZ): "float8_e4m3fnuz",
    (4, 3, 11, *FNUZ): "float8_e4m3b11fnuz",
    (3, 4, 3, *IEEE): "float8_e3m4",
    (3, 2, 3, *FINITE): "float6_e3m2fn",
    (2, 3, 1, *FINITE): "float6_e2m3fn",
    (2, 1, 1, *FINITE): "float4_e2m1fn",
    (8, 0, 127, *SCALE): "float8_e8m0fnu",
}
