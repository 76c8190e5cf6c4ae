"""187 sound setups, 181 broken ones and 15 that need not be judged, written by someone who had not read `proof/`, nor its tests.

Every setup returns an `S`: model, objective, batch, split, options. What is sound and what is broken was computed apart from `verify`,
in float64, over uneven cuts.
"""
