"""What Hecate found, did and saw, for people."""
