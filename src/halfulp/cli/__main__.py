"""`python -m halfulp.cli`, the same as `halfulp`."""

from . import main

main()
