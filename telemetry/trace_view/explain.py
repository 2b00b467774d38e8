"""One sentence that says where the time of a request went."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.accounting import Cause, Share, account
from telemetry.trace_view.read_model import RequestTrace, StagePlace
from telemetry.trace_view.slow_stage import SlowStage, slowest_stage

MOST_PARTS = 4
SMALLEST_SHARE = 0.05

_NETWORK = (Cause.HOP, Cause.RECEIVE, Cause.RESULT)


@dataclass(frozen=True, slots=True)
class _Part:
    """Seconds, and what they were spent on: `before` and `after` go around the name of the stage."""

    seconds: float
    before: str
    place: StagePlace | None = None
    after: str = ""
    is_culprit: bool = False


def explain(trace: RequestTrace) -> str:
    """Such as "2.41 s: 71 % computing on stage 2 (worker-2, layers 8-11), which takes 2.1 x as long as the
    median stage; 12 % waiting at stage 2 behind other steps; 9 % in the queue."
    """
    whole_s = trace.duration_s
    parts = _worth_saying(_groups(trace), whole_s)
    if not parts:
        return f"{_headline(trace)}: no time was spent."
    names = _Names()
    words = [f"{round(100 * part.seconds / whole_s)} % {_words(part, names)}" for part in parts]
    return f"{_headline(trace)}: {'; '.join(words)}."


def format_seconds(seconds: float) -> str:
    """Three digits: 123 s, 12.3 s, 2.41 s, 812 ms, 8.10 ms, 85 us, -85 us."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if seconds >= 0.0009995:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{seconds * 1e6:.0f} us"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


class _Names:
    """A stage is introduced where it is named first."""

    def __init__(self) -> None:
        self._known: set[StagePlace] = set()

    def of(self, place: StagePlace) -> str:
        if place in self._known:
            return f"stage {place.index}"
        self._known.add(place)
        plural = "layers" if place.layer_end - place.layer_begin > 1 else "layer"
        return f"stage {place.index} ({place.worker}, {plural} {place.layers})"


def _headline(trace: RequestTrace) -> str:
    length = format_seconds(trace.duration_s)
    return length if trace.outcome == "finished" else f"{trace.outcome} after {length}"


def _words(part: _Part, names: _Names) -> str:
    place = "" if part.place is None else f" {names.of(part.place)}"
    return f"{part.before}{place}{part.after}"


def _worth_saying(groups: Iterable[list[_Part]], whole_s: float) -> list[_Part]:
    """The groups with the most time first, the slow stage before the others; small parts are left out."""
    ordered = [
        part
        for group in sorted(groups, key=lambda group: -sum(part.seconds for part in group))
        for part in group
        if part.seconds > 0
    ]
    large = [part for part in ordered if part.seconds >= SMALLEST_SHARE * whole_s]
    kept = sorted(large, key=lambda part: -part.seconds)[:MOST_PARTS] or ordered[:1]
    return [part for part in ordered if part in kept or part.is_culprit]


def _groups(trace: RequestTrace) -> list[list[_Part]]:
    shares = account(trace)
    return [
        _computing(shares, slowest_stage(trace)),
        _waiting(shares),
        _travelling(shares),
        *([part] for part in _elsewhere(trace, shares)),
    ]


def _computing(shares: Iterable[Share], slow: SlowStage | None) -> list[_Part]:
    by_place = _by_place(shares, Cause.COMPUTE)
    if slow is None or not by_place:
        return []
    if len(by_place) == 1:
        return [_Part(by_place[slow.place], "computing on the only stage,", slow.place)]
    whole_s = math.fsum(by_place.values())
    if slow.ratio is None or not slow.stands_out:
        return [_Part(whole_s, f"computing, spread evenly over {_stages(len(by_place))}")]
    others = "the median stage" if slow.num_others > 1 else "the other stage"
    own_s = by_place.get(slow.place, 0.0)
    remark = f", which takes {_ratio(slow.ratio)} x as long as {others}"
    return [
        _Part(own_s, "computing on", slow.place, remark, is_culprit=True),
        _Part(whole_s - own_s, f"computing on the other {_stages(slow.num_others)}"),
    ]


def _waiting(shares: Iterable[Share]) -> list[_Part]:
    return _concentrated(
        _by_place(shares, Cause.WAIT),
        at_one=("waiting at", " behind other steps"),
        elsewhere="waiting behind other steps at the stages",
    )


def _travelling(shares: Iterable[Share]) -> list[_Part]:
    back_s = math.fsum(share.seconds for share in shares if share.cause is Cause.RESULT)
    hops = _by_place(shares, Cause.HOP, Cause.RECEIVE)
    if back_s > math.fsum(hops.values()):
        return [
            _Part(back_s, "in transit from the last stage back to the coordinator"),
            _Part(math.fsum(hops.values()), "in transit between stages"),
        ]
    parts = _concentrated(hops, at_one=("in transit into", ""), elsewhere="in transit between stages")
    return [*parts, _Part(back_s, "in transit back to the coordinator")]


def _concentrated(
    by_place: Mapping[StagePlace, float], *, at_one: tuple[str, str], elsewhere: str
) -> list[_Part]:
    """One stage is named where more than half of it is, and twice what is usual; else all together."""
    if not by_place:
        return []
    place = max(by_place, key=by_place.__getitem__)
    rest = [seconds for other, seconds in by_place.items() if other != place]
    rest_s = math.fsum(rest)
    if by_place[place] <= rest_s or (rest and by_place[place] < 2 * median(rest)):
        return [_Part(rest_s + by_place[place], elsewhere)]
    return [_Part(by_place[place], at_one[0], place, at_one[1]), _Part(rest_s, elsewhere)]


def _elsewhere(trace: RequestTrace, shares: Iterable[Share]) -> list[_Part]:
    words = {
        Cause.QUEUE: "in the queue",
        Cause.TURN: "between steps, while other sequences were computed",
        Cause.RECOVERY: f"recovering{_occasions(trace, SpanName.RECOVERY)}",
        Cause.PREEMPTION: f"preempted{_occasions(trace, SpanName.PREEMPTION)}",
        Cause.INTAKE: "before the queue (checks, tokenizer, no pipeline yet)",
        Cause.UNRECORDED: "in steps of which not every stage has told its times",
        Cause.COORDINATOR: "in the coordinator",
    }
    return [_Part(share.seconds, words[share.cause]) for share in shares if share.cause in words]


def _occasions(trace: RequestTrace, name: SpanName) -> str:
    """How often, and why: " twice (worker-1 was lost)"."""
    spans = trace.named(name)
    num_times = max((sum(span.choice == choice for span in spans) for choice in _choices(trace)), default=0)
    often = "" if num_times < 2 else " twice" if num_times == 2 else f" {num_times} times"
    reasons = list(dict.fromkeys(filter(None, (span.text(Attr.REASON) for span in spans))))
    return often + (f" ({reasons[0]}{', ...' if len(reasons) > 1 else ''})" if reasons else "")


def _choices(trace: RequestTrace) -> set[int | None]:
    return {span.choice for span in trace.spans}


def _by_place(shares: Iterable[Share], *causes: Cause) -> dict[StagePlace, float]:
    found: dict[StagePlace, float] = defaultdict(float)
    for share in shares:
        if share.cause in causes and share.place is not None:
            found[share.place] += share.seconds
    return dict(found)


def _stages(number: int) -> str:
    return "stage" if number == 1 else f"{number} stages"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
