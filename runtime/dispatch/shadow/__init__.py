"""Shadow mode: a second implementation computes beside the one that serves, and the outputs are compared."""
