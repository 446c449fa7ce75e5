"""What of the official SDK works against this server, found by asking one.

``python -m tests.conformance.compatibility model_name=…`` starts a server in a process of its
own, calls every public method of the installed SDK, every command of its command line and the
addresses that neither asks for, and writes the table of ``docs/compatibility.md``. A method that
is not known here ends it with an error, so a newer SDK cannot slip by.
"""
