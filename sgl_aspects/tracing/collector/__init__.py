"""What a run recorded becomes traces: read from the rings, joined, and handed to the exporters."""
