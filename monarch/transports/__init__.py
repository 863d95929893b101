"""Frames between two processes, over whatever connects them. Knows bytes and URLs, and no actors."""
