"""Operators, transport, ownership and per-layer state: everything that runs during a step.

Nothing here imports the passes or the wrapper. Words and the letters of shapes (T, K, R, H, E, W, S) are explained in
``docs/glossary.md``.
"""
