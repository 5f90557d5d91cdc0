"""Functions that torch.compile leaves alone: between graphs it captures neither their frames nor what they call."""

import pytest
import torch

from halfulp.kernels import break_graph_and_run_eagerly, hide_own_frames_from_compiler

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _called(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _plain(x: torch.Tensor) -> torch.Tensor:
    return _called(x) * 2


@hide_own_frames_from_compiler
def _left_alone(x: torch.Tensor) -> torch.Tensor:
    return _called(x) * 2


@pytest.mark.parametrize(("function", "graphs"), [(_plain, 1), (_left_alone, 0)])
def test_between_graphs_frames_are_captured_unless_they_are_untraced(function, graphs):
    captured = []

    def backend(module, inputs):
        captured.append(module)
        return module

    # What torch itself enters, such as a rule, is called from a frame that is no part of a graph.
    entered = torch._dynamo.disable(lambda x: function(x), recursive=False)
    run = torch.compile(lambda x: entered(x), backend=backend)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 4.0))
    assert len(captured) == graphs


def test_what_a_graph_calls_is_traced_as_ever():
    captured = []
    run = torch.compile(lambda x: _left_alone(x) - 1, backend=lambda m, _: captured.append(m) or m, fullgraph=True)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 3.0))
    assert len(captured) == 1


def test_a_graph_breaks_where_an_uncompiled_function_is_called():
    captured = []
    function = break_graph_and_run_eagerly(lambda x: _called(x) * 3)
    run = torch.compile(lambda x: function(x + 1) - 1, backend=lambda m, _: captured.append(m) or m)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 8.0))
    assert len(captured) == 2
    words = r"runs uncompiled|torch\._dynamo\.disable\(\) wrapped"  # torch 2.6 has words of its own
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(lambda x: function(x), backend="eager", fullgraph=True)(torch.ones(2))
