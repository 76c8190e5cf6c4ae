"""BatchNorm over the whole batch, frozen or merged; spectral norm; the lockstep schedule."""

from anybatch.batch_norm.layers import Call, batch_norms, replaced, uses_batch_statistics
from anybatch.batch_norm.policy import NormPolicy
from anybatch.batch_norm.schedule import in_lockstep
