"""What happens when something dies."""
