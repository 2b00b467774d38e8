"""Randomness as a pure function of (seed, choice, position).

There is no generator state, so nothing depends on batch mates. The three words are folded one after another
through the finaliser of SplitMix64, a bijection of 64-bit words in which every input bit reaches every output
bit (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014; Stafford's variant 13).
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_12 = (np.uint64(bits) for bits in (30, 27, 31, 12))


def uniforms(
    seeds: NDArray[np.uint64], choices: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """One float64 in the open interval (0, 1) per row of the three arrays [n].

    52 bits and a half: neither 0.0 nor 1.0 can occur, not even by rounding.
    """
    words = _mixed(seeds + _GAMMA)
    words = _mixed((words ^ choices) + _GAMMA)
    words = _mixed((words ^ positions) + _GAMMA)
    return ((words >> _SHIFT_12).astype(np.float64) + 0.5) * 2.0**-52


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> _SHIFT_30)) * _MULTIPLIER_1
    words = (words ^ (words >> _SHIFT_27)) * _MULTIPLIER_2
    return words ^ (words >> _SHIFT_31)
