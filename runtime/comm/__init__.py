"""The ranks of a model, and how bytes get from one to another."""
