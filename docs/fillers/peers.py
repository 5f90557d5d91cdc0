"""What other libraries do, and what trainers do with this one."""

from ._places import place
from ._tables import benchmark_table, text_and_note


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


@place
def trainers() -> str:
    """Lines, bits and resumes in each trainer."""
    columns = ("trainer", "bf16: lines", "bits of the plain loop", "fp16 with the scaler: lines", "its bits", "resumed")
    table = benchmark_table(
        "trainers", "Trainers", (*columns, "observe: lines", "each step seen", "weights and states")
    )
    return f"{table}\n\n{text_and_note('trainers')}" if table else ""


@place
def kills() -> str:
    """Trainings that were killed and resumed."""
    columns = ("ranks", "kills", "inside a save", "before the first checkpoint", "resumed to the same bits")
    return benchmark_table("kills", "SIGKILL", columns)
