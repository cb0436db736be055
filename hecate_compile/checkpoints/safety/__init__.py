"""Files of a checkpoint, read without running what is in them, and refused if they cannot be what was saved."""
