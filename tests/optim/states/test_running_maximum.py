"""AMSGrad's running maximum: stored with enough bits, or refused by one sentence whose advice works."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.kernels import maximum, same_bits
from halfulp.optim import State, StateSlot, UpdateRule

BF16, F32 = torch.bfloat16, torch.float32
KINDS = {"Adam": hu.optim.Adam, "AdamW": hu.optim.AdamW}
REFUSED = {
    "bfloat16": BF16,
    "bfloat16, nearest": State(BF16, "nearest"),
    "8bit": "8bit",
    "8bit, block": State("8bit", block=64),
    "v": {"exp_avg": "8bit", "exp_avg_sq": BF16},
    "v in 8 bits": {"exp_avg_sq": "8bit"},
    "the maximum in 8 bits": {"max_exp_avg_sq": "8bit"},
}
TAKEN = (None, F32, "bfloat16x2", {"exp_avg": "8bit"}, {"exp_avg_sq": F32, "max_exp_avg_sq": BF16})


def parameter(dtype=BF16, shape=(64, 64)):
    return torch.nn.Parameter(torch.randn(shape).to(dtype))


def step(optimizer, times=1):
    for _ in range(times):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        optimizer.step()


def stored(optimizer, p):
    return {key: value.dtype for key, value in optimizer.state[p].items() if isinstance(value, torch.Tensor)}


def advised(error):
    """The `state_dtype=` that a message says."""
    text = str(error.value)
    return eval(
        text[text.index("Leave both out of it, state_dtype=") :].split("state_dtype=")[1].split(": they are")[0]
    )


def take_advice(kind, choice):
    """Follow the message: as it says, the optimizer is made, and steps."""
    p = parameter()
    optimizer = kind([p], amsgrad=True, state_dtype=choice)
    step(optimizer, 2)
    held = stored(optimizer, p)
    assert held["exp_avg_sq"] == F32
    assert held["max_exp_avg_sq"] == BF16


@pytest.mark.parametrize("choice", REFUSED)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_too_few_bits_are_refused_when_the_optimizer_is_made(name, choice, dtype, seed):
    with pytest.raises(ValueError, match="which keeps every upward rounding: under state_dtype=") as error:
        KINDS[name]([parameter(dtype)], amsgrad=True, state_dtype=REFUSED[choice])
    take_advice(KINDS[name], advised(error))


def test_vectors_that_do_not_fit_into_blocks_are_refused_too(seed):
    with pytest.raises(ValueError, match="keeps every upward rounding"):
        hu.optim.AdamW([parameter(shape=(5,))], amsgrad=True, state_dtype="8bit")


@pytest.mark.parametrize("choice", TAKEN, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_enough_bits_are_taken(choice, dtype, seed):
    p = parameter(dtype)
    optimizer = hu.optim.AdamW([p], amsgrad=True, state_dtype=choice)
    step(optimizer, 3)
    held, narrow = stored(optimizer, p), dtype != F32
    if choice is None:
        assert (held["exp_avg"], held["exp_avg_sq"]) == (BF16 if narrow else F32, F32)
        assert held["max_exp_avg_sq"] == (BF16 if narrow else F32)
    again = hu.optim.AdamW([parameter(dtype)], amsgrad=True, state_dtype=choice)
    again.load_state_dict(optimizer.state_dict())
    loaded = again.state[again.param_groups[0]["params"][0]]
    assert all(same_bits(loaded[key], optimizer.state[p][key]) for key in held)


def test_a_new_group_is_refused_and_leaves_all_as_it_was(seed):
    optimizer = hu.optim.AdamW([parameter()], state_dtype="8bit")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="keeps every upward rounding"):
        optimizer.add_param_group({"params": [parameter()], "amsgrad": True})
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("option", ["amsgrad", "state_dtype"])
def test_an_assignment_to_the_group_is_refused_at_its_first_step(option, seed):
    p = parameter()
    given = {"state_dtype": "8bit"} if option == "amsgrad" else {"amsgrad": True}
    optimizer = hu.optim.AdamW([p], **given)
    step(optimizer, 2)
    before = p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
    optimizer.param_groups[0][option] = True if option == "amsgrad" else "8bit"
    with pytest.raises(ValueError, match="keeps every upward rounding"):
        step(optimizer)
    assert same_bits(p.detach(), before[0])
    assert all(same_bits(optimizer.state[p][name], value) for name, value in before[1].items())


def test_a_file_that_switches_it_on_is_refused_and_changes_nothing(seed):
    p, other = parameter(F32), parameter(F32)
    source = torch.optim.AdamW([other], amsgrad=True)
    step(source, 2)
    optimizer = hu.optim.AdamW([p], state_dtype="8bit")
    step(optimizer, 2)
    before = {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
    with pytest.raises(ValueError, match="keeps every upward rounding"):
        optimizer.load_state_dict(source.state_dict())
    assert optimizer.param_groups[0]["amsgrad"] is False
    assert all(same_bits(optimizer.state[p][name], value) for name, value in before.items())


def test_switching_it_on_is_refused_where_the_second_moment_is_stored_in_another_way(seed):
    p = parameter()
    optimizer = hu.optim.AdamW([p])
    step(optimizer, 3)
    before = p.detach().clone()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="choose amsgrad and its like then"):
        step(optimizer, 1)
    assert same_bits(p.detach(), before)
    optimizer.param_groups[0]["amsgrad"] = False
    step(optimizer, 1)


@pytest.mark.parametrize("recipe", ["bf16-split8", "bf16-kahan", "bf16-mc2", "fp16-split8"])
def test_recipes_store_the_other_moment(recipe, seed):
    model = hu.convert(torch.nn.Linear(64, 64), recipe)
    optimizer = hu.recipes.optimizer(model, "AdamW", lr=1e-3, amsgrad=True)
    step(optimizer, 2)
    held = stored(optimizer, model.weight)
    assert ("exp_avg_codes" in held) == ("split8" in recipe)
    assert held["exp_avg_sq"] == F32 or "exp_avg_sq_residual" in held


def test_scaled_parameters_keep_it_in_float16_and_refuse_fp8(seed):
    p = torch.nn.Parameter(hu.ScaledTensor.encode(torch.randn(8, 32), torch.float16))
    hu.optim.AdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match="keeps every upward rounding"):
        hu.optim.AdamW([p], amsgrad=True, state_dtype="fp8")


def largest(w, g, v, top, take):
    """A rule of one's own: w - take g, beside the largest g^2 so far."""
    return -(take * g), g * g, maximum(top, g * g)


