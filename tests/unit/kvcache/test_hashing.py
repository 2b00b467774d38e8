"""The constants of the hash dialect, literally: another salt or seed makes every router blind."""

from kvcache import DEFAULT_SALT, block_hash, salt_of, sequence_hash


def test_block_hashes_are_those_that_nvidia_dynamo_publishes() -> None:
    assert DEFAULT_SALT == 1337
    assert block_hash([1, 2, 3, 4]) == 14643705804678351452
    assert block_hash([1, 2, 3, 4], 0) == 8052976908588476977
    assert block_hash([5, 6, 7, 8]) == 16777012769546811212


def test_sequence_hashes_chain_the_parent_with_the_seed_1337_whatever_the_salt() -> None:
    assert sequence_hash(None, 14643705804678351452) == 14643705804678351452
    assert sequence_hash(14643705804678351452, 16777012769546811212) == 4945711292740353085
    assert sequence_hash(6783181932379417241, 6775162198134867605) == 4501072020146958228


def test_the_salt_of_a_text_has_the_seed_0() -> None:
    # XXH3-64 of nothing, as the reference implementation of xxHash documents it.
    assert salt_of("") == 0x2D06800538D394C2
    assert salt_of("tenant") == 11514568216865584292
