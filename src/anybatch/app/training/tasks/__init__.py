"""Tasks: what is trained, on what. Four are built in."""
