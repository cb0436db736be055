"""Write folders of safetensors, as transformers and its hub have them, from shards, and read them into shards.

| file | content |
|---|---|
| ``export`` | ``hecate.export``: tensors to rank 0, and files |
| ``layouts`` | tensors of the files from tensors of the model |
| ``load_pretrained`` | ``hecate.load_pretrained``: each rank reads what it keeps |
| ``read_plan`` | tensors of the model from tensors of the files |
| ``plain_view`` | the model by the names and shapes that its author gave it |
| ``safe_files`` | safetensors of a folder, read a tensor at a time |
"""
