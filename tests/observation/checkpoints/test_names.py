"""States without names find their parameters where one way alone fits, and are said where none or several do."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from halfulp.kernels import same_bits
from halfulp.observation.checkpoints import _checkpoint as _model_order
from halfulp.observation.checkpoints._checkpoint import name_optimizer_states, open_checkpoint

TRAINERS = r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"


class Block(nn.Module):
    """Names that an alphabet puts into another order."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down = nn.Linear(8, 4)


class Model(nn.Module):
    """Twelve blocks, whose numbers an alphabet does not sort."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.final = nn.LayerNorm(8)


def by_rule(model, decays):
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]


def save(folder, model, groups, *, alphabetical=True):
    """A folder as a trainer writes it; returns the first moment of each parameter by its name."""
    folder.mkdir(exist_ok=True)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    if alphabetical:
        save_file(
            {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors"
        )
    else:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return {
        name: optimizer.state[parameter]["exp_avg"]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def read(folder, wanted):
    """The names that were found, none of them a wrong one, and what was said."""
    unseen: list[str] = []
    states = name_optimizer_states(open_checkpoint(folder), unseen)
    for name, state in states.items():
        moment = state.state["exp_avg"]
        assert same_bits(moment, wanted[name])
    return set(states), " ".join(unseen)


RULES = {
    "trainer": lambda name, parameter: ".norm." not in name and not name.startswith("final") and "bias" not in name,
    "matrices": lambda name, parameter: parameter.dim() >= 2,
}


@pytest.mark.parametrize("first", ["decay", "no decay"])
@pytest.mark.parametrize("rule", RULES)
def test_groups_of_a_file_in_the_models_order(tmp_path, seed, rule, first):
    model = Model()
    groups = by_rule(model, RULES[rule])
    wanted = save(tmp_path, model, groups if first == "decay" else groups[::-1], alphabetical=False)
    assert read(tmp_path, wanted) == (set(wanted), "")


@pytest.mark.parametrize(("weights", "states"), [("", ""), ("net.", "net."), ("", "_forward_module.")])
def test_states_under_names(tmp_path, seed, weights, states):
    """As Lightning and distributed checkpoints save them: by name, and not by the weights' name."""
    model = Model()
    wanted = save(tmp_path, model, by_rule(model, RULES["matrices"]), alphabetical=False)
    saved = torch.load(tmp_path / "optimizer.pt")
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    order = [
        name for wanted_first in (True, False) for name, p in model.named_parameters() if (p.dim() >= 2) is wanted_first
    ]
    names = dict(zip(numbers, order, strict=True))
    renamed = {states + names[number]: state for number, state in saved["state"].items()}
    groups = [{**group, "params": [states + names[k] for k in group["params"]]} for group in saved["param_groups"]]
    model_state = {weights + name: value for name, value in model.state_dict().items()}
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": model_state, "optimizer_states": [{"state": renamed, "param_groups": groups}]}, file)
    assert read(file, {weights + name: moment for name, moment in wanted.items()}) == (
        {weights + n for n in wanted},
        "",
    )
    renamed["a.stranger"] = renamed.pop(states + names[0])
    groups[0]["params"][groups[0]["params"].index(states + names[0])] = "a.stranger"
    torch.save({"state_dict": model_state, "optimizer_states": [{"state": renamed, "param_groups": groups}]}, file)
    unseen: list[str] = []
    name_optimizer_states(open_checkpoint(file), unseen)
    assert "no tensor of the checkpoint has such a name" in " ".join(unseen)


def test_a_frozen_parameter_leaves_no_order(tmp_path, seed):
    model = Model()
    model.blocks[3].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = save(tmp_path, model, trained, alphabetical=False)
    found, said = read(tmp_path, wanted)
    assert not found
    assert "have no names and no order" in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_trainers_folder_by_the_order_of_its_config(tmp_path, seed, kind, monkeypatch):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 11, "num_attention_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**small, intermediate_size=24)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=8)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(**small, intermediate_size=24, max_position_embeddings=8)
        model = transformers.BertForMaskedLM(config)
    layers = {
        f"{name}.{own}" for name, one in model.named_modules() for own in one._parameters if type(one) is nn.LayerNorm
    }

    def decays(name, parameter):
        return name not in layers and not re.search(TRAINERS, name.lower())

    wanted = _save_pretrained(tmp_path, model, by_rule(model, decays))
    assert read(tmp_path, wanted) == (set(wanted), "")
    # Another model's config gives no names, and neither does one that names no class of transformers.
    given = json.loads((tmp_path / "config.json").read_text())
    for other in ({**given, "architectures": ["Elsewhere"]}, {**given, "architectures": ["T5Model"]}, {}):
        (tmp_path / "config.json").write_text(json.dumps(other))
        found, said = read(tmp_path, wanted)
        assert len(found) < len(wanted)
        assert "install the transformers that saved it" in said
    (tmp_path / "config.json").write_text(json.dumps(given))
    monkeypatch.setattr(_model_order.importlib.util, "find_spec", lambda name: None)
    assert len(read(tmp_path, wanted)[0]) < len(wanted)


def _save_pretrained(folder, model, groups):
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return {name: copy.deepcopy(optimizer.state[one]["exp_avg"]) for name, one in model.named_parameters()}
