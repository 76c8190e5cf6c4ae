import torch
from hypothesis import settings

# two workers on two cores: more threads than cores make tiny operations ten times slower
torch.set_num_threads(1)

# a shared machine may take any time over one example
settings.register_profile("anybatch", deadline=None, max_examples=60)
settings.load_profile("anybatch")
