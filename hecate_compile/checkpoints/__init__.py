"""Checkpoints: saved by any number of ranks, loaded by any other, and never half of one.

| file | what |
|---|---|
| ``save``, ``load`` | ``hecate.save``, ``hecate.async_save``, ``hecate.load`` |
| ``publish`` | a folder with a step in it appears whole or not at all; the newest that verifies wins |
| ``manifest`` | SHA-256 of every file of a step |
| ``logical_tensor`` | one tensor of which every rank has pieces, as ``torch.distributed.checkpoint`` asks for it |
| ``state_dicts`` | model and optimizer as such tensors, under the names of the plain model |
| ``run_state`` | all else: owners, what the planner remembers, random numbers, options |
| ``plain_data`` | numbers, texts and tensors in files without pickles |
| ``safe_reader`` | reads DCP's files without running what is in them |
| ``plain_pickle``, ``safe_metadata``, ``tensor_file`` | its parts: a pickle, what that says, a tensor |
| ``coordination`` | what ranks say to each other meanwhile |
| ``export``, ``load_pretrained`` | ``hecate.export``, ``hecate.load_pretrained``: folders of transformers |
| ``plain_view`` | the model by the names and shapes that its author gave it |
| ``export_folder`` | a folder that appears whole, also in the place of an earlier one |
| ``safe_files`` | safetensors of a folder, read a tensor at a time |
"""
