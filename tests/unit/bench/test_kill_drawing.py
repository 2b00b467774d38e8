from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bench.harness.kill_drawing import LEFT, RIGHT, WIDTH, KillRun, WorkerStep, draw
from tests.repository import REPOSITORY

SVG = "{http://www.w3.org/2000/svg}"
RUN = KillRun(
    workers=("a", "b"),
    killed="b",
    killed_s=1.0,
    duration_s=4.0,
    steps=(WorkerStep("a", 7, 0.0, 1.0), WorkerStep("b", 7, 0.5, 1.0), WorkerStep("a", 8, 3.0, 4.0)),
    tokens_s=(0.25, 0.75, 2.75, 3.0),
    layers={"a": ("layers 0 to 1", "layers 0 to 3"), "b": ("layers 2 to 3", "")},
    num_requests=3,
    rejoin_s=0.5,
)


def drawn(run: KillRun = RUN) -> ElementTree.Element:
    return ElementTree.fromstring(draw(run))


def bars(picture: ElementTree.Element) -> list[tuple[float, float, str]]:
    """Begin and end as shares of the axis, and style, in the order of the file."""
    scale = WIDTH - LEFT - RIGHT
    found = []
    for rectangle in picture.iter(f"{SVG}rect"):
        begin = (float(rectangle.attrib["x"]) - LEFT) / scale
        found.append((begin, begin + float(rectangle.attrib["width"]) / scale, rectangle.attrib["class"]))
    return found


def test_bars_have_the_times_of_the_steps_and_one_colour_per_step() -> None:
    expected = [(0.0, 0.25, "s3"), (0.75, 1.0, "s0"), (0.25, 1.0, "lost"), (0.125, 0.25, "s3")]
    found = bars(drawn())
    assert [style for *_, style in found] == [style for *_, style in expected]
    for measured, wanted in zip(found, expected, strict=True):
        assert measured[:2] == pytest.approx(wanted[:2], abs=1e-3)


def test_each_worker_has_a_row_with_its_layers() -> None:
    rows = {float(rectangle.attrib["y"]) for rectangle in drawn().iter(f"{SVG}rect")}
    texts = [text.text for text in drawn().iter(f"{SVG}text")]
    assert len(rows) == 2
    assert {"a", "b", "layers 0 to 1", "layers 0 to 3", "layers 2 to 3"} <= set(texts)


def test_the_pause_is_the_longest_gap_that_ends_after_the_kill() -> None:
    assert RUN.pause == (0.75, 2.75)
    assert replace(RUN, tokens_s=(0.0, 0.9, 1.1, 2.0)).pause == (1.1, 2.0)
    text = draw(RUN)
    assert "3 running requests pause up to 2.0 s" in text
    assert ">2.00 s<" in text


def test_each_token_is_a_line_and_ticks_count_from_the_kill() -> None:
    picture = drawn()
    assert len([line for line in picture.iter(f"{SVG}line") if line.attrib["class"] == "token"]) == 4
    ticks = [text.text for text in picture.iter(f"{SVG}text") if (text.text or "").endswith(" s")]
    assert ticks[:4] == ["-1 s", "-0.5 s", "0 s", "0.5 s"]
    assert "3 s" in ticks


@pytest.mark.parametrize("tokens_s", [(), (0.5,), (0.1, 0.5), (1.5, 2.0)])
def test_a_run_without_tokens_on_both_sides_is_refused(tokens_s: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"no tokens before and after the kill at 1\.00 s"):
        draw(replace(RUN, tokens_s=tokens_s))


def test_every_style_has_a_colour_for_light_and_for_dark_pages() -> None:
    text = draw(RUN)
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r'class="(\w+)"', text)) - {"head"}
    assert used
    assert all(f".{style} {{" in light and f".{style} {{" in dark for style in used)


def test_the_readme_has_the_pause_of_the_picture() -> None:
    picture = (REPOSITORY / "docs" / "images" / "kill.svg").read_text()
    (pause,) = re.findall(r"running requests pause up to ([\d.]+) s", picture.split("<style>")[0])
    assert f"pause up to {pause} s" in " ".join((REPOSITORY / "README.md").read_text().split())
