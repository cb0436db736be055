"""Folders of safetensors, as transformers and its hub have them: out of shards, and into them.

| file | content |
|---|---|
| ``export`` | ``hecate.export``: tensors to rank 0, and files |
| ``layouts`` | which tensors of the model make which of the files |
| ``load_pretrained`` | ``hecate.load_pretrained``: each rank reads what it keeps |
| ``read_plan`` | which tensors of the files make which of the model |
| ``plain_view`` | the model by the names and shapes that its author gave it |
| ``safe_files`` | safetensors of a folder, read a tensor at a time |
"""
