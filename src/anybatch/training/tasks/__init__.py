"""The built-in tasks: small, on real data that needs no download."""
