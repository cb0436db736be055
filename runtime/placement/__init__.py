"""Placement of experts and of rows on ranks: integers only, no process group, clock or device."""
