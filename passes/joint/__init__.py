"""Passes on forward and backward in one ATen graph."""
