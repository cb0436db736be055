"""Changes that particular libraries need. Nothing here imports them unless the user has."""
