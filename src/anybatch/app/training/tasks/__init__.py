"""Training tasks; four are built in."""
