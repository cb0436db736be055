"""Graphs for people: names of values, shapes, printed text, folders with a page that walks the passes."""
