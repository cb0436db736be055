"""Checkpoints: saved by any number of ranks, loaded by any other, and never half of one.

| file | content |
|---|---|
| ``save``, ``load`` | ``hecate.save``, ``hecate.async_save``, ``hecate.load`` |
| ``publish`` | a folder with a step in it appears whole or not at all; the newest that verifies wins |
| ``manifest`` | number of a step, its format, and SHA-256 of every file |
| ``restore`` | fills a model from a step that was verified |
| ``state_dicts``, ``optimizer_tensors`` | model and optimizer as such tensors, under the names of the plain model |
| ``run_state`` | all else: owners, what the planner remembers, random numbers, options |
| ``coordination`` | messages between ranks meanwhile |
| ``safety`` | files that are read without running what is in them |
| ``hub`` | ``hecate.export``, ``hecate.load_pretrained``: folders of transformers |
"""
