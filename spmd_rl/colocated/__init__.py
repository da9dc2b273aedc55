"""Ranks that train and infer in turns."""
