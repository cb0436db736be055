"""Passes on graphs that run node by node (``backend="aot_eager"``); Inductor does the same by itself."""
