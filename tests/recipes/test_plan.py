"""hu.explain beside what hu.convert, the recipe's optimizer and its scaler then do."""

import copy

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import recipes
from halfulp.recipes._operands import BlockProductForward
from halfulp.subclass.models._float32_products import _WIDENED_MARK_ATTRIBUTE

CATALOGUE = recipes.names()


def tied() -> nn.Module:
    """A head that is the embedding, a frozen layer, a layer with a frozen bias."""
    model = nn.Sequential(
        nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 32), nn.Linear(32, 16)
    )
    model[4].weight = model[0].weight
    model[2].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


class Image(nn.Module):
    """Convolutions, batch norms, attention, and a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.stem = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rnn = nn.GRU(8, 8, batch_first=True)


class SharedNorm(nn.Module):
    """A norm whose weight another module holds too, and a norm with children."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.linear = nn.Linear(4, 4)
        self.linear.bias = self.norm.bias
        self.twice = nn.Bilinear(4, 4, 4)
        self.twice.again = self.twice.bias
        self.empty = nn.LayerNorm(4, elementwise_affine=False)


MODELS = {"tied": tied, "image": Image, "shared norm": SharedNorm}


def held(parameter: torch.Tensor) -> str:
    """How a converted parameter is held, from the tensor itself."""
    if isinstance(parameter, hu.MCTensor):
        return f"{len(parameter.components)} x {str(parameter.components[0].dtype).removeprefix('torch.')}"
    if isinstance(parameter, hu.ScaledTensor):
        return f"{str(parameter.payload.dtype).removeprefix('torch.')} payload x scale"
    return str(parameter.dtype).removeprefix("torch.")


def updates(model: nn.Module, recipe: hu.Recipe) -> dict[int, str]:
    """The weight update that the recipe's optimizer has for each parameter that it can step, by id."""
    if recipe.is_stepped_by_torch:
        return {}
    found = {}
    for group in recipes.optimizer(model, "AdamW", lr=1e-3).param_groups:
        update = group["weight_update"]
        for parameter in group["params"]:
            float32 = recipe.is_narrow and parameter.dtype == torch.float32
            if update is not None and parameter.requires_grad and not float32 and recipe.weight_update is not None:
                found[id(parameter)] = str(getattr(update, "name", update))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", CATALOGUE)
def test_what_is_said_is_what_is_done(name: str, kind: str, seed: int) -> None:
    recipe, model = recipes.get(name), MODELS[kind]()
    before = copy.deepcopy(model.state_dict())
    said = hu.explain(model, name)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [plan.name for plan in said.modules] == [name for name, _ in model.named_modules()]
    hu.convert(model, name)
    stepped = updates(model, recipe)
    met: set[int] = set()
    for plan in said.modules:
        module = model.get_submodule(plan.name)
        own = {key: p for key, p in module._parameters.items() if p is not None}
        new = {id(p): p for p in own.values() if id(p) not in met}
        met |= {id(p) for p in own.values()}
        assert plan.parameters == sum(p.numel() for p in new.values())
        kinds = {held(p) for p in own.values()}
        if len(kinds) == 1:
            assert plan.held_as.startswith(kinds.pop())
        elif kinds:
            assert all(one in plan.held_as for one in kinds)
        got = {stepped[id(p)] for p in new.values() if id(p) in stepped}
        assert len(got) < 2
        assert (plan.weight_update or "").startswith("".join(got) or "")
        assert bool(plan.weight_update) == bool(got)
        in_blocks = isinstance(vars(module).get("forward"), BlockProductForward)
        assert not in_blocks or plan.products == f"operands in {recipe.operand_format}"
        has_fp8 = "forward" in vars(module) and not in_blocks and _WIDENED_MARK_ATTRIBUTE not in vars(module)
        assert (plan.products == "fp8 products") == has_fp8 or plan.name == "attention.out_proj"
        asked_all = plan.asked == plan.gets
        assert asked_all or plan.why, "what is not got has a reason"
    assert said.bytes_before == sum(p.numel() * 4 for p in {id(p): p for p in model.parameters()}.values())
    shown = str(said)
    for plan in said.modules:
        assert plan.kind in shown or not plan.held_as


def test_reasons_name_globs_ties_and_what_is_frozen() -> None:
    why = {plan.name: plan.why for plan in hu.explain(tied(), "bf16-kahan").modules}
    assert why == {
        **{"": "", "0": "", "2": "frozen", "3": "'bias' frozen", "4": "'weight' is '0.weight'"},
        "1": "matches '*Norm*'; float32 needs no weight update",
    }
    shared = {plan.name: (plan.held_as, plan.why) for plan in hu.explain(SharedNorm(), "bf16").modules}
    assert shared["linear"] == (
        "bfloat16, 'bias' float32",
        "shares 'bias' with a module that stays float32; 'bias' is 'norm.bias'",
    )
    assert shared["empty"] == ("float32", "matches '*Norm*'")
    recipe = recipes.get("bf16").replace(float32=("stem.0",))
    inside = {plan.name: plan.why for plan in hu.explain(Image(), recipe).modules}
    assert inside["stem.0.0"].startswith("in 'stem.0', which matches 'stem.0'")
    assert inside["stem.1.1"] == ""


def test_layers_of_one_kind_share_a_row() -> None:
    shown = str(hu.explain(Image(), "bf16"))
    assert ["stem.*.*", "(2)", "Conv2d"] in [line.split()[:3] for line in shown.splitlines()]
    inner = nn.ModuleList(nn.ModuleDict({"norm": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}) for _ in range(3))
    shown = str(hu.explain(inner, recipes.get("bf16").replace(float32=["*.norm"])))
    assert "in '*.norm', which matches '*.norm'" in shown
    assert "*.norm.* (6)" in shown


def test_eight_bit_products_and_their_sides() -> None:
    said = {plan.name: (plan.products, plan.why) for plan in hu.explain(tied(), "scaled-fp8").modules}
    assert said["0"] == (None, "no product")
    assert said["2"] == ("fp8 products", "frozen")
    odd = hu.explain(nn.Sequential(nn.Linear(10, 16), nn.Conv1d(4, 4, 1)), "scaled-fp8").modules
    assert odd[1].why == "10 x 16: units take multiples of 16, else fp8 is emulated"
    assert odd[2].why == "fp8 is for products that linear layers compute by their own forward"


@pytest.mark.parametrize("name", ["fp16-adaptive", "e5m2-adaptive"])
def test_products_whose_gradients_are_rounded_are_the_scalers_sites(name: str, seed: int) -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))
    said = {plan.name for plan in hu.explain(model, name).modules if plan.products}
    hu.convert(model, name)
    scaler, optimizer = recipes.scaler(recipes.get(name), model), recipes.optimizer(model, "SGD", lr=0.1)
    scaler.scale(model(torch.randn(3, 4, 8)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert {row.site.partition("#")[0] for row in scaler.sites()} - {"global"} == said
    scaler.detach()


def test_what_convert_refuses_is_refused_in_its_words() -> None:
    quantized = nn.Linear(2, 2)
    quantized.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    for model, error, message in (
        (nn.LazyLinear(3), ValueError, "'weight' has no shape yet: run one batch"),
        (quantized, TypeError, r"'weight' is torch\.int8; make it a buffer"),
        (nn.Linear(2, 2).half(), TypeError, r"torch\.float16; call model\.float\(\)"),
    ):
        for function in (hu.explain, hu.convert):
            with pytest.raises(error, match=message):
                function(model, "bf16")
