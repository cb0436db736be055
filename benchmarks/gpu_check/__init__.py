"""A check of one GPU: tests, kernels against their references, training steps. See :mod:`__main__`."""

import time

# Before anything is imported that takes long, so that a budget of seconds counts it.
BEGUN = time.monotonic()
