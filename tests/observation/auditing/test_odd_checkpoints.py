"""Checkpoints as they come: odd dtypes, layouts, files and dicts are compared, or said in words, and never silent."""

import json
import math
import os
import pickle
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import halfulp as hu

W = torch.linspace(-1, 1, 64).reshape(8, 8)


def codes(found):
    return {(one.code, name) for one in found.findings for name in one.where if one.severity != "note"}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_weights_are_two_real_numbers_each(dtype, seed):
    before = {"wave": torch.randn(8, 8, dtype=dtype), "still": torch.randn(8, dtype=dtype), "w": W}
    after = {"wave": before["wave"] + 1j, "still": before["still"].clone(), "w": W + 1}
    found = hu.audit(before, after)
    assert found.tensors["wave"].status == "changed"
    assert (found.tensors["wave"].numel, found.tensors["wave"].unchanged) == (128, 64)
    assert found.tensors["still"].status == "unchanged"
    assert "weight-frozen" in {one.code for one in found.findings if "still" in one.where}
    after["wave"][2, 3] = complex(0.0, math.nan)
    after["still"] = before["still"].conj() * 0
    found = hu.audit(before, after)
    assert ("first-nonfinite", "wave") in codes(found)
    assert found.tensors["wave"].b.nan == 1
    assert found.tensors["still"].b.zeros == 16
    narrower = hu.audit({"w": before["wave"].to(torch.complex128)}, {"w": before["wave"].to(torch.complex64) + 1})
    assert "digits fewer" in narrower.findings[0].summary


def test_packed_floats_integers_and_scales_are_compared_by_their_codes(seed):
    def packed():
        return torch.randint(0, 255, (8, 8), dtype=torch.uint8)

    before, after = (
        {
            "pairs": packed().view(torch.float4_e2m1fn_x2),
            "codes": packed(),
            "scale": packed().view(torch.float8_e8m0fnu),
        }
        for _ in range(2)
    )
    found = hu.audit(before | {"w": W}, after | {"w": W + 1})
    assert {row.status for row in found.tensors.values()} == {"changed"}
    assert {row.role for name, row in found.tensors.items() if name != "w"} == {"buffer"}
    found = hu.audit(before | {"w": W}, before | {"w": W + 1})
    assert [found.tensors[name].status for name in before] == ["unchanged"] * 3
    assert found.passed


def test_a_weight_that_comes_back_quantized_has_no_digits_to_count():
    (finding,) = hu.audit({"w": W, "v": W.clone()}, {"w": (W * 100).to(torch.int8), "v": W + 1}).findings
    assert (finding.code, finding.severity) == ("dtype-changed-on-resume", "error")
    assert finding.summary == "fp32 in A, int8 in B"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch 2.13
def test_quantized_tensors_beside_the_weights_are_compared():
    beside = {"codes": torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)}
    assert hu.audit({"w": W} | beside, {"w": W + 1} | beside).tensors["codes"].status == "unchanged"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch before 2.12
def test_tensors_without_plain_numbers_are_named(tmp_path):
    sparse, meta = torch.eye(4).to_sparse(), torch.empty(2, device="meta")
    for name, shift in (("a", 0), ("b", 1)):
        torch.save({"w": W + shift, "sparse": sparse, "meta": meta}, tmp_path / name)
    said = " ".join(hu.audit(tmp_path / "a", tmp_path / "b").unseen)
    assert "sparse was not compared: it is a tensor of layout torch.sparse_coo" in said
    assert "meta was not compared: it is on the meta device" in said


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": 3, "param_groups": 7},
        {"state": {}, "param_groups": [3]},
        {"state": {}, "param_groups": [{"params": 3}]},
    ],
)
def test_damaged_optimizer_states_are_said(optimizer):
    found = hu.audit({"model": {"w": W}, "optimizer": optimizer}, {"model": {"w": W + 1}})
    assert "optimizer was not compared: its param_groups and state are not those of a torch optimizer" in found.unseen


