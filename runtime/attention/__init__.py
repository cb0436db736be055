"""Which keys a query sees, in whole numbers: nothing here imports torch.

| file | what is in it |
|---|---|
| ``pattern`` | S2-Attention's pattern of blocks, what it costs, and which keys a cache keeps |
| ``options`` | the user's options, checked, and how they become the pattern of a layer |
"""
