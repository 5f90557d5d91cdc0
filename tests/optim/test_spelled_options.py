"""Options as command lines and YAML files spell them give the optimizer that the values give, or a sentence."""

import ast
import importlib

import pytest
import torch

import halfulp as hu

WORDS = {
    "lr": ("1e-3", 1e-3),
    "betas": ("0.9,0.95", (0.9, 0.95)),
    "eps": ("1e-6", 1e-6),
    "weight_decay": ("0", 0),
    "amsgrad": ("False", False),
    "maximize": ("true", True),
    "fused": ("None", None),
    "capturable": ("False", False),
    "foreach": ("false", False),
    "weight_update": (" kahan", "kahan"),
    "state_dtype": ("torch.float32", torch.float32),
    "seed": ("7", 7),
    "report_interval": ("0", 0),
}


def _options(optimizer):
    return {name: value for name, value in optimizer.param_groups[0].items() if not name.startswith(("param", "ident"))}


def _parameter():
    return torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))


def test_words_give_what_values_give():
    by_words = hu.AdamW([_parameter()], **{name: word for name, (word, _) in WORDS.items()})
    by_values = hu.AdamW([_parameter()], **{name: value for name, (_, value) in WORDS.items()})
    assert _options(by_words) == _options(by_values)
    assert by_words.defaults == by_values.defaults


def test_words_in_groups_give_what_values_give():
    for name, (word, value) in WORDS.items():
        if name not in ("fused", "foreach", "capturable"):
            by_word, by_value = (hu.AdamW([{"params": [_parameter()], name: given}]) for given in (word, value))
            assert _options(by_word) == _options(by_value), name


@pytest.mark.parametrize("word", ["bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "torch.float16"])
def test_a_dtype_has_a_name(word):
    parameter = torch.nn.Parameter(torch.ones(8))
    hu.SGD([parameter], lr="0.5", param_dtype=word)
    assert parameter.dtype == (torch.bfloat16 if "b" in word else torch.float16)


def test_words_of_storages_that_are_dtypes_of_torch_too_are_storages():
    for word in ("int8", "uint8"):
        optimizer = hu.AdamW([_parameter()], state_dtype=word)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(8).bfloat16()
        optimizer.step()


def test_a_list_of_words_and_a_dict_of_dtypes_are_read():
    optimizer = hu.AdamW([_parameter()], betas=["0.9", "1e-1"], state_dtype={"exp_avg": "8bit", "exp_avg_sq": "fp32"})
    assert optimizer.defaults["betas"] == (0.9, 0.1)
    assert optimizer.defaults["state_dtype"] == {"exp_avg": "8bit", "exp_avg_sq": torch.float32}


def test_words_of_options_without_a_default_are_read():
    made = hu.optim.AdEMAMix([_parameter()], beta3_warmup="100", alpha_warmup="None")
    assert (made.defaults["beta3_warmup"], made.defaults["alpha_warmup"]) == (100, None)
    made = hu.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))], eps="None,1e-3")
    assert made.defaults["eps"] == (None, 1e-3)


def test_words_of_a_subclass_with_options_of_its_base_are_read():
    class Named(hu.AdamW):
        def __init__(self, params, tag="a", **options):
            super().__init__(params, **options)

    assert Named([_parameter()], eps="1e-6", weight_decay="0.5").defaults["eps"] == 1e-6


def test_words_of_muons_other_group_are_read():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    made = hu.optim.Muon([{"params": [matrix]}, {"params": [vector], "use_muon": "false", "betas": "0.9,0.95"}])
    assert made.param_groups[1]["betas"] == (0.9, 0.95)


def test_options_of_a_wrapped_class_are_read():
    optimizer = hu.optim.wrap(torch.optim.RMSprop, [_parameter()], lr="1e-3", centered="true", weight_update="kahan")
    assert optimizer.base.defaults["lr"] == 1e-3
    assert optimizer.base.defaults["centered"] is True


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lr": "fast"}, "lr='fast' is no number: write it as 0.001 or 1e-3"),
        ({"lr": "2**-3"}, "is no number"),
        ({"lr": "True"}, "is no number"),
        ({"lr": "nan"}, "is no number"),
        ({"betas": "0.9;0.95"}, "betas='0.9;0.95' is no number"),
        ({"betas": "0.9"}, "give two numbers"),
        ({"maximize": "yes"}, "maximize='yes': write True or False"),
        ({"param_dtype": "bf61"}, "unknown param_dtype 'bf61'; did you mean 'bf16'"),
        ({"weight_update": "none"}, "'none' is unknown"),
        ({"weight_update": "khan"}, "did you mean kahan"),
        ({"seed": "0.5"}, "a whole number from 0 on"),
        ({"capturable": "true"}, "outside CUDA graphs"),
    ],
)
def test_what_is_no_value_is_refused_in_words(options, told):
    with pytest.raises((ValueError, NotImplementedError), match=told.replace("*", r"\*")):
        hu.AdamW([_parameter()], **options)
    with pytest.raises((ValueError, NotImplementedError), match=told.replace("*", r"\*")):
        hu.AdamW([{"params": [_parameter()], **options}])


