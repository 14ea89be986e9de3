"""Turns the records of a run into traces: reads the rings, joins records, hands spans to the exporters."""
