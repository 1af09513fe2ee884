"""The engines. An engine runs workers as processes, threads or streams, or in the caller. Caller
only.

Imports `wire` and the packages below it. Only `sockets` imports from `workers`; the other modules
just name entry points there. Engines know nothing of calls. To add an engine, implement the
protocols in `kinds`, and register it there.

    kinds the protocol of an engine, which starts workers and reports which have answered or ended;
    the engines by name, with their traits sockets workers that are processes or threads with a
    socket pair each, or the caller's
                 own thread
    launch       how worker processes and threads start and end; fresh interpreters
"""
