"""Blocks of one sequence: turns tokens into signals; sliding windows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvcache.blocks import Block, Deref, Destroy, FullBlock, Grow, PartialBlock, Promote, Signal, Use
from kvcache.errors import InvalidSignal, NothingToPop, OutputLimitExceeded
from kvcache.hashing import DEFAULT_SALT, MAX_TOKEN, BlockChain, Content, pack_tokens
from kvcache.states import LiveState


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
        selected = self._tokens[index]
        return tuple(selected) if isinstance(selected, list) else selected

    def __eq__(self, other: object) -> bool:
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

    A sequence is *up to date* (all tokens are allocated; `push` keeps it so) or *catching up* (its prompt, or
    after preemption all its tokens, are allocated in chunks with `prepare` and `commit`). It is deterministic
    and does not touch a pool. After applying the signals, the caller reports success with `commit`, or
    reverts a failed push with `pop`.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        *,
        block_size: int = 64,
        max_output_tokens: int,
        salt: int = DEFAULT_SALT,
        num_public_blocks: int = 0,
        prefix_caching: bool = True,
        is_announced: bool = True,
        new_id: Callable[[], int],
        group: int = 0,
        others: "Sequence[ActiveSequence]" = (),
    ) -> None:
        """The first `num_public_blocks` have the default salt; `new_id` returns ids unique in the pool.

        Without `prefix_caching`, all blocks are private; without `is_announced`, subscribers are not told
        about blocks that this sequence adds. `group` is the number of its block group. The sequence of group
        0 has the sequences of the same tokens in the other groups as `others`, and extends them with itself.

        Raises ValueError for invalid sizes and for a token above u32.
        """
        _check_sizes(block_size, max_output_tokens)
        self._tokens = list(tokens)
        self._tokens_view = TokensView(self._tokens)
        self.block_size = block_size
        self.is_announced = is_announced
        self._num_prompt_tokens = len(self._tokens)
        self.max_output_tokens = max_output_tokens
        self._max_len = self._num_prompt_tokens + max_output_tokens
        self._new_id = new_id
        self.group = group
        self.others = tuple(others)
        self.state: LiveState | None = None
        """Recurrent state of the sequence; only the one of group 0 has it, in models with such states."""
        private_from = self._always_private_from = None if prefix_caching else 0
        salts = (salt, num_public_blocks)
        self._chain = BlockChain(block_size=block_size, salts=salts, private_from=private_from, new_id=new_id)
        self._start()

    def _start(self) -> None:
        """Begin without blocks."""
        # The block after the chain: allocated if the sequence is up to date, planned if it is catching up.
        self._partial: PartialBlock | None = None
        self._num_allocated = self._num_released = self._num_committed = 0
        self._up_to_date = not self._tokens
        # Free slots in the open block of an up-to-date sequence; most pushes only decrement it.
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
    def groups(self) -> "tuple[ActiveSequence, ...]":
        """The sequence in every block group, this one first."""
        return (self, *self.others)

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self._tokens) - self._num_prompt_tokens

    @property
    def num_committed_tokens(self) -> int:
        return len(self._tokens) if self._up_to_date else self._num_committed

    @property
    def num_allocated_blocks(self) -> int:
        """Leading allocated blocks, including those released by `release_before`."""
        return self._num_allocated

    @property
    def num_released_blocks(self) -> int:
        """Leading blocks released by `release_before`."""
        return self._num_released

    @property
    def first_private_block(self) -> int | None:
        """Index of the first full block with a private id instead of a hash, or None."""
        return self._chain.private_from

    @property
    def full_blocks(self) -> Iterator[tuple[int, Content]]:
        """Sequence hash and content of each full block, from the first token on."""
        names = (block.sequence_hash for block in self._chain.blocks)
        return zip(names, self._chain.contents, strict=True)

    def full_block(self, index: int) -> tuple[int, Content]:
        """Sequence hash and content of full block number `index`."""
        return self._chain.blocks[index].sequence_hash, self._chain.contents[index]

    @property
    def held_blocks(self) -> tuple[Block, ...]:
        """Blocks that a pool counts this sequence as an owner of."""
        return self.blocks[self._num_released : self._num_allocated]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks from the first token on, allocated, planned or released.

        A complete block that was allocated as a partial one stays partial until the push that promotes it.
        """
        if not self._up_to_date:
            self._plan()
        return (*self._chain.blocks, self._partial) if self._partial else tuple(self._chain.blocks)

    def prepare(self, num_tokens: int) -> Use | None:
        """Return the uncommitted blocks that the first `num_tokens` tokens need, or None.

        Changes nothing; repeated calls return the same. Raises ValueError if there are fewer tokens, and for
        a chunk that ends neither on a block boundary nor with the last token.
        """
        self._check_chunk(num_tokens)
        if num_tokens <= self.num_committed_tokens:
            return None
        start, end = self._num_allocated, -(-num_tokens // self.block_size)
        blocks = self.blocks[start:end]
        hashes = tuple(self._chain.block_hashes[start:end])
        first_block = start if start == self._num_released else 0
        return Use(blocks, hashes, self._chain.name_before(start), first_block)

    def commit(self, num_tokens: int) -> None:
        """Record that the `Use` of `prepare(num_tokens)` succeeded. Raises like `prepare`."""
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

    def skip_blocks(self, first_block: int) -> None:
        """Begin at block `first_block`: no query sees the blocks before.

        Raises ValueError if blocks are held.
        """
        if self._num_allocated > self._num_released:
            raise ValueError(f"cannot begin at block {first_block}: {len(self.held_blocks)} blocks are held")
        self._num_allocated = self._num_released = first_block
        self._num_committed = first_block * self.block_size

    def push(self, token: int) -> list[Signal]:
        """Append a token that will be computed next; return the signals to apply, in order.

        There are signals only where an up-to-date sequence opens a block: `Promote` of the partial block just
        completed, if any, then `Use` of a new partial block. Raises OutputLimitExceeded, or ValueError for a
        token above u32.
        """
        tokens = self._tokens
        self._check_push(token)
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

    def grow(self, token: int) -> Grow | None:
        """`push(token)` where it completes a block that has a parent; otherwise None, and no change."""
        partial, chain = self._partial, self._chain
        if partial is None or self._room or not self._up_to_date or not chain.blocks:
            return None
        self._check_push(token)
        parent = chain.blocks[-1].sequence_hash
        chain.append(pack_tokens(self._tokens[-self.block_size :]))
        opened = self._partial = PartialBlock(self._new_id())
        self._just_promoted = True
        self._num_allocated += 1
        self._room = self.block_size - 1
        self._tokens.append(token)
        return Grow(partial.id, chain.blocks[-1].sequence_hash, parent, chain.block_hashes[-1], opened.id)

    def _check_push(self, token: int) -> None:
        if len(self._tokens) >= self._max_len:
            raise OutputLimitExceeded(self.max_output_tokens)
        if not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"token ids must lie in 0..{MAX_TOKEN}, got {token}")

    @property
    def num_slots(self) -> int:
        """Number of tokens up to which `extend` works: an up-to-date sequence may fill its open block."""
        return len(self._tokens) + self._room

    def extend(self, tokens: Sequence[int]) -> None:
        """Like `push` for each of `tokens`, without signals. Raises ValueError beyond `num_slots`.

        A token above u32 is only found when its block is complete.
        """
        if len(tokens) > self._room:
            raise ValueError(f"{len(tokens)} tokens for {self._room} free slots")
        if len(self._tokens) + len(tokens) > self._max_len:
            raise OutputLimitExceeded(self.max_output_tokens)
        self._room -= len(tokens)
        self._tokens += tokens
        for other in self.others:
            other.extend(tokens)

    def pop(self) -> None:
        """Revert the last push, whose `Use` failed; its `Promote` remains in effect.

        Raises NothingToPop for a second pop in a row, and after `commit`, `preempt` or a release.
        """
        if len(self._tokens) <= self._pop_floor:
            raise NothingToPop(f"sequence of {len(self._tokens)} tokens has no push to undo")
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
        """Return the `Promote` of a complete last block that is still partial, if any.

        For a sequence that ends, because no further `push` promotes the block. Call it only when every token
        is computed or part of a sent step. Private blocks are not promoted: no other sequence can hit them.
        """
        is_private = self._chain.private_from is not None and len(self._chain) >= self._chain.private_from
        if not self._up_to_date or self._partial is None or self._room or is_private:
            return []
        promote = self._complete_partial(self._partial)
        self._partial, self._just_promoted = None, True
        self._pop_floor = len(self._tokens)
        return [promote]

    def free_signals(self) -> list[Signal]:
        """Return one signal per held block, last block first; changes nothing.

        Partial and private blocks get `Destroy`, others `Deref`. The order makes the cache evict the ends of
        prefixes before their starts. Private blocks are never hit and would only displace others.
        """
        signals = self._releases(self.held_blocks, self._num_released)
        signals.reverse()
        return signals

    def destroy_signals(self) -> list[Signal]:
        """Like `free_signals`, but no block stays cached: for the content of a failed request."""
        return [Destroy(block) for block in reversed(self.held_blocks)]

    def preempt(self) -> list[Signal]:
        """Release all blocks (`free_signals`) and keep all tokens; allocation restarts with new ids."""
        signals = self.free_signals()
        self._up_to_date = not self._tokens
        self._num_allocated = self._num_released = self._num_committed = self._room = 0
        self._partial, self._just_promoted = None, False
        self._pop_floor = len(self._tokens)
        # Private names (no prefix caching, or a collision) are used only once.
        if self._chain.private_from is not None:
            self._chain.forget(self._chain.private_from)
        self._chain.private_from = self._always_private_from
        return signals

    def release_before(self, num_tokens: int) -> list[Signal]:
        """Release the allocated blocks that end at or before token `num_tokens`, first block first.

        Each gets a `Deref`, or `Destroy` if it is private. The last allocated block is always kept. Raises
        ValueError if there are fewer tokens.
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
        """Rename the full blocks from `first_block` on, and all later ones, to unique private ids.

        Used after a hash collision; ends with the next preemption. Raises ValueError if a pool already has
        block `first_block`: it is allocated and its `Promote` is not pending.
        """
        num_known = min(self._num_allocated, len(self._chain))
        if self._just_promoted and self._up_to_date:
            is_sealed = self._partial is None
            num_known -= is_sealed or self._room == self.block_size - 1
        if not num_known <= first_block <= len(self._chain):
            raise ValueError(
                f"block {first_block} cannot be renamed: the pool has the blocks before {num_known}"
            )
        self._chain.make_private(first_block)

    def newest_content(self, promote: Promote | Grow) -> Content:
        """Return the content of the block that the last push completed. Raises InvalidSignal for another."""
        chain = self._chain
        if not chain.blocks or chain.blocks[-1].sequence_hash != promote.sequence_hash:
            raise InvalidSignal(f"{promote} is not the next signal of this sequence")
        return chain.contents[-1]

    def contents_of(self, signal: Use | Promote) -> tuple[int, list[int], list[Content]]:
        """Return index of the first full block, sequence hashes and contents for the next signal.

        The signal is a `Use` from `prepare` before its commit, or a signal of the last push. Raises
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
        chain = self._chain
        chain.append(pack_tokens(self._tokens[-self.block_size :]))
        name, parent = chain.blocks[-1].sequence_hash, chain.contents[-1][0]
        return Promote(partial, name, parent, chain.block_hashes[-1])

    def _releases(self, blocks: Iterable[Block], first_block: int) -> list[Signal]:
        """Return one release for each of `blocks`, which begin at block `first_block`."""
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
                f"chunk ends at token {num_tokens} of {len(self._tokens)}, which is not a multiple of "
                f"block_size {self.block_size}"
            )

    def _plan(self) -> None:
        """Name the complete blocks of a sequence that is catching up, and the partial block after them."""
        self._chain.extend(self._tokens)
        if len(self._tokens) % self.block_size == 0:
            self._partial = None
        elif self._partial is None:
            self._partial = PartialBlock(self._new_id())


