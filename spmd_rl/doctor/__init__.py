"""`main.py doctor`: is this machine, or this cluster, fit?

Nothing here imports more than the standard library when it is imported: it has to work where an installation is broken.
"""
