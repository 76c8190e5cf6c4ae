from hypothesis import settings

# a shared machine may take any time over one example
settings.register_profile("anybatch", deadline=None, max_examples=60)
settings.load_profile("anybatch")
