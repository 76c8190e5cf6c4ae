"""Rates and times as people give them on a command line, and as they read them."""

import re

from anybatch.errors import SettingsError

_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B|bit|b)/?s", re.IGNORECASE)
_FLOPS = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)FLOPS?(?:/s)?", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)")


def parse_bandwidth(text: str) -> float:
    """Bytes per second.

    >>> parse_bandwidth("25GB/s"), parse_bandwidth("200Gbit/s")
    (25000000000.0, 25000000000.0)
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise SettingsError(f"--bandwidth {text!r}: expected what a rank can send, such as 25GB/s or 200Gbit/s.")
    unit = _PREFIXES[found[2].upper()] if not found[3] else 1024 ** " KMGT".index(found[2].upper() or " ")
    return float(found[1]) * unit / (1 if found[4] == "B" else 8)


def parse_flops(text: str) -> float:
    """FLOPs per second.

    >>> parse_flops("150TFLOP/s")
    150000000000000.0
    """
    found = _FLOPS.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise SettingsError(f"--flops {text!r}: expected what a rank computes, such as 150TFLOP/s.")
    return float(found[1]) * _PREFIXES[found[2].upper()]


def parse_latency(text: str) -> float:
    """Seconds.

    >>> parse_latency("250ms")
    0.25
    """
    found = _LATENCY.fullmatch(text.strip())
    if found is None:
        raise SettingsError(f"--latency {text!r}: expected the time of one message, such as 10us.")
    return float(found[1]) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def show_megabytes(number: float) -> str:
    """Bytes in decimal units, as networks count them.

    >>> show_megabytes(51_240), show_megabytes(2.5e9)
    ('0.0512 MB', '2.5 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
