"""Who the ranks are, and how bytes get from one to another."""
