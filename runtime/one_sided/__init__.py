"""The carrier of ``Config(transport="symmetric")``: rows and replicas as writes into memory that ranks share.

| file | what is in it |
|---|---|
| ``carrier`` | the ``Carrier`` itself: what each operator of a layer does; what it does between replays |
| ``exchanges``, ``transport`` | an exchange of rows or replicas, the order of its steps, what the host learns later |
| ``windows`` | memory that all ranks see |
| ``device_dispatch`` | from counts to tickets on the device: ``balance_rows``, ``split_rows``, ``ticket_segments`` |
| ``device_tables`` | a placement on the device, also under launches that are recorded once |

Its Triton kernels are here, one a file, each with a plain reference beside it, as in ``hecate.runtime.kernels``:

| file | what one launch does | shapes |
|---|---|---|
| ``balance_rows`` | how many rows of each expert each rank computes | ``[W,E] -> [E,W]`` |
| ``split_rows`` | who sends how many rows to whom | ``[W,E], [E,W] -> [E,W], [W,E]`` |
| ``ticket_segments`` | the segments of an exchange's indices | ``[E,W], [W,E] -> [W E], [S W]`` |
| ``put_rows`` | rows picked, cast and written into other ranks' windows | ``[R,H], [n], [W] -> [places,W,bytes]`` |
| ``take_rows`` | rows of the own window cast and brought to their places | ``[places,W,bytes], [n], [W] -> [R,H]`` |
| ``post_words``, ``wait_words`` | how far others may go on, and have come | ``[W]``, ``[places,W]``, in place |
| ``links`` | what these four have in common | |

``transport`` says in which order to put, post, wait and take, and why it is right.
"""
