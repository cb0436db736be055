"""What runs during a step: operators, transport, ownership, per-layer state.

Nothing here imports the passes or the wrapper.

Glossary, used in names and docstrings: T tokens, K choices per token, R rows (T*K),
H hidden size, E experts, W ranks, S slots (experts that a rank holds right now).
"""
