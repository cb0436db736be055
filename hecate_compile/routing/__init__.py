"""What users hold of the routing: experts of tokens, recorded from forwards and replayed in others."""
