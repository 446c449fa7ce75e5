"""Routines in C for what torch does in too many steps on a processor; torch is the fallback."""
