"""Questions about Dynamo's graph: where its experts are, what it does with their rows, and what that allows."""
