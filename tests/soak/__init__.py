"""Runs that are killed at any instant, again and again: ``make soak``, or ``python -m tests.soak --cycles 200``.

``worker`` is a run that saves often and knows what every number must be, ``kill`` ends it where it is told to,
``launch`` starts it with torchrun's agent, ``cycle`` looks whether anything was lost.
"""
