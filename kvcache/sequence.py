"""One sequence's blocks: turns tokens into signals; sliding windows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvcache.blocks import Block, Deref, Destroy, FullBlock, PartialBlock, Promote, Signal, Use
from kvcache.errors import InvalidSignal, NothingToPop, OutputLimitExceeded
from kvcache.hashing import DEFAULT_SALT, MAX_TOKEN, BlockChain, Content, pack_tokens


class TokensView(Sequence[int]):
    """Read-only view of a list of tokens that follows the list as it grows."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        found = self._tokens[index]
        return tuple(found) if isinstance(found, list) else found

    def __eq__(self, other: object) -> bool:
        """Equal to any list, tuple or view of the same tokens."""
        if isinstance(other, TokensView | list | tuple):
            return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokensView({self._tokens})"


def _check_sizes(block_size: int, max_output_tokens: int) -> None:
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if max_output_tokens < 0:
        raise ValueError(f"max_output_tokens must not be negative, got {max_output_tokens}")


class ActiveSequence:
    """The tokens of one sequence and the blocks that hold them.

    A sequence is either *up to date* (everything up to its last token is allocated, and `push` keeps it so)
    or *catching up* (its prompt, or after a preemption all its tokens, are allocated chunk by chunk with
    `prepare` and `commit`). Nothing here is random or touches a pool; whoever applies the signals says with
    `commit`, or by not calling `pop`, that they succeeded.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        *,
        block_size: int = 64,
        max_output_tokens: int,
        salt: int = DEFAULT_SALT,
        prefix_caching: bool = True,
        is_announced: bool = True,
        new_id: Callable[[], int],
    ) -> None:
        """`new_id` supplies ids unique in the pool: for partial blocks, without prefix caching for all.
        Without `is_announced`, subscribers are not told of blocks that this sequence brings into the cache.

        Raises ValueError for a block size below 1, a negative output limit or a token beyond u32.
        """
        _check_sizes(block_size, max_output_tokens)
        self._tokens = list(tokens)
        self._tokens_view = TokensView(self._tokens)
        self.block_size = block_size
        self.is_announced = is_announced
        self.num_prompt_tokens = len(self._tokens)
        self.max_output_tokens = max_output_tokens
        self._max_len = self.num_prompt_tokens + max_output_tokens
        self._new_id = new_id
        self._always_private_from = None if prefix_caching else 0
        self._chain = BlockChain(
            block_size=block_size, salt=salt, private_from=self._always_private_from, new_id=new_id
        )
        # The block behind the chain: allocated if the sequence is up to date, planned if it is catching up.
        self._partial: PartialBlock | None = None
        self._num_allocated = 0
        self._num_released = 0
        self._num_committed = 0
        self._up_to_date = not self._tokens
        # Free slots in the open block of an up-to-date sequence: what makes most pushes cheap.
        self._room = 0
        self._just_promoted = False
        self._pop_floor = len(self._tokens)
        if not self._up_to_date:
            self._plan()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and generated tokens: a read-only view that follows `push` and `pop`."""
        return self._tokens_view

    @property
    def num_generated_tokens(self) -> int:
        """Tokens pushed so far (less those popped)."""
        return len(self._tokens) - self.num_prompt_tokens

    @property
    def num_committed_tokens(self) -> int:
        """Leading tokens whose blocks are allocated."""
        return len(self._tokens) if self._up_to_date else self._num_committed

    @property
    def num_allocated_blocks(self) -> int:
        """Leading blocks that are allocated, counting those that `release_before` has let go since."""
        return self._num_allocated

    @property
    def num_released_blocks(self) -> int:
        """Leading blocks that `release_before` has let go."""
        return self._num_released

    @property
    def first_private_block(self) -> int | None:
        """Index of the first full block that has a private id in the place of a hash; None where none has."""
        return self._chain.private_from

    @property
    def held_blocks(self) -> tuple[Block, ...]:
        """The blocks that a pool counts this sequence as an owner of."""
        return self.blocks[self._num_released : self._num_allocated]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks from the first token on, allocated or planned; released ones keep their place.

        A block that is complete but allocated as a partial stays partial until the push that promotes it.
        """
        if not self._up_to_date:
            self._plan()
        return (*self._chain.blocks, self._partial) if self._partial else tuple(self._chain.blocks)

    def prepare(self, num_tokens: int) -> Use | None:
        """The blocks that the first `num_tokens` tokens need beyond those committed, None if there are none.

        Changes nothing and repeats itself exactly. Raises ValueError for more tokens than there are, and for
        a chunk that ends neither on a block boundary nor with the last token.
        """
        self._check_chunk(num_tokens)
        if num_tokens <= self.num_committed_tokens:
            return None
        start, end = self._num_allocated, -(-num_tokens // self.block_size)
        blocks = self.blocks[start:end]
        hashes = tuple(self._chain.block_hashes[start:end])
        return Use(blocks=blocks, block_hashes=hashes, parent=self._chain.name_before(start))

    def commit(self, num_tokens: int) -> None:
        """Records that the `Use` of `prepare(num_tokens)` has succeeded. Raises like `prepare`."""
        self._check_chunk(num_tokens)
        if num_tokens <= self.num_committed_tokens:
            return
        self._plan()
        self._num_allocated = -(-num_tokens // self.block_size)
        self._num_committed = num_tokens
        self._pop_floor = len(self._tokens)
        if num_tokens == len(self._tokens):
            self._up_to_date = True
            self._room = self._num_allocated * self.block_size - num_tokens

    def push(self, token: int) -> list[Signal]:
        """Appends a token that is about to be computed; the signals are to be applied in order.

        Signals appear only where an up-to-date sequence opens a new block: `Promote` of the partial just
        completed, if there is one, then `Use` of a fresh partial. Raises OutputLimitExceeded, or ValueError
        for a token beyond u32.
        """
        tokens = self._tokens
        if len(tokens) >= self._max_len:
            raise OutputLimitExceeded(self.max_output_tokens)
        if not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"token ids must lie in 0..{MAX_TOKEN}, got {token}")
        if self._room:
            self._room -= 1
            tokens.append(token)
            return []
        if not self._up_to_date:
            tokens.append(token)
            return []
        signals = self._open_block()
        tokens.append(token)
        return signals

    def pop(self) -> None:
        """Undoes the last push, whose `Use` has failed; a `Promote` that it caused stands.

        Raises NothingToPop for a second pop in a row, and after `commit`, `preempt` or a release.
        """
        if len(self._tokens) <= self._pop_floor:
            raise NothingToPop(f"the sequence of {len(self._tokens)} tokens has no push to undo")
        self._tokens.pop()
        self._pop_floor = len(self._tokens)
        if not self._up_to_date:
            self._chain.forget(len(self._tokens) // self.block_size)
        elif len(self._tokens) % self.block_size == 0:
            self._partial, self._just_promoted = None, False
            self._num_allocated -= 1
            self._room = 0
        else:
            self._room += 1

    def seal(self) -> list[Signal]:
        """The `Promote` of the last block, if it is complete and still a partial one.

        For a sequence that ends: the next `push`, which would promote the block, does not come. To be called
        only when every token is computed or in a step that was sent. Private blocks, which no other sequence
        can hit, are not promoted.
        """
        is_private = self._chain.private_from is not None and len(self._chain) >= self._chain.private_from
        if not self._up_to_date or self._partial is None or self._room or is_private:
            return []
        promote = self._complete_partial(self._partial)
        self._partial, self._just_promoted = None, True
        self._pop_floor = len(self._tokens)
        return [promote]

    def free_signals(self) -> list[Signal]:
        """One signal per block held, tail first: `Destroy` a partial or private one, `Deref` a shareable one.

        Tail first makes the cache lose the ends of prefixes before their beginnings. Private blocks are never
        hit, so they would only displace others. Changes nothing.
        """
        signals = self._releases(self.held_blocks, self._num_released)
        signals.reverse()
        return signals

    def destroy_signals(self) -> list[Signal]:
        """Like `free_signals`, but no block stays cached: for the content of a failed request."""
        return [Destroy(block) for block in reversed(self.held_blocks)]

    def preempt(self) -> list[Signal]:
        """Gives back all blocks (`free_signals`), keeps all tokens; allocation starts over with fresh ids."""
        signals = self.free_signals()
        self._up_to_date = not self._tokens
        self._num_allocated = self._num_released = self._num_committed = self._room = 0
        self._partial, self._just_promoted = None, False
        self._pop_floor = len(self._tokens)
        # Names that are private, for want of prefix caching or after a collision, are used once.
        if self._chain.private_from is not None:
            self._chain.forget(self._chain.private_from)
        self._chain.private_from = self._always_private_from
        return signals

    def release_before(self, num_tokens: int) -> list[Signal]:
        """Gives back the allocated blocks wholly before token `num_tokens`, head first: one `Deref` each, or
        `Destroy` for a private one.

        The last allocated block always stays, even if `num_tokens` is beyond it. Raises ValueError for more
        tokens than there are.
        """
        if not 0 <= num_tokens <= len(self._tokens):
            raise ValueError(f"cannot release before token {num_tokens} of {len(self._tokens)}")
        end = min(num_tokens // self.block_size, self._num_allocated - 1)
        released = self._chain.blocks[self._num_released : max(end, self._num_released)]
        signals = self._releases(released, self._num_released)
        if released:
            self._num_released += len(released)
            self._pop_floor = len(self._tokens)
        return signals

    def make_private(self, first_block: int) -> None:
        """Renames the full blocks from `first_block` on, and all later ones, with ids nobody else can have.

        For the case that a sequence hash is known with other content. Blocks that a pool has already been
        told of cannot be renamed: raises ValueError unless `first_block` is not allocated or its `Promote` is
        still to be applied. Ends with the next preemption.
        """
        num_told = min(self._num_allocated, len(self._chain))
        if self._just_promoted and self._up_to_date:
            is_sealed = self._partial is None
            num_told -= is_sealed or self._room == self.block_size - 1
        if not num_told <= first_block <= len(self._chain):
            raise ValueError(f"block {first_block} cannot be renamed: blocks before {num_told} are in use")
        self._chain.make_private(first_block)

    def newest_content(self, promote: Promote) -> Content:
        """What the block holds that the last push completed. Raises InvalidSignal for another `Promote`."""
        chain = self._chain
        if not chain.blocks or chain.blocks[-1].sequence_hash != promote.sequence_hash:
            raise InvalidSignal(f"{promote} is not the next signal of this sequence")
        return chain.contents[-1]

    def contents_of(self, signal: Use | Promote) -> tuple[int, list[int], list[Content]]:
        """The full blocks of this sequence's next signal: index of the first, sequence hashes, contents.

        For a `Use` from `prepare` that is not committed yet, and for the signals of the last push. Raises
        InvalidSignal for any other.
        """
        if isinstance(signal, Promote):
            names, first = [signal.sequence_hash], len(self._chain) - 1
        else:
            names = [block.sequence_hash for block in signal.blocks if isinstance(block, FullBlock)]
            first = self._num_allocated if names else len(self._chain)
        return first, names, self._chain.contents_of(first, names)

    def _open_block(self) -> list[Signal]:
        signals: list[Signal] = []
        if self._partial is not None:
            signals.append(self._complete_partial(self._partial))
        self._just_promoted = bool(signals)
        self._partial = PartialBlock(self._new_id())
        signals.append(Use((self._partial,), (), self._chain.name_before(len(self._chain))))
        self._num_allocated += 1
        self._room = self.block_size - 1
        return signals

    def _complete_partial(self, partial: PartialBlock) -> Promote:
        """Names the block that the last tokens complete."""
        chain = self._chain
        chain.append(pack_tokens(self._tokens[-self.block_size :]))
        name, parent = chain.blocks[-1].sequence_hash, chain.contents[-1][0]
        return Promote(partial, name, parent, chain.block_hashes[-1])

    def _releases(self, blocks: Iterable[Block], first_block: int) -> list[Signal]:
        """One release for each of `blocks`, the first of which has the index `first_block`."""
        private_from = self._chain.private_from
        num_shareable = None if private_from is None else max(0, private_from - first_block)
        return [
            Deref(block)
            if isinstance(block, FullBlock) and (num_shareable is None or index < num_shareable)
            else Destroy(block)
            for index, block in enumerate(blocks)
        ]

    def _check_chunk(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self._tokens):
            raise ValueError(f"cannot allocate {num_tokens} of {len(self._tokens)} tokens")
        if num_tokens % self.block_size and num_tokens != len(self._tokens):
            raise ValueError(
                f"a chunk that ends at token {num_tokens} of {len(self._tokens)} must end on a boundary of "
                f"{self.block_size}-token blocks"
            )

    def _plan(self) -> None:
        """Names the complete blocks of a sequence that is catching up, and the partial one behind them."""
        self._chain.extend(self._tokens)
        if len(self._tokens) % self.block_size == 0:
            self._partial = None
        elif self._partial is None:
            self._partial = PartialBlock(self._new_id())


@dataclass(frozen=True, slots=True)
class KvWindow:
    """Every query sees at most `num_tokens` positions, its own included; a step computes at most
    `max_step_tokens` of a sequence.
    """

    num_tokens: int
    max_step_tokens: int

    @classmethod
    def of(cls, layer_windows: Sequence[int | None], max_step_tokens: int) -> "KvWindow | None":
        """The widest of the layers' windows; None when one layer sees everything, so nothing is ever hidden.

        All layers: every stage frees the same blocks, also one whose own layers see less.
        """
        windows = [window for window in layer_windows if window is not None]
        if len(windows) < len(layer_windows) or not windows:
            return None
        return cls(max(windows), max_step_tokens)

    def first_visible(self, first_query: int) -> int:
        """The earliest position that a query at or after `first_query` sees."""
        return max(0, first_query - self.num_tokens + 1)

    def num_blocks(self, block_size: int) -> int:
        """The most blocks that a sequence holds while a step of it is computed.

        Its queries see num_tokens - 1 + max_step_tokens consecutive positions at most, which may begin with
        the last slot of a block. The block before the first query is held even if a window of one token hides
        it, for a sequence never releases the newest block that it has.
        """
        return self._num_blocks(block_size, self.max_step_tokens)

    def min_blocks(self, block_size: int) -> int:
        """The blocks without which a sequence of any length cannot be computed: a step takes one block of its
        prompt at least.
        """
        return self._num_blocks(block_size, min(block_size, self.max_step_tokens))

    def admission_blocks(self, block_size: int, num_blocks: int) -> int:
        """Blocks with which a sequence begins in a cache of `num_blocks`: enough for the longest step, but no
        more than half of the cache where fewer do. Longer steps are cut to the blocks that are left.
        """
        return max(self.min_blocks(block_size), min(self.num_blocks(block_size), num_blocks // 2))

    def _num_blocks(self, block_size: int, num_step_tokens: int) -> int:
        num_positions = max(1, self.num_tokens - 1) + num_step_tokens
        return (num_positions + block_size - 2) // block_size + 1
