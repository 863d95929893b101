"""Starting, watching and ending the OS processes of this host. Knows payloads and exits, and no actors."""