@dataclass(frozen=True, slots=True)
class KvWindow:
    """Sliding window: a query sees at most `num_tokens` positions, its own included."""

    num_tokens: int
    max_step_tokens: int

    @classmethod
    def of(cls, num_tokens: int | None, max_step_tokens: int) -> "KvWindow | None":
        """Return the window of layers; None for full attention."""
        return None if num_tokens is None else cls(num_tokens, max_step_tokens)

    def next_release(self, num_released_blocks: int, block_size: int) -> int:
        """Return the first query that cannot see the block after `num_released_blocks` blocks."""
        return (num_released_blocks + 1) * block_size + self.num_tokens - 1

    def first_visible(self, first_query: int) -> int:
        """Return the earliest position visible to a query at or after `first_query`."""
        return max(0, first_query - self.num_tokens + 1)

    def num_blocks(self, block_size: int) -> int:
        """Return the maximum number of blocks that a sequence holds during a step.

        Its queries see at most num_tokens - 1 + max_step_tokens consecutive positions, which may start in the
        last slot of a block. A sequence never releases its newest block, so the block before the first query
        is held even where a window of one token hides it.
        """
        return self._num_blocks(block_size, self.max_step_tokens)

    def min_blocks(self, block_size: int) -> int:
        """Return the blocks needed to compute any sequence: a step takes at least one block."""
        return self._num_blocks(block_size, min(block_size, self.max_step_tokens))

    def admission_blocks(self, block_size: int, num_blocks: int) -> int:
        """Return the blocks needed to admit a sequence to a cache of `num_blocks`.

        Enough for the longest step, at most half of the cache; longer steps are cut to the blocks available.
        """
        return max(self.min_blocks(block_size), min(self.num_blocks(block_size), num_blocks // 2))

    def _num_blocks(self, block_size: int, num_step_tokens: int) -> int:
        num_positions = max(1, self.num_tokens - 1) + num_step_tokens
        return (num_positions + block_size - 2) // block_size + 1
