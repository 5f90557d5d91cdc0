"""What other libraries do."""

from ._places import place
from ._tables import benchmark_table


@place
def peers_decay() -> str:
    """Weight decay in the peers."""
    return benchmark_table("peers", "Weight decay", ("optimizer", "sum(w sign w0) / sum|w0|"))


@place
def peers_moment() -> str:
    """The second moment in the peers."""
    return benchmark_table("peers", "sqrt(v)", ("optimizer", "ratio"))


@place
def peers_compile() -> str:
    """Kahan summation under torch.compile."""
    return benchmark_table("peers", "torch.compile", ("optimizer", "eager", "compiled"))


@place
def peers_special() -> str:
    """NaN under stochastic rounding."""
    return benchmark_table("peers", "NaN and infinity", ("input", "halfulp", "torchao", "heavyball", "QPyTorch"))


@place
def peers_nearest() -> str:
    """Nearest rounding in QPyTorch."""
    return benchmark_table("peers", "Nearest rounding", ("what", "QPyTorch", "torch", "halfulp"))
