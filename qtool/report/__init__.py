"""The HTML report: its data, its plots, its page."""