def values(group, step):
    return (0.1,)


class Largest(hu.optim.Optimizer):
    def rule(self, group):
        states = StateSlot("v", 2), StateSlot("top", 2, maximum_of="v")
        return UpdateRule("largest", largest, states, values)


def test_a_rule_of_ones_own_is_refused_alike(seed):
    with pytest.raises(ValueError, match=r"largest divides by 'top', the largest 'v' so far.*state_dtype=None: they"):
        Largest([parameter()], {}, state_dtype=BF16)
    p = parameter()
    optimizer = Largest([p], {})
    step(optimizer)
    held = stored(optimizer, p)
    assert (held["v"], held["top"]) == (F32, BF16)


@pytest.mark.parametrize("source", ["w", "top"])
def test_a_maximum_of_no_other_state_is_refused(source):
    states = StateSlot("v", 2), StateSlot("top", 2, maximum_of=source)
    with pytest.raises(
        ValueError, match=f"the maximum of '{source}': give the name of another of its states, which are"
    ):
        UpdateRule("largest", largest, states, values)


@pytest.mark.parametrize("given", [torch.float16, "fp8", {"exp_avg_sq": torch.float16}], ids=str)
def test_the_storages_that_a_refusal_lists_are_taken(given, seed):
    """States under a scale are for scaled parameters; what plain ones may have beside a maximum is less than else."""
    said = r"allowed are torch\.float32 and 'bfloat16x2' there and, but for a running maximum, torch\.bfloat16"
    with pytest.raises(ValueError, match=said):
        hu.optim.AdamW([parameter()], amsgrad=True, state_dtype=given)
    for taken in (F32, "bfloat16x2", {"exp_avg": BF16}, {"exp_avg": "8bit"}):
        hu.optim.AdamW([parameter()], amsgrad=True, state_dtype=taken)
    with pytest.raises(ValueError, match=said):
        hu.optim.AdamW([parameter()], state_dtype=given)
    for taken in (F32, BF16, "bfloat16x2", "8bit", "4bit"):
        hu.optim.AdamW([parameter()], state_dtype=taken)
    with pytest.raises(ValueError, match=said):
        Largest([parameter()], {}, state_dtype=torch.float16)
