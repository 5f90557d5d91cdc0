"""Rows are plain data that JSON keeps."""

import json

from halfulp.formats import block_names, block_rows, get, names, rows


def test_rows_are_the_catalogue():
    assert [row["name"] for row in rows()] == names()
    assert json.loads(json.dumps(rows(), allow_nan=False)) == rows()
    for row in rows():
        format = get(row["name"])
        assert row["torch_dtype"] is None or get(row["torch_dtype"]) is format
        for field in set(row) - {"torch_dtype"}:
            assert row[field] == getattr(format, field)


def test_block_rows_are_the_block_catalogue():
    assert [row["name"] for row in block_rows()] == block_names()
    assert json.loads(json.dumps(block_rows())) == block_rows()