# What scripts make of words for a class that they find by its dotted name; "yaml" is Hydra's and NeMo Automodel's.
LOADERS = {
    "kohya": lambda words: {key: ast.literal_eval(value) for key, value in (word.split("=", 1) for word in words)},
    "axolotl": lambda words: {key: value.strip("'") for key, value in (word.split("=", 1) for word in words)},
    "yaml": lambda words: {key: yaml_of(value.strip("'")) for key, value in (word.split("=", 1) for word in words)},
}


def yaml_of(value):
    """A value as YAML 1.1 reads it: 1e-4 has no point, and stays a string."""
    return {"true": True, "0.1": 0.1, "3": 3}.get(value.lower(), value)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dotted", ["halfulp.AdamW", "halfulp.optim.AdamW"])
def test_loaders_of_dotted_classes_and_words_make_the_same_optimizer(loader, dotted):
    words = ["weight_update='split8'", "state_dtype='8bit'", "betas=0.9,0.95", "weight_decay=0.1", "seed=3"]
    words += ["eps=1e-4", "fused=True", "param_dtype='bf16'"]
    module, _, name = dotted.rpartition(".")
    parameter = torch.nn.Parameter(torch.ones(8))
    made = getattr(importlib.import_module(module), name)([parameter], lr=1e-3, **LOADERS[loader](words))
    other = torch.nn.Parameter(torch.ones(8))
    options = {"weight_update": "split8", "state_dtype": "8bit", "betas": (0.9, 0.95), "weight_decay": 0.1, "seed": 3}
    expected = hu.AdamW([other], lr=1e-3, eps=1e-4, param_dtype=torch.bfloat16, **options)
    assert _options(made) == _options(expected)
    assert parameter.dtype == torch.bfloat16


def test_a_class_string_that_does_not_exist_is_told_what_does():
    with pytest.raises(AttributeError, match=r"unknown name in halfulp\.optim 'AdamV'; did you mean 'Adam'"):
        getattr(importlib.import_module("halfulp.optim"), "AdamV")  # noqa: B009  as a loader of class strings does
    assert not any(name.lower().endswith("8bit") for name in hu.optim.OPTIMIZERS)  # kohya's are bitsandbytes'


@pytest.mark.parametrize("kind", hu.optim.OPTIMIZERS.values())
def test_an_unknown_option_is_said_with_the_class_that_was_called(kind):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match=rf"unknown option of {kind.__name__} 'weigth_update'; did you mean 'weight_up"):
        kind([weight], weigth_update="kahan")


def test_what_a_class_decides_is_no_option_of_it():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match="unknown option of AdamW 'decay'") as said:
        hu.AdamW([weight], decay=0.1)
    assert "decoupled_weight_decay" not in str(said.value)
    with pytest.raises(TypeError, match="unknown option of AdamW 'decoupled_weight_decay'"):
        hu.AdamW([weight], decoupled_weight_decay=False)
    with pytest.raises(ValueError, match="decoupled_weight_decay=False in a group: this optimizer has True"):
        hu.AdamW([{"params": [weight], "decoupled_weight_decay": False}])
    with pytest.raises(TypeError, match=r"Allowed: .*decoupled_weight_decay"):
        hu.Adam([weight], decay=0.1)


def test_a_class_that_does_not_exist_is_said_with_those_that_do():
    with pytest.raises(AttributeError, match="unknown name in halfulp 'AdamV'; did you mean 'Adam"):
        hu.AdamV  # noqa: B018
    with pytest.raises(AttributeError, match=r"unknown name in halfulp\.optim 'Muun'; did you mean 'Muon'"):
        hu.optim.Muun  # noqa: B018
