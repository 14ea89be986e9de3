"""One step on the device: eager, captured as a graph, or compiled; alone or with other ranks."""
