"""How one number is stored in memory: stores of parameters and states, as device functions."""
