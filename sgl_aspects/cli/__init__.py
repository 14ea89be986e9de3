"""The command line: sgl-aspects."""
