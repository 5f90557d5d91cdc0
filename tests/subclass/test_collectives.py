"""Every operator in which processes meet, with both kinds of tensors: what plain ones give, or a refusal in words."""

COLLECTIVES = """
import os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, Shard, Replicate, init_device_mesh
from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import RULES as SCALED, rule_of as rule_of_scaled
from halfulp.mctensor import MCTensor
from halfulp.subclass._collectives import NAMESPACES
from halfulp.mctensor._mctensor import RULES as COMPONENTS, find_rule as rule_of_components

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
group, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
generator = torch.Generator().manual_seed(int(sys.argv[3]))
# The ranks' magnitudes differ: scales have to be agreed on.
values = [torch.randn(4, 3, generator=generator, dtype=torch.float64) * 2.0 ** (6 * r) for r in range(2)]
largest = max(x.abs().max() for x in values)


def waited(x):
    return [waited(y) for y in x] if isinstance(x, list) else ops.wait_tensor(x)


MOVES = {
    "_c10d_functional::all_gather_into_tensor": lambda op, x: op(x, 2, group),
    "_c10d_functional::all_gather_into_tensor_out": lambda op, x: op(x, 2, group, out=torch.cat([x, x])),
    "_c10d_functional::all_gather_into_tensor_coalesced": lambda op, x: op([x, 2 * x], 2, group),
    "_c10d_functional::all_to_all_single": lambda op, x: op(x, [[1, 3], [3, 1]][rank], [[1, 3], [3, 1]][rank], group),
    "_c10d_functional::broadcast": lambda op, x: op(x, 1, group),
    "_c10d_functional::broadcast_": lambda op, x: op(x.clone(), 1, group),
    "_c10d_functional::wait_tensor": lambda op, x: op(x),
    "_c10d_functional::_wrap_tensor_autograd": lambda op, x: op(x),
    "_c10d_functional_autograd::all_gather_into_tensor": lambda op, x: op(x, 2, group),
    "_c10d_functional_autograd::all_to_all_single": lambda op, x: op(x, [0, 4], [0, 4], group) if rank else
        op(x, [4, 0], [4, 0], group),
    "c10d_functional::all_gather_into_tensor": lambda op, x: op(x, "", [0, 1], 2),
    "c10d_functional::all_gather_into_tensor_coalesced": lambda op, x: op([x, -x], "", [0, 1], 2),
    "c10d_functional::all_to_all_single": lambda op, x: op(x, [2, 2], [2, 2], "", [0, 1], 2),
    "c10d_functional::broadcast": lambda op, x: op(x, 0, "", [0, 1], 2),
    "c10d_functional::wait_tensor": lambda op, x: op(x),
}
SUMS = {
    "_c10d_functional::all_reduce": lambda op, x: op(x, "sum", group),
    "_c10d_functional::all_reduce_": lambda op, x: op(x.clone(), "sum", group),
    "_c10d_functional::all_reduce_coalesced": lambda op, x: op([x, 2 * x], "max", group),
    "_c10d_functional::all_reduce_coalesced_": lambda op, x: op([x.clone(), 2 * x], "min", group),
    "_c10d_functional::reduce_scatter_tensor": lambda op, x: op(x, "sum", 2, group),
    "_c10d_functional::reduce_scatter_tensor_out": lambda op, x: op(x, "sum", 2, group, out=x[:2].clone()),
    "_c10d_functional::reduce_scatter_tensor_coalesced": lambda op, x: op([x, 2 * x], "sum", 2, group),
    "_c10d_functional_autograd::reduce_scatter_tensor": lambda op, x: op(x, "sum", 2, group),
    "c10d_functional::all_reduce": lambda op, x: op(x, "min", "", [0, 1], 2),
    "c10d_functional::all_reduce_coalesced": lambda op, x: op([x], "sum", "", [0, 1], 2),
    "c10d_functional::reduce_scatter_tensor": lambda op, x: op(x, "sum", "", [0, 1], 2),
    "c10d_functional::reduce_scatter_tensor_coalesced": lambda op, x: op([x, x], "sum", "", [0, 1], 2),
}


SENT = {name: call for name, call in MOVES.items() if not any(word in name for word in ("all_gather", "all_to_all"))}


def plain(x):
    if isinstance(x, (list, tuple)):
        return [plain(y) for y in x]
    return x.decode(torch.float64) if hasattr(x, "decode") else x


def check(make, bound, name, call, operator):
    x = make(values[rank])
    wanted = call(operator, plain(x))
    for mine, exact in zip(flat(waited(call(operator, x))), flat(waited(wanted)), strict=True):
        assert type(mine) is type(x) and mine.shape == exact.shape, (name, type(mine))
        assert (plain(mine) - exact).abs().max() <= bound * 2 * largest, (name, type(x), plain(mine), exact)


def flat(x):
    return x if isinstance(x, (list, tuple)) else [x]


def refused(call, words):
    try:
        call()
    except NotImplementedError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


KINDS = [
    (lambda x: MCTensor.encode(x, 2, torch.float32), 2**-47, rule_of_components, "of MCTensors", SENT),
    (lambda x: MCTensor.encode(x, 2, torch.float16), 2**-20, rule_of_components, "of MCTensors", SENT),
    (lambda x: ScaledTensor.encode(x, torch.float32), 2**-22, rule_of_scaled, "of scaled tensors", {**MOVES, **SUMS}),
    (lambda x: ScaledTensor.encode(x, torch.float16), 2**-9, rule_of_scaled, "of scaled tensors", {**MOVES, **SUMS}),
]
known = set()
for name in torch._C._dispatch_get_all_op_names():
    namespace, _, rest = name.partition("::")
    if namespace not in NAMESPACES:
        continue
    packet, _, overload = rest.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    for make, bound, rule_of, words, cases in KINDS:
        if name in cases:
            known.add(name)
            check(make, bound, name, cases[name], operator)
        elif name in SUMS or name in MOVES:
            refused(lambda: {**SUMS, **MOVES}[name](operator, make(values[0])), words)
        elif namespace == "c10d_functional":
            assert hasattr(ops, packet), name  # the older name gives way to the newer
        elif namespace != "c10d" or operator not in {**SCALED, **COMPONENTS}:
            refused(lambda: rule_of(operator)(make(values[0])), words)
assert len(known) > 20, known

for make, bound, *_ in KINDS[2:]:
    x = make(values[rank])
    for mine, exact in (
        (functional.permute_tensor(x.flatten(), [1, 0], dist.group.WORLD), plain(make(values[1 - rank])).flatten()),
        (DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor(),
         torch.cat([plain(make(one)) for one in values])),
    ):
        mine = mine.wait() if hasattr(mine, "wait") else mine
        assert type(mine) is type(x) and (plain(mine) - exact).abs().max() <= bound * 2 * largest, (plain(mine), exact)
dist.barrier()
dist.destroy_process_group()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_every_collective_is_that_of_plain_tensors_or_refused(in_two_processes):
    in_two_processes(COLLECTIVES)


LATE = """
import sys
import torch
import halfulp as hu
x = torch.randn(4)
ours = [hu.ScaledTensor.encode(x), hu.MCTensor.encode(x, components=2, dtype=torch.float16)]
assert "torch.distributed._functional_collectives" not in sys.modules
import torch.distributed._functional_collectives
for one in ours:
    y = torch.ops._c10d_functional._wrap_tensor_autograd(one)
    assert type(y) is type(one) and torch.equal(y.decode(), one.decode())
"""


def test_an_operator_that_torch_defines_after_the_rules_has_one(needs_torch, in_bare_process):
    """Functional collectives with gradients are torch's own Python, which defines an operator as it is imported."""
    needs_torch("_c10d_functional::_wrap_tensor_autograd")
    in_bare_process(LATE)
