"""replicas-differ, planted between two processes."""

SCRIPT = """
import sys
import torch
import halfulp as hu

rank, store, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for faulty in (True, False):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    if faulty and rank == 1:
        with torch.no_grad():
            model[2].bias[0] += 1e-6  # after DDP has made them equal
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with hu.observe(parallel, optimizer, interval=2) as seen:
        for _ in range(4):
            parallel(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    loud = [finding for finding in seen.findings if finding.severity != "note"]
    codes = [finding.code for finding in loud]
    assert codes == (["replicas-differ"] if faulty else []), [str(finding) for finding in loud]
    assert not faulty or any("2.bias" in name for name in loud[0].where), loud
torch.distributed.destroy_process_group()
"""


def test_ranks_that_hold_different_weights_are_found_and_equal_ones_are_not(in_two_processes):
    in_two_processes(SCRIPT)
