"""The convolutional network on photographs: its parameters."""

from halfulp.trials.tasks import find_task_class


def test_convolutions_in_front_of_a_norm_have_no_bias() -> None:
    model = find_task_class("cifar10").model(None, None, 0)
    convolutions = [(3, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)]
    weights = sum(9 * inputs * outputs + 2 * outputs for inputs, outputs in convolutions)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights + 64 * 10 + 10
