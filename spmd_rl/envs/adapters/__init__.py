"""Environments of other libraries, played by this program's policies."""
