"""Hecate's part of a training step: around it, and between steps."""
