collect_ignore = ["zoo"]
