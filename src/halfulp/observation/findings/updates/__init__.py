"""What becomes of weight updates: lost, frozen, biased, or never asked for."""

from ._never_stepped import NeverStepped as NeverStepped
