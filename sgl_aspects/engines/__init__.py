"""One catalog per engine: which function plays which role, and how to read its attributes."""
