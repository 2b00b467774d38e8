"""What a worker has in memory of a model, from one load to the next."""

import gc
import logging
from pathlib import Path

from checkpoint import Checkpoint
from checkpoint.file_identity import look_at
from checkpoint.grammar_tokenizer import TOKENIZER_FILE
from kvcache.pages import KvPages
from stage_worker.model_compute import ModelCompute
from stage_worker.models import DecoderStage, StageParts
from stage_worker.sampling.grammar_masks import GrammarMasks
from wire.wire_dtypes import WireDType

log = logging.getLogger(__name__)


class ResidentModel:
    """Parts of a stage, the stage that is made of them, and tables of its tokenizer.

    Used by the compute thread only.
    """

    def __init__(self) -> None:
        self.parts = StageParts()
        self.has_warmed_up = False
        """A stage of this process has: kernels and threads are ready, whatever is loaded next."""
        self._compute: ModelCompute | None = None
        self._grammars: GrammarMasks | None = None
        self._grammars_of: tuple[object, ...] | None = None

    def end_stage(self) -> None:
        """Drops the stage that was loaded, but for the parts that it was made of.

        A step that failed may have left its exception, and with that everything that it used, in a cycle.
        """
        if self._compute is not None:
            self._compute.close()
        self._compute = None
        gc.collect()

    def begin_stage(
        self,
        model: DecoderStage,
        pages: KvPages,
        grammars: GrammarMasks | None,
        *,
        wire_dtype: WireDType | None = None,
    ) -> ModelCompute:
        """The one stage from now on; `model` is made of `parts`."""
        self._compute = ModelCompute(model, pages, grammars, wire_dtype=wire_dtype)
        return self._compute

    def clear(self) -> None:
        """Drops everything."""
        self.end_stage()
        self.drop_grammars()
        self.parts.clear()

    def is_of(self, directory: Path) -> bool:
        """Whether nothing in `directory` says that the parts were read from other files. A directory that is
        not here (any more) says nothing."""
        origin = self.parts.origin
        if origin is None:
            return False
        found = look_at(directory, [file.name for file in origin.files])
        return all(now == was for now, was in zip(found, origin.files, strict=True) if now.status is not None)

    def drop_grammars(self) -> None:
        """For a stage without the head."""
        self._grammars = self._grammars_of = None

    def grammars(self, checkpoint: Checkpoint) -> GrammarMasks:
        """For the stage with the head. Tables are built now, because that holds the process up; those of the
        same file are kept."""
        made_of = (
            look_at(checkpoint.directory, [TOKENIZER_FILE]),
            checkpoint.config.vocab_size,
            checkpoint.eos_token_ids,
        )
        if self._grammars is None or self._grammars_of != made_of:
            self._grammars = GrammarMasks(
                checkpoint.directory,
                vocab_size=checkpoint.config.vocab_size,
                eos_token_ids=checkpoint.eos_token_ids,
            )
            self._grammars_of = made_of
            if (problem := self._grammars.load()) is not None:
                log.info("no structured output: %s", problem)
        return self._grammars
