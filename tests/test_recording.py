"""Models that halfulp has changed, recorded as graphs: the same numbers from the file, or a refusal in words."""

import io

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import halfulp as hu
from halfulp._torch_floor import is_older

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning"),
]


def _net():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def _trained(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        with hu.kernels.engine("reference"):
            optimizer.step()
    return model


def _narrowed(x):
    model = _net()
    optimizer = hu.optim.AdamW(model.parameters(), param_dtype=torch.bfloat16)
    return _trained(model, optimizer, x.bfloat16()), x.bfloat16()


def _converted(recipe):
    def make(x):
        model = hu.convert(_net(), recipe)
        return _trained(model, hu.recipes.optimizer(model, "AdamW", lr=1e-3), x), x

    return make


MODELS = {
    "scalify": lambda x: (hu.scalify(_net()), x),
    "multicomponent": lambda x: (hu.multicomponent(_net(), 2, torch.bfloat16), x),
    "trained with param_dtype": _narrowed,
    "converted to bfloat16": _converted("bf16-split8"),
    "converted to scaled tensors": _converted("scaled-fp16"),
    "with a scaler": lambda x: (_with_scaler(_net()), x),
}
SUBCLASSES = ("scalify", "multicomponent", "converted to scaled tensors")
_scalers = []


def _with_scaler(model):
    _scalers[:] = [hu.AdaptiveGradScaler(model)]
    return model


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch.export.load before 2.12
@pytest.mark.parametrize(
    ("kind", "strict"), [*((kind, False) for kind in MODELS), ("scalify", True), ("converted to bfloat16", True)]
)
def test_an_exported_model_gives_the_same_numbers(kind, strict, seed, needs_torch):
    if strict:
        needs_torch("strict torch.export of tensor subclasses and modules with hooks")
    elif kind in SUBCLASSES:
        needs_torch("torch.export of tensor subclasses")
    model, x = MODELS[kind](torch.randn(4, 6))
    with torch.no_grad():
        wanted = model(x)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,), strict=strict), file)
    file.seek(0)
    again = torch.export.load(file).module()
    for other in (x, -x):
        with torch.no_grad():
            wanted, got = model(other), again(other)
        assert torch.equal(got, wanted)


RUN = """
import sys, torch, warnings
warnings.resetwarnings()
import halfulp
folder, *kinds = sys.argv[1:]
for kind in kinds:
    x, wanted = torch.load(f"{folder}/{kind}.pt")
    assert torch.equal(torch.export.load(f"{folder}/{kind}.pt2").module()(x), wanted), kind
"""


def test_an_exported_file_runs_in_another_process(seed, tmp_path, forked, needs_torch):
    needs_torch("torch.export of tensor subclasses")
    kinds = ["multicomponent", "scalify"]
    for kind in kinds:
        model, x = MODELS[kind](torch.randn(4, 6))
        torch.export.save(torch.export.export(model, (x,)), tmp_path / f"{kind}.pt2")
        torch.save((x, model(x).detach()), tmp_path / f"{kind}.pt")
    code, printed = forked(RUN, str(tmp_path), *kinds)
    assert code == 0, printed


RECORDERS = {
    "torch.export": lambda model, x: torch.export.export(model, (x,)),
    "torch.export strict": lambda model, x: torch.export.export(model, (x,), strict=True),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, (x,)),
    "torch.jit.script": lambda model, x: torch.jit.script(model),
    "make_fx": lambda model, x: make_fx(model)(x),
    "make_fx fake": lambda model, x: make_fx(model, tracing_mode="fake")(x),
}


@pytest.mark.parametrize("recorder", RECORDERS)
def test_an_emulated_model_is_not_recorded(recorder, seed):
    """Its roundings are no operators of the model: a graph would have float32's numbers in silence."""
    model, x = _net(), torch.randn(4, 6)
    with hu.emulate(model, "e8m3"):
        wanted = model(x)
        said = r"would record an emulated model without its roundings.*remove\(\)"
        if is_older(torch.__version__, "2.11") and recorder.startswith("torch.export"):
            said += r'|(?s:Observed exception.*NotImplementedError\(describe_recording_refusal\("torch.export"\)\))'
            said += "|Unexpectedly found a <class 'torch.Tensor'> in the outputs"  # of torch 2.6
        with pytest.raises(Exception, match=said):
            RECORDERS[recorder](model, x)
        assert torch.equal(model(x), wanted)
    if recorder != "make_fx fake":  # which takes no real parameters
        RECORDERS[recorder](model, x)


def test_an_emulated_stretch_is_not_recorded(seed):
    def function(x):
        with hu.emulate.region("e8m3"):
            return x * 1.3

    with pytest.raises(NotImplementedError, match="make_fx would record an emulated model without its roundings"):
        make_fx(function)(torch.randn(3))
