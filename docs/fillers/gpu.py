"""What a GPU showed: `python -m benchmarks gpu`."""

from ._places import place
from ._tables import benchmark_rows, benchmark_table, measured, paragraph


@place
def gpu_machine() -> str:
    """The device and the versions, and how much of it was equal bit for bit."""
    found = measured("gpu")
    if found is None:
        return ""
    facts = {row["what"]: row["value"] for row in benchmark_rows("gpu", "Device")}
    steps = sum(row["equal"] for row in benchmark_rows("gpu", "Steps: bits"))
    rounded = sum(row["equal"] for row in benchmark_rows("gpu", "quantize: bits"))
    said = f"Measured on: {facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, which copies at "
    said += f"{facts['copy of 1 GiB']}. Beside plain torch on the CPU, bit for bit: {steps:,} kinds of optimizer steps "
    said += f"and {rounded:,} kinds of `quantize` on a million elements each, special values and random words among "
    said += "them: all equal."
    differing = [row for title in ("Steps: bits", "quantize: bits") for row in benchmark_rows("gpu", title)]
    return paragraph(said) if not any(row["differ"] or row["failed"] for row in differing) else ""


@place
def gpu_steps() -> str:
    """Steps of 21 million and a billion parameters."""
    columns = ("parameters", "optimizer", "x fused", "ms", "bytes a parameter", "of copy bandwidth")
    return benchmark_table("gpu", "AdamW steps", columns, lambda row: row["parameters"] in ("20.8M", "1.0B"))


@place
def gpu_quantize() -> str:
    """Times of roundings."""
    columns = ("format", "rounding", "dtype", "ms", "of copy bandwidth", "x torch's casts", "us a call")
    return benchmark_table("gpu", "quantize: speed", (*columns, "us torch's casts"))


@place
def gpu_memory() -> str:
    """Memory of a training step."""
    columns = ("training", "peak GB", "between steps GB", "x float32", "loss")
    return benchmark_table("gpu", "Memory of a training step", columns)


@place
def gpu_trainings() -> str:
    """Losses of short trainings."""
    columns = ("recipe", "seeds", "in float32", "range", "gap")
    return benchmark_table("gpu", "Trainings: validation loss over seeds", columns)


@place
def gpu_scaled() -> str:
    """Passes of scaled models."""
    columns = (
        "model",
        "mode",
        "forward and backward ms",
        "x plain bfloat16",
        "loss",
        "range",
        "difference from float32",
    )
    return benchmark_table("gpu", "Scaled tensors on a GPT", columns)


@place
def gpu_products() -> str:
    """Sums of matrix products."""
    columns = ("product", "terms", "rms error of the sums", "towards zero", "x bfloat16")
    return benchmark_table("gpu", "Products", columns)


@place
def gpu_averages() -> str:
    """Averages of weights and exact sums."""
    columns = ("what", "peer", "elements", "ms", "ms of the peer", "x peer")
    return benchmark_table("gpu", "Averages and exact sums", columns)


@place
def gpu_scalers() -> str:
    """Steps under gradient scalers."""
    columns = ("scaler", "mode", "step ms", "x torch", "loss", "difference from float32", "skipped")
    return benchmark_table("gpu", "Gradient scalers on a GPT", columns)


@place
def gpu_mctensor() -> str:
    """Operators of MCTensors."""
    columns = ("operator", "components", "error in units of two components", "x torch", "us")
    return benchmark_table("gpu", "MCTensor operators", columns)
