"""Tests of what is written to disk, and of what is read from there."""

import pytest

# Its assertions say what they compared, like those of a test module.
pytest.register_assert_rewrite(f"{__name__}.tampering")
