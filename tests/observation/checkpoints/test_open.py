"""Checkpoints of every layout give the tensors and states that were saved; what is none is refused in words."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import save_file

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.observation.checkpoints._checkpoint import (
    name_optimizer_states,
    open_checkpoint,
    parse_checkpoint_content,
)


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
        assert same_bits(stored, wanted[name])
    if optimizer is not None:
        unseen: list[str] = []
        states = name_optimizer_states(found, unseen)
        assert not unseen
        for name, parameter in model.named_parameters():
            moment = states[name].state["exp_avg"]
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


def test_sharded_folders_of_a_trainer(tmp_path):
    model, optimizer = trained()
    names = list(model.state_dict())
    placed = {name: f"model-{1 + (k > 3):05d}-of-00002.safetensors" for k, name in enumerate(names)}
    for shard in set(placed.values()):
        save_file({name: model.state_dict()[name] for name in names if placed[name] == shard}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    (tmp_path / "config.json").write_text("{}")
    check(tmp_path, model, optimizer)
    check(index, model)
    (tmp_path / placed[names[0]]).unlink()
    with pytest.raises(ValueError, match=r"lacks the shards 'model-00001-of-00002.*copy them too"):
        open_checkpoint(tmp_path)


def test_shards_of_torch_save_are_refused(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "a.bin"}}))
    with pytest.raises(ValueError, match=r"names shards of torch\.save: load the model from them, and save it in"):
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


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def test_nothing_is_executed(tmp_path):
    for name, zipped in (("zip.pt", True), ("old.pt", False)):
        torch.save({"model": {"w": torch.ones(2)}, "x": Evil()}, tmp_path / name, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"was not loaded: it holds .*exec.*weights_only refuses"):
            open_checkpoint(tmp_path / name)


def test_a_distributed_checkpoint_is_refused_with_a_tool(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"python -m torch\.distributed\.checkpoint\.format_utils dcp_to_torch"):
        open_checkpoint(tmp_path)


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


def test_what_lies_beside_and_is_not_read_is_said(tmp_path):
    model, optimizer = trained()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(model.state_dict(), tmp_path / "model_1.safetensors")
    for name in ("optimizer.bin", "optimizer_1.bin"):
        torch.save(optimizer.state_dict(), tmp_path / name)
    said = " ".join(check(tmp_path, model).unseen)
    assert "'model_1.safetensors' lie beside model.safetensors" in said
    assert "'optimizer_1.bin' are further optimizers' states" in said


class Scaled(torch.nn.Linear):
    """A layer with extra state, as those of transformer-engine."""

    def get_extra_state(self):
        return {"amax": torch.ones(3)}


def test_extra_state_and_packed_weights_stand_beside_all_others():
    model = torch.nn.Sequential(Scaled(8, 8), torch.nn.Linear(8, 8))
    state = model.state_dict()
    found = parse_checkpoint_content(state, "A")
    assert found.tensors.keys() == model.state_dict().keys() - {"0._extra_state"} | {"0._extra_state.amax"}
    later = {name: copy.deepcopy(value) for name, value in state.items()}
    later["1.weight"][2, 3] = math.nan
    assert [one.where for one in hu.audit(state, later).findings if one.severity == "error"] == [("1.weight",)]
    # As torch.ao.quantization's dynamic layers save theirs.
    packed = (torch.ones(8, 8, dtype=torch.int8), torch.ones(8))
    state = {
        "0.scale": torch.ones(()),
        "0._packed_params.dtype": torch.qint8,
        "0._packed_params._packed_params": packed,
    }
    found = parse_checkpoint_content(state | {"1.weight": torch.ones(3)}, "A")
    assert list(found.tensors) == ["0.scale", *(f"0._packed_params._packed_params.{k}" for k in (0, 1)), "1.weight"]
    assert found.unseen == []
    found = parse_checkpoint_content({"weight": torch.ones(2), "_extra_state": {"amax": torch.ones(2)}}, "A")
    assert list(found.tensors) == ["weight", "_extra_state.amax"]


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("content", "names", "unread"),
    [
        (
            {"unet": {"w": X}, "upsampler": {"w": X + 1}, "hypernet": {"w": X + 2}, "lr_scheduler": {"a": X[0, 0]}},
            ["unet.w", "upsampler.w", "hypernet.w"],
            [],
        ),
        ({"backbone": {"w": X}, "logit_scale": X[0, 0]}, ["w"], ["'logit_scale' were not read"]),
        (
            {"model": {"w": X}, "loss_history": X, "callbacks": {"average": {"w": X}}, "rng": [X.byte()], "loss": X[0]},
            ["w"],
            ["'loss_history', 'loss' were not read", "tensors under 'callbacks' were not read"],
        ),
        (
            {"module.a.w": X, "module.b.w": X + 1, "module.b._extra_state": [X + 2], "sampler": {"w": X}},
            ["a.w", "b.w", "b._extra_state.0"],
            ["tensors under 'sampler' were not read"],
        ),
        ({"model": {"w": X}, "epoch": X[0, 0], "rng_states": [X.byte()], "metrics": {"best": X[0, 0]}}, ["w"], []),
    ],
)
def test_what_floats_is_read_or_named(content, names, unread):
    found = parse_checkpoint_content(content, "A")
    assert list(found.tensors) == names
    assert len(found.unseen) == len(unread)
    assert all(said.startswith(start) for said, start in zip(found.unseen, unread))


def test_a_folder_of_several_indices_is_read_by_the_name_that_loading_takes(tmp_path):
    model, _ = trained()
    for variant in ("", ".fp16", ".a"):
        weights = {name: value + (variant != "") for name, value in model.state_dict().items()}
        save_file(weights, tmp_path / f"shard{variant}.safetensors")
        index = {"weight_map": dict.fromkeys(weights, f"shard{variant}.safetensors")}
        (tmp_path / f"model{variant}.safetensors.index.json").write_text(json.dumps(index))
    said = check(tmp_path, model).unseen
    names = "'model.a.safetensors.index.json', 'model.fp16.safetensors.index.json'"
    assert said == [f"{names} lie beside model.safetensors.index.json, and were not compared"]
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=rf"holds several checkpoints \({names}\): give one of the files"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.a.safetensors.index.json").unlink()
    assert open_checkpoint(tmp_path).tensors.keys() == model.state_dict().keys()


def test_a_dtype_that_torch_lacks_is_refused_by_name(tmp_path):
    header = b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'.ljust(64)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    # Releases before this dtype refuse the header, which names it too.
    with pytest.raises(ValueError, match=r"model\.safetensors (holds 'x' in |cannot be read as safetensors).*F6_E2M3"):
        open_checkpoint(tmp_path)


def test_empty_tensors_alone_are_no_checkpoint(tmp_path):
    torch.save({"w": torch.empty(0), "v": torch.empty(3, 0)}, tmp_path / "zero.pt")
    with pytest.raises(ValueError, match="only empty tensors"):
        open_checkpoint(tmp_path / "zero.pt")
