"""Threads that work on lent memory, and waits that outlast every cancellation."""

from asyncache.threads._outlast import outlast
from asyncache.threads._workers import Stop, Workers, when_over

__all__ = ["Stop", "Workers", "outlast", "when_over"]
