"""Checkpoints of every layout give the tensors and states that were saved; what is none is refused in words."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.observation.checkpoints._names import name_optimizer_states
from halfulp.observation.checkpoints._open import open_checkpoint


def trained(dtype=torch.bfloat16, named=True, steps=3):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=1e-3)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def check(path, model, optimizer=None):
    found = open_checkpoint(path)
    wanted = model.state_dict()
    assert found.tensors.keys() == wanted.keys()
    for name, stored in found.tensors.items():
        assert same_bits(stored.read(), wanted[name])
        assert (stored.dtype, stored.shape) == (wanted[name].dtype, tuple(wanted[name].shape))
    if optimizer is not None:
        unseen: list[str] = []
        states = name_optimizer_states(found, unseen)
        assert not unseen
        for name, parameter in model.named_parameters():
            moment = states[name].tensors["exp_avg"]
            moment = moment if isinstance(moment, torch.Tensor) else moment.read()
            assert same_bits(moment, optimizer.state[parameter]["exp_avg"])
            assert states[name].options["lr"] == 1e-3
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_safetensors(tmp_path, dtype):
    model, _ = trained(dtype)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    check(tmp_path / "model.safetensors", model)
    check(tmp_path, model)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_torch_files_bare_and_nested(tmp_path, zipped, named):
    model, optimizer = trained(named=named)
    options = {"_use_new_zipfile_serialization": zipped}
    torch.save(model.state_dict(), tmp_path / "bare.pt", **options)
    check(tmp_path / "bare.pt", model)
    whole = {"epoch": 3, "loss": torch.tensor(0.5), "optimizer": optimizer.state_dict()}
    for key in ("model", "state_dict", "module", "model_state_dict"):
        torch.save({**whole, key: model.state_dict()}, tmp_path / "whole.ckpt", **options)
        check(tmp_path / "whole.ckpt", model, optimizer)


def test_a_lightning_file_and_names_of_wrappers(tmp_path):
    model, optimizer = trained()
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    content = {
        "state_dict": wrapped,
        "optimizer_states": [optimizer.state_dict()],
        "callbacks": {"best": {"score": torch.tensor(1.0)}},
        "loops": {},
    }
    torch.save(content, tmp_path / "last.ckpt")
    check(tmp_path / "last.ckpt", model, optimizer)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_folders_of_a_trainer(tmp_path, kind):
    model, optimizer = trained()
    names = list(model.state_dict())
    placed = {name: f"model-{1 + (k > 3):05d}-of-00002.{kind}" for k, name in enumerate(names)}
    for shard in set(placed.values()):
        part = {name: model.state_dict()[name] for name in names if placed[name] == shard}
        save_file(part, tmp_path / shard) if kind == "safetensors" else torch.save(part, tmp_path / shard)
    index = "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
    (tmp_path / index).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    (tmp_path / "config.json").write_text("{}")
    check(tmp_path, model, optimizer)
    check(tmp_path / index, model)
    (tmp_path / placed[names[0]]).unlink()
    with pytest.raises(ValueError, match=r"lacks the shards 'model-00001-of-00002.*copy them too"):
        open_checkpoint(tmp_path)


def test_states_without_names_beside_safetensors_are_said(tmp_path):
    model, optimizer = trained(named=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    unseen: list[str] = []
    states = name_optimizer_states(open_checkpoint(tmp_path), unseen)
    assert not states
    assert "the 6 optimizer states" in unseen[0]
    assert "named_parameters" in unseen[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints(tmp_path, needs_torch):
    needs_torch("distributed.checkpoint.save(no_dist=)")
    needs_torch("distributed.checkpoint that writes without torch's own warning")
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": states, "epoch": 3}
    save(content, storage_writer=FileSystemWriter(str(tmp_path / "dcp")), no_dist=True)
    check(tmp_path / "dcp", model, optimizer)
    save(model.state_dict(), storage_writer=FileSystemWriter(str(tmp_path / "flat")), no_dist=True)
    check(tmp_path / "flat", model)
    for file in (tmp_path / "flat").glob("*.distcp"):
        whole = file.read_bytes()
        file.write_bytes(bytes(len(whole)))
        with pytest.raises(ValueError, match="it is damaged"):
            next(iter(open_checkpoint(tmp_path / "flat").tensors.values())).read()
        file.write_bytes(whole[:-400])
    with pytest.raises(ValueError, match="truncated"):
        open_checkpoint(tmp_path / "flat")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="this system does not list open files")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_a_distributed_checkpoint_are_not_held_open(tmp_path, needs_torch):
    needs_torch("distributed.checkpoint.save(no_dist=)")
    needs_torch("distributed.checkpoint that writes without torch's own warning")
    from torch.distributed.checkpoint import FileSystemWriter, save

    content = {f"layers.{k}": torch.full((3,), float(k)) for k in range(20)}
    save(content, storage_writer=FileSystemWriter(str(tmp_path), single_file_per_rank=False), no_dist=True)
    before = len(os.listdir("/proc/self/fd"))
    found = open_checkpoint(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(same_bits(found.tensors[name].read(), value) for name, value in content.items())


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def test_nothing_is_executed(tmp_path):
    for name, zipped in (("zip.pt", True), ("old.pt", False)):
        torch.save({"model": {"w": torch.ones(2)}, "x": Evil()}, tmp_path / name, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"was not loaded: it holds .*exec.*weights_only refuses"):
            open_checkpoint(tmp_path / name)
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"was not loaded: it names builtins\.exec"):
        open_checkpoint(folder)


def truncated(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is an empty folder"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"GIF89a" * 40), "no checkpoint|of another kind"),
        (lambda path: path.write_text("hello"), "no checkpoint|of another kind"),
        (lambda path: torch.save(torch.ones(2), path), "holds a Tensor"),
        (lambda path: torch.save({"epoch": 1}, path), "no tensors"),
        (lambda path: torch.save(trained()[1].state_dict(), path), "only an optimizer's states"),
        (lambda path: (torch.save(trained()[0].state_dict(), path), truncated(path)), "damaged"),
        (lambda path: (save_file(trained()[0].state_dict(), path), truncated(path)), "truncated"),
        (lambda path: ((path / "step-1").mkdir(parents=True), (path / "step-2").mkdir()), "holds the folders"),
        (lambda path: (path.mkdir(), (path / "readme.txt").write_text("x")), "holds no checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_a_remedy(tmp_path, make, said):
    path = tmp_path / "given.safetensors" if "save_file" in make.__code__.co_names else tmp_path / "given"
    make(path)
    with pytest.raises(ValueError, match=said) as raised:
        open_checkpoint(path)
    assert "give" in str(raised.value) or "copy" in str(raised.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "w.gguf"])
@pytest.mark.parametrize("begin", [b"GGUF", b"\x89HDF\r\n\x1a\n", b"version https://git-lfs", b"<!", b"\x1f\x8b"])
def test_weights_of_another_kind_are_refused(tmp_path, begin, name):
    (tmp_path / name).write_bytes(begin + bytes(200))
    with pytest.raises(ValueError, match="of another kind"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("length", [60, 316])
def test_a_length_that_begins_like_markup_is_one(tmp_path, length):
    """The first byte of a header of so many bytes is that of a web page."""
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = length.to_bytes(8, "little") + header.ljust(length) + b"\0\0\x80?"
    (tmp_path / "model.safetensors").write_bytes(data)
    assert open_checkpoint(tmp_path / "model.safetensors").tensors.keys() == {"x"}


def test_parts_of_tensors_are_refused(tmp_path):
    for model in (hu.multicomponent(torch.nn.Linear(4, 3), 2, torch.bfloat16), hu.scalify(torch.nn.Linear(4, 3))):
        torch.save(model.state_dict(), tmp_path / "parts.pt")
        with pytest.raises(NotImplementedError, match="audit decoded values"):
            open_checkpoint(tmp_path / "parts.pt")


SHARDED = """
import os, sys, torch, torch.distributed as dist, warnings
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.tensor import Shard, distribute_tensor
warnings.simplefilter("ignore")
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
mesh = dist.init_device_mesh("cpu", (2,))
whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
content = {
    "rows": distribute_tensor(whole, mesh, [Shard(0)]),
    "columns": distribute_tensor(whole, mesh, [Shard(1)]),
    "whole": whole.bfloat16(),
}
save(content, storage_writer=FileSystemWriter(os.path.dirname(store) + "/dcp"))
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of gloo may outlive the interpreter, which aborts then
"""


def test_chunks_of_several_ranks_are_one_tensor(tmp_path, in_two_processes):
    in_two_processes(SHARDED)
    found = open_checkpoint(tmp_path / "dcp").tensors
    whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    for name in ("rows", "columns"):
        assert not found[name].mapped
        assert same_bits(found[name].read(), whole)
    assert same_bits(found["whole"].read(), whole.bfloat16())
    next((tmp_path / "dcp").glob("__1_*.distcp")).unlink()
    with pytest.raises(ValueError, match=r"lacks __1_0\.distcp"):
        open_checkpoint(tmp_path / "dcp")


def test_partitions_of_deepspeed_are_refused_with_a_remedy(tmp_path):
    inner = tmp_path / "global_step10"
    inner.mkdir()
    for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"module": {"w": torch.empty(0)}}, inner / name)
        with pytest.raises(ValueError, match=r"DeepSpeed's ZeRO partitions .*zero_to_fp32\.py"):
            open_checkpoint(inner / name)
    (tmp_path / "latest").write_text("global_step10")
    for name in ("training_args.bin", "scheduler.pt", "rng_state_0.pth"):  # as trainers save beside partitions
        torch.save({"lr": 0.1}, tmp_path / name)
    for path in (tmp_path, inner):
        with pytest.raises(ValueError, match=r"DeepSpeed's ZeRO partitions .*zero_to_fp32\.py"):
            open_checkpoint(path)
    model, _ = trained()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = check(tmp_path, model)
    assert "partitions of the optimizer's states (" in found.unseen[0]


def test_what_lies_beside_and_is_not_read_is_said(tmp_path):
    model, optimizer = trained()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(model.state_dict(), tmp_path / "model_1.safetensors")
    for name in ("optimizer.bin", "optimizer_1.bin"):
        torch.save(optimizer.state_dict(), tmp_path / name)
    said = " ".join(check(tmp_path, model).unseen)
    assert "'model_1.safetensors' lie beside model.safetensors" in said
    assert "'optimizer_1.bin' are further optimizers' states" in said


def test_empty_tensors_alone_are_no_checkpoint(tmp_path):
    torch.save({"w": torch.empty(0), "v": torch.empty(3, 0)}, tmp_path / "zero.pt")
    with pytest.raises(ValueError, match="only empty tensors"):
        open_checkpoint(tmp_path / "zero.pt")
