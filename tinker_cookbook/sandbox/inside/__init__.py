"""Code that runs inside the sandbox. It imports the standard library only.

It is sent there as text, because the sandbox sees no file of this package.
"""
