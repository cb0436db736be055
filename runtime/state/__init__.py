"""What a model and its layers remember between steps."""
