"""One step on the device: eager, captured as a graph, or compiled."""
