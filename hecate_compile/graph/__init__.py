"""Compile the graph that Dynamo captured, and keep count of graphs."""
