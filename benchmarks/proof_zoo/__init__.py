"""187 sound setups, 181 broken ones and 15 that need not be judged, by an author who had not read `verification/` or its tests.

Every setup returns an `S`: model, objective, batch, split, options. Which setups are sound was computed without `verify`, in
float64, over uneven splits.
"""
