"""Folders of safetensors, as transformers and its hub have them, written from shards and read into shards."""
