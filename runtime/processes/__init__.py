"""The processes of an engine, and the messages between them."""
