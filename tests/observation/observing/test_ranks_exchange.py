"""What ranks say of themselves: runs that meet and do not, bytes, and random bits that two shards share."""

import random
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

import halfulp as hu
from halfulp.observation.observing.processes import _mailbox, _processes
from halfulp.observation.observing.processes._hashes import hashes
from halfulp.observation.observing.processes._mailbox import Mailbox
from halfulp.observation.observing.processes._rank_summary import RankSummary, StepSummary, in_both, keys_array
from halfulp.observation.observing.processes._shared_random_bits import SharedRandomBits, key_of, said_errors


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, monkeypatch, tmp_path):
    made = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 4),
        "tcp": lambda: dist.TCPStore("localhost", 0, None, True, wait_for_workers=False),
    }[request.param]()
    monkeypatch.setattr(_mailbox, "_get_default_store", lambda: dist.PrefixStore("default_pg", made))
    return made


def heard(box: Mailbox, ranks: list[int]) -> tuple[int, dict[int, bytes]]:
    return box.hear(lambda hub: ranks)


def test_runs_that_overlap_are_one_and_others_are_not(store):
    warmup = Mailbox("a", 2, 4)
    warmup.say(b"warmup")
    assert (warmup.number, heard(warmup, [])) == (1, (2, {}))
    warmup.leave()
    three, one = Mailbox("a", 3, 4), Mailbox("a", 1, 4)
    two = Mailbox("a", 2, 4)
    assert [box.number for box in (one, two, three)] == [2, 2, 2]
    assert [heard(box, []) for box in (one, two, three)] == [(1, {})] * 3
    assert heard(two, [0, 1, 3]) == (1, {})
    three.say(b"\x00\xff")
    one.say(b"1")
    assert heard(two, [0, 1, 3]) == heard(two, [1, 3]) == (1, {1: b"1", 3: b"\x00\xff"})
    again = Mailbox("a", 3, 4)  # while the others are still in the run before
    assert again.number == 3
    assert heard(again, [1]) == (3, {})
    assert Mailbox("b", 0, 4).number == 1


def test_the_last_one_deletes_what_all_said(store):
    before = store.num_keys() if not isinstance(store, dist.FileStore) else 0
    for _ in range(3):
        boxes = [Mailbox("a", rank, 2) for rank in range(2)]
        for box in boxes:
            box.say(bytes(1000))
        boxes[0].leave()
        assert set(heard(boxes[1], [0])[1]) == {0}
        boxes[1].leave()
        assert not boxes[1]._store.check([boxes[1]._key(1)])
    if not isinstance(store, dist.FileStore):
        assert store.num_keys() - before == 3  # the number of the run, and of each rank's last


def test_the_runs_own_store_keeps_its_patience(store):
    patience = store.timeout
    Mailbox("a", 0, 2)
    assert store.timeout == patience


class SilentStore:
    """A store whose server stands: what is asked is never answered."""

    def __init__(self) -> None:
        self.answers = dist.HashStore()
        self.silent = False
        self.end = threading.Event()

    def clone(self) -> "SilentStore":
        return self

    def __getattr__(self, name: str):
        def ask(*arguments):
            if self.silent:
                self.end.wait()
            return getattr(self.answers, name)(*arguments)

        return ask


def test_a_server_that_stands_ends_no_run(monkeypatch, needs_torch):
    needs_torch("observations that compare ranks")
    store = SilentStore()
    monkeypatch.setattr(_mailbox, "PATIENCE", 0.2)
    seen = _observed_by_the_first_of_three(store, monkeypatch)
    assert len(seen) == 5
    assert seen.record.unseen == ["ranks 1, 2 not compared (the process group's store cannot be reached: TimeoutError)"]
    store.end.set()


def test_where_stores_cannot_be_cloned_ranks_stay_apart_and_it_is_said(monkeypatch):
    for module in (_mailbox, _processes):
        monkeypatch.setattr(module, "HAS_STORE_CLONES", False)
    seen = _observed_by_the_first_of_three(SilentStore(), monkeypatch)
    assert len(seen) == 5
    assert seen.record.unseen == [f"ranks 1, 2 not compared ({_mailbox.lacking_clones()})"]


