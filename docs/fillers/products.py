"""Products of 16-bit tensors in float32: digits and speed."""

from ._places import place
from ._tables import benchmark_table, measured, paragraph


@place
def products_digits() -> str:
    """The distances, and the processor."""
    columns = ("operator", "dtype", "from float64", "gradients from float64", "from torch's own")
    table = benchmark_table("products", "Units of the last place", columns)
    found = measured("products")
    if found is None:
        return ""
    title = found.tables[0].title
    said = f"{title}; `python -m benchmarks.bench_products` on {found.machine['processor']}:"
    return "\n\n".join((paragraph(said), table))


@place
def products_speed() -> str:
    """Multiples of float32's time, as a processor without 16-bit instructions takes them."""
    found = measured("products")
    if found is None:
        return ""
    columns = ("operator", "dtype", "forward", "forward, torch's own", "with backward", "with backward, torch's own")
    title = found.tables[-1].title
    return "\n\n".join((paragraph(f"{title}:"), benchmark_table("products", title, columns)))
