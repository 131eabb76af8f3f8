"""An independent sampler: the specification's chain in NumPy, and Philox4x32-10 in Python ints."""

import numpy as np

MASK = 0xFFFFFFFF


def philox(counter, key):
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & MASK, (p0 >> 32) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c


def uniform(seed, position):
    word = philox([position & MASK, position >> 32, 0, 0], [seed & MASK, seed >> 32])
    return ((word[0] << 32 | word[1]) >> 11) / 2**53


def distribution(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty):
    """Ids and probabilities, the most likely first (of equal ones the lower id)."""
    values = logits.astype(np.float64)
    for token in set(seen):
        factor = 1 / repetition_penalty if values[token] > 0 else repetition_penalty
        values[token] *= factor
    order = np.lexsort((np.arange(len(values)), -values))
    if temperature == 0:
        return order[:1], np.ones(1)
    if top_k:
        order = order[:top_k]
    weights = np.exp((values[order] - values[order[0]]) / temperature)
    reached = np.cumsum(weights) / weights.sum()
    n = int(np.searchsorted(reached, top_p)) + 1 if top_p < 1 else len(order)
    order, weights = order[:n], weights[:n]
    kept = weights >= min_p * weights[0]
    return order[kept], weights[kept] / weights[kept].sum()
