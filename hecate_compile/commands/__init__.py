"""The commands of the command line, a file for each; ``hecate.cli`` names them all."""
