"""The version of this library: both sides of a link must have the same."""

__version__ = "0.1.0"
