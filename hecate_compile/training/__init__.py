"""What happens around a step and between steps."""
