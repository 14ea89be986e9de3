"""Devices: what an engine asks of the hardware it runs on."""
