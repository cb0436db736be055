"""Who holds which expert, and who computes which rows: integers only, no process group, clock or device."""
