"""ScaledTensor: made from values or parts, printed, moved, copied and kept whole."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor, scalify

STORAGES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]
HALF_ULP = {torch.float16: 11, torch.bfloat16: 8, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3, torch.float32: 24}


@pytest.mark.parametrize("exponent", [-100, -20, 0, 30, 100])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_encoding_is_within_half_an_ulp_at_any_magnitude(storage, exponent, seed):
    x = torch.rand(500).add(0.5).mul(2.0**exponent) * torch.randn(500).sign()
    y = ScaledTensor.encode(x, storage)
    assert y.payload.dtype == storage
    assert y.dtype == torch.float32
    assert ((y.decode() - x).abs() <= 2.0 ** -HALF_ULP[storage] * x.abs()).all()
    rms = y.payload.float().square().mean().sqrt()
    assert 0.5 < rms < 1.5


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_special_values_keep_their_meaning(storage):
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.0])
    y = ScaledTensor.encode(x, storage).decode()
    if storage == torch.float8_e4m3fn:  # which has no infinities
        assert y[2:5].isnan().all()
    else:
        assert same_bits(y[2:4], x[2:4])
    assert y[4].isnan()
    assert same_bits(y[:2], x[:2])
    assert y[5] == 3.0


def test_empty_and_zero_tensors():
    for x in (torch.zeros(0, 3), torch.zeros(4), torch.tensor(0.0)):
        assert same_bits(ScaledTensor.encode(x).decode(), x)


def test_an_outlier_raises_the_scale_as_far_as_it_needs():
    x = torch.cat([torch.full((100_000,), 1e-3), torch.tensor([5e4])])
    y = ScaledTensor.encode(x, torch.float8_e4m3fn)
    assert y.decode().isfinite().all()
    assert abs(y.decode()[-1] / 5e4 - 1) < 0.07


def test_what_cannot_be_a_scaled_tensor_is_refused():
    x = torch.ones(3)
    for wrong, message in (
        (lambda: ScaledTensor.encode([1.0]), "x is a torch.Tensor, got list"),
        (lambda: ScaledTensor.encode(torch.ones(3, dtype=torch.int32)), "integers carry no scale"),
        (lambda: ScaledTensor.encode(torch.ones(3, dtype=torch.complex64)), "allowed are torch.float16"),
        (lambda: ScaledTensor.encode(x, torch.int8), "a payload is one of"),
        (lambda: ScaledTensor.encode(x, scale=3.0), "powers of two"),
        (lambda: ScaledTensor.encode(x.to_sparse()), "to_dense"),
        (
            lambda: ScaledTensor.encode(x * 1e6, scale=1.0),
            "out of torch.float16's range under the scale 1: give scale=16 ",
        ),
        (lambda: ScaledTensor(x, 3.0), "powers of two"),
        (lambda: ScaledTensor(x.double(), 1.0), "a payload is one of"),
        (lambda: ScaledTensor(x, 1.0, torch.int64), "a logical dtype is one of"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()


def test_values_outlive_another_scale_and_another_storage(seed):
    x = ScaledTensor.encode(torch.randn(50), torch.float32)
    moved = x.with_scale(x.scale * 2.0**20)
    assert moved.scale == x.scale * 2.0**20
    assert same_bits(moved.decode(), x.decode())
    x.cast_(torch.float16)
    assert x.payload.dtype == torch.float16
    assert same_bits(x.decode(), (moved.decode() / x.scale).half().float() * x.scale)


def test_logical_and_storage_dtypes_are_apart(seed):
    x = ScaledTensor.encode(torch.randn(5), torch.float8_e5m2)
    half = x.to(torch.float16)
    assert (half.dtype, half.payload.dtype) == (torch.float16, torch.float8_e5m2)
    assert half.decode().dtype == torch.float16
    assert type(x.long()) is torch.Tensor


def test_gradients_go_in_and_out(seed):
    x = torch.randn(4, requires_grad=True)
    ScaledTensor.encode(x, torch.float32).decode().square().sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach())
    ScaledTensor.encode(x, torch.float32).with_scale(4.0).sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach() + 1)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_every_way_of_keeping_keeps_all(storage, tmp_path, seed):
    x = torch.nn.Parameter(ScaledTensor.encode(torch.randn(3, 2), storage))
    torch.save({"x": x}, tmp_path / "x.pt")
    for again in (
        torch.load(tmp_path / "x.pt", weights_only=True)["x"],
        pickle.loads(pickle.dumps(x)),
        copy.deepcopy(x),
    ):
        assert isinstance(again, ScaledTensor)
        assert isinstance(again, torch.nn.Parameter)
        assert same_bits(again.payload, x.payload)
        assert same_bits(again.scale, x.scale)
        assert again.payload.data_ptr() != x.payload.data_ptr()
    other = torch.nn.Parameter(ScaledTensor.encode(torch.randn(3, 2), storage))
    other.data = x.data
    assert same_bits(other.payload, x.payload)


def test_text_says_value_scale_and_payload():
    x = ScaledTensor(torch.tensor([1.0, 1.5], dtype=torch.float16), 2.0**-3)
    assert repr(x) == "ScaledTensor([0.1250, 0.1875], scale=2^-3, payload=torch.float16)"
    assert repr(x.requires_grad_()).endswith("requires_grad=True)")
    assert x.tolist() == [0.125, 0.1875]
    assert f"{x[1].detach():.3f}" == "0.188"


def test_other_libraries_are_told_to_decode():
    x = ScaledTensor.encode(torch.ones(2))
    for wrong in (x.numpy, lambda: x.__array__(), lambda: torch.from_dlpack(x)):
        with pytest.raises(TypeError, match="decode"):
            wrong()


def test_memory_of_a_model_can_be_shared():
    layer = scalify(torch.nn.Linear(3, 2))
    assert not layer.weight.is_shared()
    before = layer.weight.tolist()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert layer.weight.scale.is_shared()
    assert layer.weight.tolist() == before


def test_models_run_in_inference_mode():
    layer, x = scalify(torch.nn.Linear(3, 2)), torch.randn(4, 3)
    encoded = ScaledTensor.encode(x)
    wanted, other = layer(x).decode(), layer(encoded).decode()
    with torch.inference_mode():
        for found in (layer(x), layer(x.clone())):
            assert torch.equal(found.decode(), wanted)
        assert torch.equal(layer(encoded).t().t()[:, [0, 1]].decode(), other)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


class Items(Dataset):
    """Elements that a plain tensor of the storage would lose, and eight bits, which torch has no kernels to stack."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        values = torch.tensor([1.0, 3.0]) * 2.0 ** -(40 + index)
        kinds = {"half": torch.float16, "eight": torch.float8_e4m3fn}
        return {name: ScaledTensor.encode(values, storage) for name, storage in kinds.items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_keeps_payload_and_scale(workers):
    loader = DataLoader(Items(), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None)
    for number, batch in enumerate(loader):
        for name, x in batch.items():
            wanted = torch.stack([Items()[2 * number + k][name] for k in range(2)])
            assert isinstance(x, ScaledTensor), name
            assert same_bits(x.payload, wanted.payload)
            assert torch.equal(x.scale, wanted.scale)
            assert x.dtype == torch.float32
            assert x.payload.dtype == wanted.payload.dtype


def test_every_tensor_class_has_batches_of_its_own():
    kinds = torch.Tensor.__subclasses__()
    kinds += [below for kind in kinds for below in kind.__subclasses__()]
    own = [kind for kind in kinds if kind.__module__.startswith("halfulp.")]
    assert ScaledTensor in own
    assert not [kind for kind in own if "__torch_dispatch__" in vars(kind) and kind not in default_collate_fn_map]
