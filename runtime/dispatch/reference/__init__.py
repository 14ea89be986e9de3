"""The reference backend: every operator in plain PyTorch, on every device. It says what an operator means."""
