"""What runs in a worker. Installed as `mpgrad.workers`; the parent never imports it, it only names entry points.

Nothing here may touch the parent's objects: a worker knows its end of the pipe, its own arena and what it has borrowed.
"""

if __name__ != "mpgrad.workers":
    raise ImportError(f"this package is mpgrad.workers (imported as: {__name__!r}); import it by that name")
