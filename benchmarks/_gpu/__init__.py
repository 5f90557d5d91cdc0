"""The parts of `python -m benchmarks gpu`: each a module with a function `measure(run)`."""
