"""The embedded engine: small, readable, and real."""
