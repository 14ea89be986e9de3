"""Views of runs: spans read back, their numbers, the report page and the live terminal view."""
