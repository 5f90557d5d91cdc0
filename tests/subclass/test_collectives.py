"""Every operator in which processes meet, with both kinds of tensors: a rule of c10d's functions, or a refusal."""

import pytest
import torch

from halfulp.mctensor import MCTensor
from halfulp.mctensor._mctensor import RULES as COMPONENTS
from halfulp.mctensor._mctensor import find_rule as find_rule_of_components
from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import RULES as SCALED
from halfulp.scaled._registry import find_rule as find_rule_of_scaled
from halfulp.subclass._collectives import COLLECTIVE_NAMESPACES


@pytest.mark.parametrize("kind", ["MCTensors", "scaled tensors"])
def test_every_collective_has_a_rule_or_is_refused(kind):
    rules, find_rule = (COMPONENTS, find_rule_of_components) if kind == "MCTensors" else (SCALED, find_rule_of_scaled)
    x = MCTensor.encode(torch.ones(2), 2, torch.float16) if kind == "MCTensors" else ScaledTensor.encode(torch.ones(2))
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace in COLLECTIVE_NAMESPACES:
            packet, _, overload = rest.partition(".")
            operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            if operator in rules:
                found.add(rest)
                continue
            with pytest.raises(NotImplementedError, match=f"of {kind}: "):
                find_rule(operator)(x)
    assert (
        {"broadcast_", "allgather_"}
        <= found
        <= {"broadcast_", "allgather_", "allreduce_", "reduce_", "_allgather_base_"}
    )
    assert ("allreduce_" in found) == (kind == "scaled tensors")
