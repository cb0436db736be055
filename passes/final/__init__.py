"""Passes on the forward and on the backward: ATen operators, values in ``meta["val"]``."""
