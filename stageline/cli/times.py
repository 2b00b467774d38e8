"""Durations and rates with three digits or so, as people read them."""


def format_duration(seconds: float) -> str:
    """12.3 s, 2.41 s, 812 ms, 8.10 ms, 85 us; from two minutes on 2 min 5 s."""
    if seconds >= 120:
        minutes, rest = divmod(int(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.9995:
        return f"{_digits(seconds)} s"
    if seconds >= 0.0009995:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{seconds * 1e6:.0f} us"


def format_rate(per_second: float) -> str:
    """12300, 98.4, 7.12, 0."""
    return "0" if per_second == 0 else _digits(per_second)


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