def test_steps_that_are_nan_are_said():
    state = {"exp_avg": W, "exp_avg_sq": W * math.nan, "step": torch.tensor(math.nan)}
    groups = [{"params": [0], "param_names": ["w"], "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}]
    optimizer = {"state": {0: state}, "param_groups": groups}
    found = hu.audit({"model": {"w": W}, "optimizer": optimizer}, {"model": {"w": W + 1}, "optimizer": optimizer})
    assert "the last updates of 'w' were not computed again" in " ".join(found.unseen)


def test_betas_that_momentum_does_not_need_are_not_read():
    groups = [{"params": [0], "param_names": ["w"], "lr": 1e-3, "betas": (None, 0.99)}]
    optimizer = {"state": {0: {"momentum_buffer": W}}, "param_groups": groups}
    found = hu.audit({"model": {"w": W}, "optimizer": optimizer}, {"model": {"w": W + 1}, "optimizer": optimizer})
    assert found.states["w"].update.seen == 64


def loop():
    content = {"w": W}
    content["again"] = content
    return content


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: loop(), "holds itself: give the model's state_dict"),
        (lambda path: os.symlink("nowhere", path), "given does not exist: give a file"),
        (lambda path: os.mkfifo(path), "is neither a file nor a folder"),
        (lambda path: Path("x" * 5000), "does not exist|File name too long"),
        (lambda path: tar(path), r"cannot be read as a file of torch\.save .*another kind; give a checkpoint in"),
        (
            lambda path: index(path, "../other.safetensors"),
            r"names '\.\./other.safetensors', which are no files of its",
        ),
        (lambda path: index(path, "/etc/passwd"), "names '/etc/passwd', which are no files of its folder"),
        (lambda path: index(path, 3), "names 3, which are no files of its folder"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(tmp_path, make, said):
    path = tmp_path / "given"
    given = make(path) or path
    with pytest.raises(ValueError, match=said):
        hu.audit(given, {"w": W})


def tar(path):
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            entry = tarfile.TarInfo(name)
            content = pickle.dumps(0)
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))


def index(path, shard):
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))


def test_one_dict_given_twice_is_not_printed():
    weights = {"w": W}
    with pytest.raises(ValueError, match="the same checkpoint, a dict: give an earlier"):
        hu.audit(weights, weights)


@pytest.mark.parametrize("rate", [True, 10**400, -1, "fast", math.nan])
def test_rates_that_are_no_numbers_are_refused(rate):
    with pytest.raises(ValueError, match="give a number from 0 on"):
        hu.audit({"w": W}, {"w": W + 1}, lr=rate)


def test_shards_may_be_links_out_of_their_folder_as_in_a_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    save_file({"w": W}, blobs / "abc")
    index(snapshot, "model-00001-of-00001.safetensors")
    os.symlink("../blobs/abc", snapshot / "model-00001-of-00001.safetensors")
    assert hu.audit(snapshot, {"w": W + 1}).tensors["w"].status == "changed"


def test_a_file_of_the_other_byte_order_holds_the_same_numbers(tmp_path):
    content = {"w": W.clone(), "v": W.bfloat16()}
    torch.save(content, tmp_path / "little.pt")
    swapped = {"0": W.numpy().byteswap(), "1": W.bfloat16().view(torch.int16).numpy().byteswap()}
    with zipfile.ZipFile(tmp_path / "little.pt") as source, zipfile.ZipFile(tmp_path / "big.pt", "w") as target:
        for entry in source.infolist():
            name = entry.filename.rpartition("/")[2]
            data = swapped[name].tobytes() if "/data/" in entry.filename else source.read(entry)
            target.writestr(entry.filename, b"big" if name == "byteorder" else data)
    found = hu.audit(tmp_path / "big.pt", content)
    assert {row.status for row in found.tensors.values()} == {"unchanged"}


def zipped_again(source, target, method):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def test_a_file_that_was_zipped_again_holds_the_same_numbers(tmp_path):
    content = {"w": W.clone(), "v": W.bfloat16(), "zeros": torch.zeros(999)}
    torch.save(content, tmp_path / "a.pt")
    zipped_again(tmp_path / "a.pt", tmp_path / "b.pt", zipfile.ZIP_STORED)
    found = hu.audit(tmp_path / "a.pt", tmp_path / "b.pt")
    assert {row.status for row in found.tensors.values()} == {"unchanged"}


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_that_was_zipped_again_with_compression_is_refused(method, tmp_path):
    torch.save({"w": W}, tmp_path / "a.pt")
    zipped_again(tmp_path / "a.pt", tmp_path / "b.pt", method)
    with pytest.raises(ValueError, match=r"b\.pt was zipped again with compression: unpack it, and give what"):
        hu.audit(tmp_path / "a.pt", tmp_path / "b.pt")


def test_names_with_odd_characters_stay_as_they_are(tmp_path):
    names = ["a b/ü\n.weight", "<script>alert(1)</script>", "x" * 300, "..", ""]
    torch.save({name: W.clone() for name in names}, tmp_path / "a.pt")
    torch.save({name: W + k for k, name in enumerate(names)}, tmp_path / "b.pt")
    found = hu.audit(tmp_path / "a.pt", tmp_path / "b.pt")
    assert set(found.tensors) == set(names)
    found.to_html(tmp_path / "page.html")
    assert "<script>alert(1)" not in (tmp_path / "page.html").read_text()


def test_adapters_alone_are_a_checkpoint(tmp_path, seed):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        part = {f"layers.{k}.q.lora_{part}.weight": torch.randn(8, 8) for k in range(2) for part in "AB"}
        save_file(part, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text("{}")
    found = hu.audit(tmp_path / "a", tmp_path / "b")
    assert found.passed
    assert len(found.tensors) == 4