def _observed_by_the_first_of_three(store, monkeypatch):
    monkeypatch.setattr(_mailbox, "_get_default_store", lambda: store)
    for name, answer in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 3)):
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        for step in range(5):
            store.silent = step >= 2
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    return seen


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_summaries_are_read_as_they_were_written(seed, steps):
    draw = np.random.default_rng(seed)
    keys = keys_array([2**64 - 1, 0, 5])
    said = RankSummary(
        bool(steps),
        not steps,
        keys,
        {
            step: StepSummary(
                draw.integers(0, 2**32, 3, np.uint32), {9: (3, draw.integers(-127, 128, 5).astype(np.int8))}
            )
            for step in range(0, 50 * steps, 50)
        },
        keys[:2],
        np.array([[0.0, np.inf], [5e-324, 1e308]]),
        keys[:0],
    )
    read = RankSummary.from_bytes(said.to_bytes())
    assert (read.ended, read.late) == (said.ended, said.late)
    assert read.last_step == said.last_step
    assert sorted(read.steps) == sorted(said.steps)[-4:]
    for name in ("replicated", "tensors", "extremes", "differing"):
        assert np.array_equal(getattr(read, name), getattr(said, name))
    for step, one in read.steps.items():
        assert np.array_equal(one.bits, said.steps[step].bits)
        assert one.errors[9][0] == 3
        assert np.array_equal(one.errors[9][1], said.steps[step].errors[9][1])


def test_a_summary_is_as_small_as_said(seed):
    parameters, tensors, steps = 300, 1200, 9
    keys = keys_array(range(parameters))
    errors = {key: (0, np.ones(1024, np.int8)) for key in range(4)}
    own = {step: StepSummary(keys.astype(np.uint32), errors) for step in range(steps)}
    said = RankSummary(False, False, keys, own, keys_array(range(tensors)), np.zeros((tensors, 2)), keys_array([]))
    assert len(said.to_bytes()) <= 24 * parameters + 24 * tensors + 4 * 4 * 1024 + 4096


def test_keys_of_both():
    here, there = in_both(keys_array([7, 3, 2**63]), keys_array([2**63, 9, 7]))
    assert sorted(zip(here.tolist(), there.tolist())) == [(0, 2), (2, 0)]


def rounding_errors(bits: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    return (bits < probability).double() - probability


def correlation(count: int, steps: int, shared: bool, most: float) -> float:
    """Of random probabilities up to a largest one, on two ranks."""
    bits, name = SharedRandomBits(), "layer.weight"
    for step in range(steps):
        drawn = torch.rand(count, dtype=torch.float64)
        said = []
        for rank in range(2):
            own = drawn if shared else torch.rand(count, dtype=torch.float64)
            errors = rounding_errors(own, torch.rand(count, dtype=torch.float64) * most)
            errors[:3] = torch.nan
            said.append(said_errors(step, {name: errors}, {name: (rank, count)}))
        key = key_of(name, count)
        bits.add(1, key, said[0][key], said[1][key])
    return bits.correlation(key)


@pytest.mark.parametrize("most", [1.0, 0.1, 1e-3])
def test_bits_of_their_own_are_never_taken_for_shared_ones(seed, most):
    assert [correlation(4096, 5, False, most) for _ in range(40)] == [0.0] * 40


@pytest.mark.parametrize(("most", "steps"), [(1.0, 1), (0.1, 10)])
def test_shared_bits_are_found(seed, most, steps):
    assert all(0.1 < correlation(4096, steps, True, most) < 1 for _ in range(10))


def test_the_same_shard_is_to_have_the_same_bits(seed):
    bits = SharedRandomBits()
    errors = (np.int64(0), np.array([60, -60] * 512, np.int8))
    bits.add(1, 5, errors, errors)
    assert bits.correlation(5) is None
    bits.add(1, 5, errors, (1, errors[1]))
    assert bits.correlation(5) > 0.5
    bits.add(2, 7, (0, errors[1][:0]), (1, errors[1]))
    assert bits.correlation(7) == 0.0


def test_a_few_parameters_a_step_and_all_in_time():
    errors = {f"layers.{k}": torch.full((2000,), 0.25) for k in range(20)}
    shards = {name: (0, 2000) for name in errors if name != "layers.0"}
    said = [said_errors(step, errors, shards) for step in range(100)]
    assert all(len(one) == 4 for one in said)
    assert set().union(*said) == {key_of(name, 2000) for name in shards}
    assert {len(array) for one in said for _, array in one.values()} == {1024}
    assert key_of("a", 4096) == key_of("a", 100) != key_of("a", 4097)


def test_hashes_differ_wherever_a_sampled_element_does(seed):
    start = {
        "narrow": torch.randn(37, dtype=torch.bfloat16),
        "wide": torch.randn(5, 7, dtype=torch.float64),
        "large": torch.randn(4096),
        "empty": torch.empty(0),
        "number": torch.zeros(()),
        "scaled": hu.ScaledTensor.encode(torch.randn(64), torch.float16),
    }

    def hashed(**other) -> dict[str, int]:
        return dict(zip(start, hashes({**start, **other}, lambda name: 5).tolist()))

    before = hashed()
    assert before == hashed(**{name: one.clone() for name, one in start.items()})
    other = {name: one.clone() for name, one in start.items() if name in ("narrow", "wide", "large")}
    for one in other.values():
        flat = one.view(-1)
        place = random.randrange(len(flat))
        flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf, dtype=one.dtype))
    other["number"], other["empty"] = torch.tensor(-0.0), torch.empty(0, 3)
    other["scaled"] = start["scaled"] * 2.0
    after = hashed(**other)
    assert {name for name in start if before[name] != after[name]} == {"narrow", "wide", "large", "number", "scaled"}
    other["large"] = torch.full((4096,), torch.nan)
    assert hashed(**other)["large"] == hashed(**other)["large"]


