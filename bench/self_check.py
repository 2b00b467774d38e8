"""False alarms and planted faults of the self-check with random checkpoints of all families.

    python -m bench.self_check                          200 checkpoints in three dtypes
    python -m bench.self_check --first 100 --checkpoints 50 --output FILE.jsonl
    python -m bench.self_check --table FILE.jsonl ...   print the table of earlier runs

Three stages in this process; one of them has a fault. Each checkpoint has `--faults` faults in rotation. A
fault without any effect on the texts, such as that of an expert without tokens, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from checkpoint import Attention, Checkpoint, DType
from tests.checked_pipeline import CheckedPipeline, plan_of, reference_of, three_stages
from tests.families import FAMILIES, make_family
from tests.integration.planted_faults import FAULTS, Plant
from tests.wrong_tensors import CHANGES, Change, with_change
from wire.reference import Reference

FAULTY_STAGE = 1
CORRECT = "correct"


@dataclass(frozen=True)
class Row:
    """One check: `share` is the largest share of an allowed deviation, `is_found` a failed check."""

    family: str
    seed: int
    dtype: str
    case: str
    is_found: bool
    share: float


class RandomModel:
    """Checks of one random checkpoint."""

    def __init__(self, family: str, seed: int, folder: Path) -> None:
        self._family, self._seed, self._folder = family, seed, folder
        self._source = make_family(folder / "model", family, seed=seed)
        config = Checkpoint.open(self._source).config
        self._layers = three_stages(config)
        first, end = self._layers[0], sum(self._layers[:2])
        # Some families have a mixer or experts in other layers only.
        self._order = (*range(first, end), *range(first), *range(end, config.num_layers))
        mixers = [layer.mixer for layer in config.layers[first:end]]
        is_attending = all(isinstance(mixer, Attention) for mixer in mixers)
        self.faults = (*CHANGES, *(FAULTS if is_attending else ()))

    def rows(self, dtype: DType, faults: Sequence[Change | Plant]) -> Iterator[Row]:
        """A correct pipeline, and each fault that has an effect."""
        reference = reference_of(self._source, plan_of(self._layers, dtype, block_size=16))
        correct = self._checked(self._source, dtype, reference)
        yield self._row(CORRECT, correct)
        for fault in faults:
            wrong = self._wrong(fault, dtype, reference)
            if wrong is not None:
                row = self._row(fault.__name__, wrong)
                if wrong.answers != correct.answers:
                    yield row

    def _wrong(self, fault: Change | Plant, dtype: DType, reference: Reference) -> CheckedPipeline | None:
        """A pipeline with a fault; None if no layer has the tensor."""
        untyped: Any = fault
        if fault in FAULTS:
            pipeline = self._checked(self._source, dtype, reference)
            untyped(pipeline.model(FAULTY_STAGE))
            return pipeline
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            copy = with_change(self._source, Path(folder) / "model", untyped, self._order)
            return None if copy is None else self._checked(copy, dtype, reference)

    def _checked(self, directory: Path, dtype: DType, reference: Reference) -> CheckedPipeline:
        return CheckedPipeline(directory, self._layers, dtype, block_size=16, reference=reference)

    def _row(self, case: str, pipeline: CheckedPipeline) -> Row:
        verdict = pipeline.run()
        assert verdict.share is not None, verdict.text
        return Row(
            family=self._family,
            seed=self._seed,
            dtype=pipeline.plan.dtype.value,
            case=case,
            is_found=not verdict.is_good,
            share=verdict.share,
        )


def checks(number: int, dtypes: Sequence[DType], num_faults: int) -> Iterator[Row]:
    """All checks of checkpoint `number`."""
    families = list(FAMILIES)
    with tempfile.TemporaryDirectory() as folder:
        model = RandomModel(families[number % len(families)], number // len(families), Path(folder))
        count = min(num_faults, len(model.faults))
        for index, dtype in enumerate(dtypes):
            first = (number * len(dtypes) + index) * count
            faults = [model.faults[(first + offset) % len(model.faults)] for offset in range(count)]
            yield from model.rows(dtype, faults)


def print_table(rows: Sequence[Row]) -> None:
    """Per case and dtype: number of checks, of failed ones, and the range of their shares."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.case, row.dtype].append(row)
    print("| case | dtype | checks | failed | deviation / allowed |")
    print("|---|---|---|---|---|")
    for (case, dtype), group in sorted(groups.items(), key=lambda item: (item[0][0] != CORRECT, item[0])):
        shares = sorted(row.share for row in group)
        failed = sum(row.is_found for row in group)
        name = case.replace("_", " ")
        print(f"| {name} | {dtype} | {len(group)} | {failed} | {shares[0]:.2g} to {shares[-1]:.2g} |")
    for row in rows:
        if row.is_found is (row.case == CORRECT):
            print(f"{'false alarm' if row.is_found else 'unseen'}: {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoints", type=int, default=200, help="number of checkpoints (default 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first checkpoint (default 0)")
    parser.add_argument("--faults", type=int, default=4, help="faults per checkpoint and dtype (default 4)")
    parser.add_argument("--dtypes", default="f32,bf16,f16", help="run dtypes (default f32,bf16,f16)")
    parser.add_argument("--output", type=Path, help="append a JSON line per check")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these files only")
    options = parser.parse_args()
    if options.table:
        lines = [line for path in options.table for line in path.read_text().splitlines()]
        print_table([Row(**json.loads(line)) for line in lines])
        return
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows: list[Row] = []
    dtypes = [DType(name) for name in options.dtypes.split(",")]
    for number in range(options.first, options.first + options.checkpoints):
        for row in checks(number, dtypes, options.faults):
            rows.append(row)
            if options.output:
                with options.output.open("a") as stream:
                    stream.write(json.dumps(asdict(row)) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
