"""new_tensor, type and torch.nn.init on MCTensors: with all digits, and of the same kind."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import halfulp
from halfulp import MCTensor

INITS = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
ARGUMENTS = {"constant_": (0.3,), "sparse_": (0.2,)}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_every_initialization(name, dtype, is_parameter, seed, needs_torch):
    if name == "trunc_normal_" and dtype == torch.float64:
        needs_torch("trunc_normal_ without erfinv, which components of float64 compute in float64")
    shape = (4, 4, 3) if name == "dirac_" else (6, 4)
    weight = MCTensor.encode(torch.full(shape, 9.0), 2, dtype)
    weight = nn.Parameter(weight) if is_parameter else weight
    plain = torch.full(shape, 9.0, dtype=torch.float64)
    initialize, given = getattr(nn.init, name), ARGUMENTS.get(name, ())
    torch.manual_seed(seed)
    assert initialize(weight, *given) is weight
    torch.manual_seed(seed)
    initialize(plain, *given)
    found = weight.detach().decode()
    assert found.isfinite().all()
    assert (found != 9.0).all()
    # torch draws in the order of the memory, in float64: one seed gives the same values, rounded to the components.
    bits = {torch.float16: 20, torch.bfloat16: 14, torch.float32: 44, torch.float64: 50}[dtype]
    if name not in ("orthogonal_", "sparse_"):
        assert (found - plain).abs().max() <= 2.0**-bits * max(1.0, plain.abs().max().item())


def test_every_function_of_init_is_here():
    public = {n for n, f in vars(nn.init).items() if inspect.isfunction(f) and n.endswith("_") and n[0] != "_"}
    assert public == set(INITS)


@pytest.mark.parametrize(
    ("mean", "std", "low", "high"), [(0.0, 1.0, -0.1, 0.1), (0.1, 0.3, -0.2, 0.1), (0.0, 1.0, 3, 4)]
)
@pytest.mark.filterwarnings("ignore:mean is more")
def test_truncated_draws_stay_within_the_bounds_as_written(mean, std, low, high, seed):
    weight = MCTensor.encode(torch.zeros(2000), 2, torch.float32)
    nn.init.trunc_normal_(weight, mean, std, low, high)
    values = weight.decode()
    assert (values >= low).all()
    assert (values <= high).all()
    assert values.std() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_tensors(dtype):
    x = MCTensor.encode([1.5, 2.5, 3.5], 3, dtype)
    plain = torch.tensor([0.1, 0.3], dtype=torch.float64)
    for made in (x.new_tensor([0.1, 0.3]), x.new_tensor(plain)):
        assert isinstance(made, MCTensor)
        assert made.dtype == dtype
        assert len(made.components) == 3
        wanted = torch.tensor([0.1, 0.3], dtype=torch.float64)
        assert (made.decode() - wanted).abs().max() <= (2.0**-20 if dtype == torch.bfloat16 else 2.0**-29)
    assert torch.equal(x.new_tensor(x).decode(), x.decode())
    with pytest.raises(TypeError, match=r"x\.new_empty\(sizes\)"):
        x.new(2, 3)
    assert x.new_tensor([1, 2], dtype=torch.int64).tolist() == [1, 2]
    assert x.new_tensor(0.1, dtype=torch.float64).dtype == torch.float64
    assert x.new_tensor(0.1, requires_grad=True).requires_grad
    assert x.type() == x.components[0].type()
    assert x.type(torch.float64).dtype == torch.float64
    assert x.type("torch.DoubleTensor").dtype == torch.float64


def test_no_dispatch_key_of_torchs_own_tests_is_taken():
    folder = Path(halfulp.__file__).parent
    assert not [str(path) for path in folder.rglob("*.py") if "TESTING_ONLY" in path.read_text()]
