"""How this process was started, alone or as a rank, and the model spread over the ranks."""
