"""What particular libraries need. Nothing here imports them unless the user has."""
