"""Passes on the graph that Dynamo captured, before autograd: torch functions, values in ``meta["example_value"]``."""
