"""Reports for people on what Hecate found, did and saw."""
