"""The side of the caller: requests, text to tokens, and tokens to text."""
