"""The model before it is traced: experts found, parameters sharded, reads of them made into operators."""
