"""Audits and forecasts of sharded weights, whose own part each rank looks at."""

SCRIPT = """
import copy
import sys
import torch
import halfulp as hu
from torch.distributed.fsdp import fully_shard

rank, store, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(seed)
model = torch.nn.Linear(64, 64).bfloat16()
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-6)
contents = []
for _ in range(2):
    model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    contents.append(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
found = hu.audit(*contents)
assert found.tensors["weight"].numel == 32 * 64
assert ("updates-lost", ("weight",)) in [(one.code, one.where) for one in found.findings], found.findings
for ahead in (hu.forecast(model, optimizer, steps=20), hu.forecast(contents[1], steps=20)):
    assert [layer.updates for layer in ahead.layers] == ["the optimizer's state"] * 2
torch.distributed.destroy_process_group()
"""


def test_each_rank_looks_at_its_own_part(in_two_processes):
    in_two_processes(SCRIPT)
