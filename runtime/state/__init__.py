"""State of a model and its layers between steps."""
