"""What the messages about parameters advise works when it is done."""

import pytest
import torch

import halfulp as hu


def test_complex_parameters_train_as_the_message_says():
    weight = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="view_as_real") as told:
        hu.optim.AdamW([("kernel", weight)])
    assert "kernel" in str(told.value)
    torch.optim.AdamW([weight])
    real = torch.nn.Parameter(torch.view_as_real(weight.detach()).clone())
    optimizer = hu.optim.SGD([real], lr=0.1)
    before = torch.view_as_complex(real.detach()).clone()
    for _ in range(50):
        optimizer.zero_grad()
        torch.view_as_complex(real).abs().square().sum().backward()
        with hu.kernels.engine("reference"):
            optimizer.step()
    assert (torch.view_as_complex(real.detach()).abs() < before.abs()).all()


def test_lazy_layers_train_as_the_message_says():
    model = torch.nn.LazyLinear(3)
    with pytest.raises(
        ValueError, match=r"parameter weight has no shape yet: run one batch .* then make its optimizer"
    ):
        hu.optim.SGD(model.named_parameters(), lr=0.1)
    model(torch.ones(2, 4))
    optimizer = hu.optim.SGD(model.named_parameters(), lr=0.1, param_dtype=torch.bfloat16)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    with hu.kernels.engine("reference"):
        optimizer.step()


@pytest.mark.parametrize("update", ["split8", "split", "kahan", "master"])
def test_rows_that_are_added_train_as_the_message_says(update):
    """Densification, as Gaussian splatting does it: a longer parameter takes the place and the state of another."""
    weight = torch.nn.Parameter(torch.randn(6, 3).bfloat16())
    optimizer = hu.optim.AdamW([weight], lr=1e-2, weight_update=update)

    def step(parameter):
        parameter.grad = torch.ones_like(parameter)
        with hu.kernels.engine("reference"):
            optimizer.step()

    for _ in range(3):
        step(weight)
    kept = optimizer.float32_state_dict(torch.nn.ParameterList([weight]))["0"]
    rows = torch.randn(2, 3).bfloat16()
    longer = torch.nn.Parameter(torch.cat([weight.detach(), rows]))
    state = optimizer.state.pop(weight)
    optimizer.param_groups[0]["params"][0], optimizer.state[longer] = longer, state
    with pytest.raises(ValueError, match="zeros for new ones") as told:
        step(longer)
    named = {name for name, value in state.items() if isinstance(value, torch.Tensor) and repr(name) in str(told.value)}
    assert named == {name for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name in named:
        state[name] = torch.cat([state[name], torch.zeros(2, *state[name].shape[1:], dtype=state[name].dtype)])
    held = optimizer.float32_state_dict(torch.nn.ParameterList([longer]))["0"]
    assert torch.equal(held, torch.cat([kept, rows.float()]))
    step(longer)
    assert (optimizer.float32_state_dict(torch.nn.ParameterList([longer]))["0"] < held).all()