SHARDS = """
import sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


class StochasticSGD(torch.optim.SGD):
    bf16_stochastic_round = True
    generator = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                weight, gradient = (getattr(one, "_local_tensor", one) for one in (p, p.grad))
                wanted = weight - group["lr"] * gradient
                if weight.dtype == torch.bfloat16:
                    wanted = weight.float() - group["lr"] * gradient.float()
                    noise = torch.randint(0, 1 << 16, wanted.shape, generator=self.generator, dtype=torch.int32)
                    wanted = ((wanted.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
                weight.copy_(wanted)


def observed(make):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).bfloat16()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = make(model)
    torch.manual_seed(seed + rank)
    with hu.observe(model, optimizer, interval=2) as seen:
        for _ in range(24):
            x = torch.randn(16, 32, dtype=torch.bfloat16)
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.record.unseen == [], seen.record.unseen
    shared = {name: p.rounding.between_ranks for name, p in seen.record.parameters.items() if p.rounding}
    repeats = [finding for finding in seen.findings if finding.code == "random-bits-repeat"]
    return shared, repeats


def own(seed):
    def make(model):
        optimizer = StochasticSGD(model.parameters(), lr=5e-2)
        optimizer.generator = torch.Generator().manual_seed(seed)
        return optimizer

    return make


hu.observation.register_elementwise(StochasticSGD)
shared, repeats = observed(own(seed))
weights = ["0.weight", "2.weight"]
assert all(shared[name] > 0.1 for name in weights), shared
assert repeats and {finding.evidence["between"] for finding in repeats} == {"ranks"}, list(map(str, repeats))
assert set(weights) <= {name for finding in repeats for name in finding.where}, list(map(str, repeats))
for make in (own(seed + rank), lambda model: hu.optim.AdamW(model.parameters(), lr=1e-3, weight_update="stochastic")):
    shared, repeats = observed(make)
    assert [shared[name] for name in weights] == [0.0, 0.0], shared
    assert not repeats, list(map(str, repeats))
dist.destroy_process_group()
"""


def test_shards_rounded_by_the_same_bits_are_found_and_others_are_not(in_two_processes):
    in_two_processes(SHARDS)


def test_one_process_says_nothing():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert (seen.record.replicas, seen.record.replica_of, seen.record.unseen) == ({}, (0, 1), [])
