"""Questions about Dynamo's graph: where its experts are, what is done with their rows, and what that allows."""
