"""The built-in aspects that trace an engine, and what records and exports their spans."""
