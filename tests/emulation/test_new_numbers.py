"""What the schemas say."""

import pytest
import torch

from halfulp.emulation._region import (
    _BACKWARD_ONLY_OUTPUTS_BY_OPERATOR,
    _RUNNING_STATISTICS_BY_OPERATOR,
    read_operator_result_kinds,
)

aten = torch.ops.aten


def test_fresh_written_and_views():
    assert read_operator_result_kinds(aten.add.Tensor).new_result_positions == (0,)
    assert read_operator_result_kinds(aten.add_.Tensor)[1:3] == ((), ((0, "self"),))
    assert read_operator_result_kinds(aten.add.out)[1:3] == ((), ((3, "out"),))
    assert read_operator_result_kinds(aten.split.Tensor).new_result_positions == ()
    assert read_operator_result_kinds(aten.unsafe_split.Tensor).new_result_positions == ()  # which its schema says not
    assert read_operator_result_kinds(aten.max_pool2d_with_indices.default).new_result_positions == (0, 1)
    assert read_operator_result_kinds(aten._foreach_add_.Scalar).written_arguments == ((0, "self"),)
    assert read_operator_result_kinds(aten._local_scalar_dense.default).new_result_positions == ()


def test_statistics_stay():
    assert read_operator_result_kinds(aten.native_layer_norm.default)[1:3] == ((0,), ())
    assert read_operator_result_kinds(aten.native_batch_norm.default).written_arguments == (
        (3, "running_mean"),
        (4, "running_var"),
    )
    assert read_operator_result_kinds(aten._native_batch_norm_legit.default).written_arguments == (
        (3, "running_mean"),
        (4, "running_var"),
    )


@pytest.mark.parametrize("base", _BACKWARD_ONLY_OUTPUTS_BY_OPERATOR)
def test_known_operators_exist(base, needs_torch):
    """The table names operators of this torch, and outputs that they have."""
    if base == "_fused_rms_norm":
        needs_torch("_fused_rms_norm with its statistics")
    packet = getattr(aten, base)
    returns = [len(getattr(packet, overload)._schema.returns) for overload in packet.overloads()]
    assert max(returns) > max(_BACKWARD_ONLY_OUTPUTS_BY_OPERATOR[base])


def test_known_operators_have_running_statistics():
    for base, arguments in _RUNNING_STATISTICS_BY_OPERATOR.items():
        schema = getattr(aten, base).default._schema
        for position, name in arguments:
            assert schema.arguments[position].name == name


def test_operators_of_other_libraries_are_taken_by_their_schema():
    results = read_operator_result_kinds(torch.ops.halfulp.quantize_into.default)
    assert (results.name, results.new_result_positions, results.written_arguments) == (
        "halfulp.quantize_into",
        (),
        ((4, "out"),),
    )
