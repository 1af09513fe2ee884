"""The engines. An engine runs workers as processes, threads or streams, or in the caller. This
package runs in the caller only.

Imports `wire` and the packages below it. Only `sockets` imports from `workers`; the other modules
just name entry points there. Engines know nothing of calls. To add an engine, implement the
protocols in `kinds`, and register it there.

    kinds        defines the protocol of an engine, and lists the engines with their traits
    sockets      runs workers that are processes or threads with a socket pair each, or the caller's
                 own thread
    launch       starts and ends worker processes, threads and fresh interpreters
"""
