"""Links of a checkpoint lead into the store of its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint import NotRegularFile
from checkpoint.links import check_link

FILES = ("tokenizer.json", "tokenizer_config.json", "merges.txt")
Layout = Callable[[Path], Path]


def link_all(directory: Path, store: Path, *, names: tuple[str, ...] = FILES) -> Path:
    """`directory` with links to files of `store` that are named by their hash."""
    store.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (store / f"{number:040x}").write_text("{}")
        (directory / name).symlink_to(store / f"{number:040x}")
    return directory


def hub_cache(root: Path) -> Path:
    return link_all(root / "models--a--b/snapshots/r1", root / "models--a--b/blobs")


def blobs_on_another_disk(root: Path) -> Path:
    (root / "disk").mkdir()
    (root / "models--a--b").mkdir()
    (root / "models--a--b/blobs").symlink_to(root / "disk")
    return link_all(root / "models--a--b/snapshots/r1", root / "models--a--b/blobs")


def snapshots_on_another_disk(root: Path) -> Path:
    (root / "disk").mkdir()
    (root / "models--a--b").mkdir()
    (root / "models--a--b/snapshots").symlink_to(root / "disk")
    return link_all(root / "models--a--b/snapshots/r1", root / "models--a--b/blobs")


def model_on_another_disk(root: Path) -> Path:
    hub_cache(root / "disk")
    (root / "models--a--b").symlink_to(root / "disk/models--a--b")
    return root / "models--a--b/snapshots/r1"


def directory_of_an_older_client(root: Path) -> Path:
    """Large files are links into the cache, others are copies."""
    directory = link_all(root / "local", root / "hub/models--a--b/blobs", names=FILES[:1])
    (directory / FILES[1]).write_text("{}")
    return directory


def older_client_with_blobs_on_another_disk(root: Path) -> Path:
    (root / "disk").mkdir()
    (root / "hub/models--a--b").mkdir(parents=True)
    (root / "hub/models--a--b/blobs").symlink_to(root / "disk")
    return link_all(root / "local", root / "hub/models--a--b/blobs")


def store_beside_the_model(root: Path) -> Path:
    return link_all(root / "model", root / ".store")


def relative_links(root: Path) -> Path:
    (root / ".store").mkdir()
    (root / "model").mkdir()
    (root / ".store" / ("a" * 64)).write_text("{}")
    (root / "model/tokenizer.json").symlink_to(f"../.store/{'a' * 64}")
    return root / "model"


@pytest.mark.parametrize(
    "layout",
    [
        hub_cache,
        blobs_on_another_disk,
        snapshots_on_another_disk,
        model_on_another_disk,
        directory_of_an_older_client,
        older_client_with_blobs_on_another_disk,
        store_beside_the_model,
        relative_links,
    ],
)
def test_links_into_the_store_of_the_model_are_followed(layout: Layout, tmp_path: Path) -> None:
    directory = layout(tmp_path)
    links = [path for path in directory.iterdir() if path.is_symlink()]
    assert links
    for path in links:
        check_link(path)


def key_of_the_user(root: Path) -> Path:
    (root / "model").mkdir()
    (root / "key").write_text("secret")
    (root / "model/merges.txt").symlink_to(root / "key")
    return root / "model"


def blob_of_another_model(root: Path) -> Path:
    directory = hub_cache(root)
    other = root / "models--c--d/blobs"
    other.mkdir(parents=True)
    (other / ("b" * 40)).write_text("secret")
    (directory / "merges.txt").unlink()
    (directory / "merges.txt").symlink_to(other / ("b" * 40))
    return directory


def blob_that_is_a_link_out(root: Path) -> Path:
    (root / "hub/models--a--b/blobs").mkdir(parents=True)
    (root / "model").mkdir()
    (root / "key").write_text("secret")
    (root / "hub/models--a--b/blobs/0").symlink_to(root / "key")
    (root / "model/merges.txt").symlink_to(root / "hub/models--a--b/blobs/0")
    return root / "model"


def hashed_file_elsewhere(root: Path) -> Path:
    (root / "users/a/model").mkdir(parents=True)
    (root / "others/cache").mkdir(parents=True)
    (root / "others/cache" / ("c" * 40)).write_text("secret")
    (root / "users/a/model/merges.txt").symlink_to(root / "others/cache" / ("c" * 40))
    return root / "users/a/model"


def two_stores(root: Path) -> Path:
    directory = link_all(root / "local", root / "hub/models--a--b/blobs", names=FILES[:2])
    return link_all(directory, root / "hub/models--c--d/blobs", names=FILES[2:])


@pytest.mark.parametrize(
    "layout",
    [key_of_the_user, blob_of_another_model, blob_that_is_a_link_out, hashed_file_elsewhere, two_stores],
)
def test_other_links_are_refused_with_the_remedy(layout: Layout, tmp_path: Path) -> None:
    path = layout(tmp_path) / "merges.txt"
    with pytest.raises(NotRegularFile, match=r"merges\.txt is a link .*copy the directory .*cp -rL") as error:
        check_link(path)
    assert "secret" not in str(error.value)
