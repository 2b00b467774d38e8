import pytest

from wire.sizes import exact_size, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("20GiB", 20 * 2**30),
        ("512MiB", 512 * 2**20),
        ("8GB", 8 * 10**9),
        ("1.5 kib", 1536),
        ("4096B", 4096),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20", "no unit"),
        ("", "not a size"),
        ("-1GiB", "not a size"),
        ("1,5GiB", "not a size"),
        ("3XB", "unknown unit 'XB'"),
        ("0", "is zero, the minimum is 1B: write for example 20GiB"),
        ("0GiB", "is zero, the minimum is 1B: write for example 20GiB"),
        ("0.1B", "is too small, the minimum is 1B"),
        ("99999TiB", "is too large, the limit is 1024.0 TiB"),
    ],
)
def test_an_invalid_size_is_rejected_with_the_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (9_770_000_000, "9.1 GiB"),
        (20 * 2**30, "20.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize("text", ["1000B", "1KiB", "1536MiB", "64MiB", "20GiB", "2TiB", "1025KiB"])
def test_exact_sizes_round_trip(text: str) -> None:
    assert exact_size(parse_size(text)) == text
