"""From the graph that Dynamo captured to a compiled one."""
