"""Files of a checkpoint that are read without running what is in them, and refused if they cannot be what was saved.

| file | content |
|---|---|
| ``files`` | plain files, opened without following links, and their SHA-256 |
| ``plain_data`` | numbers, texts and tensors as JSON and safetensors |
| ``tensor_index`` | where each tensor is in DCP's files, as JSON, whether that can be true, DCP's reader on it |
| ``old_metadata`` | the pickle that is the index of checkpoints of format 1 |
"""
