"""Code that runs inside the sandbox. It imports the standard library only.

It is sent as text, because the sandbox cannot read the files of this package.
"""
