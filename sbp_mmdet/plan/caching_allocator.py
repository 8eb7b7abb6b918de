"""A model of torch's caching allocator: the memory of a GPU that is reserved for a sequence of allocations and frees.

torch reserves more memory than its tensors occupy. It asks CUDA for segments, cuts blocks out of them, and caches freed
blocks for later tensors. A cached block is of no use to a larger tensor, so a training whose images change in size
reserves more than it ever allocates. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with default
settings, for one stream of the GPU.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

__all__ = ['Block', 'CachingAllocator', 'OutOfMemory', 'least_capacity', 'replay']

_MIB = 2**20
_ROUNDING = 512  # sizes of blocks are multiples of it
_LARGEST_SMALL = _MIB  # blocks up to this size come from small segments, larger ones from large segments
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT = 10 * _MIB  # a block of at least this size gets a segment of its own size, in multiples of 2 MiB
_LARGEST_WASTE = _MIB  # if more than this is left of a large block, the rest is cut off
_WITHIN = 0.005  # relative error by which the result of `least_capacity` may be too large


class OutOfMemory(MemoryError):
    """Error of an allocation that does not fit into the capacity, even after cached segments were given back."""


class Block:
    """A piece of a segment, between its two neighbours.

    Attributes:
        address (int): Address of its first byte.
        size (int): Number of bytes.
        free (bool): Whether it may be allocated.
        mapped (bool): Whether its addresses have memory. Only expandable segments have blocks without memory.
    """

    __slots__ = ('address', 'free', 'mapped', 'next', 'pool', 'previous', 'size')

    def __init__(self, pool, address: int, size: int, mapped: bool = True):
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.free, self.previous, self.next = True, None, None

    def cut(self, size: int) -> 'Block':
        """Shorten the block to ``size`` bytes and return the rest, which is free."""
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped)
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def swallow(self) -> None:
        """Merge the next block into this one."""
        swallowed = self.next
        self.size += swallowed.size
        self.next = following = swallowed.next
        if following is not None:
            following.previous = self


class _Pool:
    """Pool of cached blocks, sorted by size and address. A request takes the first block that is large enough."""

    __slots__ = ('_blocks', '_order', 'expandable', 'granule', 'small')

    def __init__(self, small: bool):
        self.small = small
        # A number for each block: its size, followed by 48 bits of its address. Numbers are compared faster than pairs.
        self._order, self._blocks = [], {}
        self.expandable = None  # the first block of the expandable segment
        self.granule = _SMALL_SEGMENT if small else _LARGE_SEGMENT

    def __iter__(self) -> Iterator[Block]:
        return iter([self._blocks[key] for key in self._order])

    def add(self, block: Block) -> None:
        key = block.size << 48 | block.address
        insort(self._order, key)
        self._blocks[key] = block

    def remove(self, block: Block) -> None:
        key = block.size << 48 | block.address
        del self._order[bisect_left(self._order, key)]
        del self._blocks[key]

    def take(self, size: int) -> Block | None:
        """Remove and return the first block that is large enough, or return ``None``."""
        order = self._order
        i = bisect_left(order, size << 48)
        return self._blocks.pop(order.pop(i)) if i < len(order) else None


class CachingAllocator:
    """Simulation of torch's caching allocator on one GPU.

    Args:
        capacity (int | None): Number of bytes that may be reserved. If ``None``, there is no limit. Default: None.
        expandable (bool): Whether to simulate ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: each pool has one
            segment, which grows at its end by 20 MiB (for blocks up to 1 MiB, by 2 MiB). Default: False.

    Attributes:
        allocated (int): Bytes of blocks in use, as in ``torch.cuda.memory_allocated``.
        reserved (int): Bytes of all segments, as in ``torch.cuda.memory_reserved``.
        most_allocated, most_reserved (int): Largest values of ``allocated`` and ``reserved`` so far.
        retries (int): How often cached segments were given back to make room, as in ``num_alloc_retries``.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(3 * 2**20)
        >>> allocator.allocated, allocator.reserved
        (3145728, 20971520)
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False):
        self.capacity, self.expandable = capacity, expandable
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = self.retries = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._end = 0  # address of the next segment

    def allocate(self, nbytes: int) -> Block | None:
        """Allocate a block for a tensor.

        Args:
            nbytes (int): Number of bytes of the tensor.

        Returns:
            Block | None: The block, for :meth:`free`; ``None`` for 0 bytes, for which torch allocates nothing.

        Raises:
            OutOfMemory: If there is no room within ``capacity``.
        """
        if not nbytes:
            return None
        size = _round_up(nbytes, _ROUNDING)
        pool = self._small if size <= _LARGEST_SMALL else self._large
        block = pool.take(size)
        if block is None:
            block = self._grow(pool, size) if self.expandable else self._segment(pool, size)
        rest = block.size - size
        if rest >= _ROUNDING if pool.small or self.expandable else rest > _LARGEST_WASTE:
            pool.add(block.cut(size))
        block.free = False
        self.allocated += block.size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return block

    def free(self, block: Block | None) -> None:
        """Free a block: it is cached, merged with its free neighbours.

        Args:
            block (Block | None): Result of :meth:`allocate`.

        Raises:
            ValueError: If the block is already free.
        """
        if block is None:
            return
        if block.free:
            raise ValueError(f'the block of {block.size} bytes at address {block.address} is freed twice')
        self.allocated -= block.size
        block.free = True
        self._cache(block)

    def give_back(self) -> None:
        """Give cached memory back to CUDA, as ``torch.cuda.empty_cache`` does.

        These are segments without a block in use, and the granules of expandable segments without one.
        """
        for pool in (self._small, self._large):
            for block in pool:
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    # --- Segments of fixed size ---------------------------------------------------------------------------------------

    def _segment(self, pool, size):
        if pool.small:
            nbytes = _SMALL_SEGMENT
        else:
            nbytes = _LARGE_SEGMENT if size < _OWN_SEGMENT else _round_up(size, _SMALL_SEGMENT)
        self._reserve(nbytes)
        block = Block(pool, self._end, nbytes)
        self._end += nbytes
        return block

    def _reserve(self, nbytes):
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.retries += 1
            self.give_back()
            if self.reserved + nbytes > self.capacity:
                raise OutOfMemory(f'no room for {nbytes} bytes: {self.reserved} of {self.capacity} are reserved')
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _cache(self, block):
        pool, mapped = block.pool, block.mapped
        previous = block.previous
        if previous is not None and previous.free and previous.mapped is mapped:
            block = previous
            if mapped:
                pool.remove(block)
            block.swallow()
        following = block.next
        if following is not None and following.free and following.mapped is mapped:
            if mapped:
                pool.remove(following)
            block.swallow()
        if mapped:
            pool.add(block)
        return block

    # --- Expandable segments ------------------------------------------------------------------------------------------

    def _grow(self, pool, size):
        """Map memory at the first place where free blocks, mapped or not, have ``size`` consecutive bytes."""
        if pool.expandable is None:
            # Addresses cost nothing: the segment of each pool has more of them than any GPU has memory.
            pool.expandable = Block(pool, 0, 2**48, mapped=False)
        if self.capacity is not None:
            self._make_room(pool, size)
        block = self._place(pool, size)
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            block = self._map(block.next, size - block.size)
        pool.remove(block)
        return block

    def _make_room(self, pool, size):
        missing = sum(_round_up(need, pool.granule) for need in self._unmapped_of(self._place(pool, size), size))
        if self.reserved + missing > self.capacity:
            self.retries += 1
            self.give_back()
            missing = sum(_round_up(need, pool.granule) for need in self._unmapped_of(self._place(pool, size), size))
            if self.reserved + missing > self.capacity:
                raise OutOfMemory(f'no room for {missing} bytes: {self.reserved} of {self.capacity} are reserved')

    @staticmethod
    def _unmapped_of(block, size):
        while size > 0:
            if not block.mapped:
                yield min(size, block.size)
            size -= block.size
            block = block.next

    @staticmethod
    def _place(pool, size):
        block = pool.expandable
        while block is not None:
            if block.free and not block.mapped:
                start = block.previous if block.previous is not None and block.previous.free else block
                room, end = 0, start
                while end is not None and end.free and room < size:
                    room += end.size
                    end = end.next
                if room >= size:
                    return start
            block = block.next
        raise AssertionError('the unmapped block at the end of the segment is larger than any tensor')

    def _map(self, block, size):
        nbytes = min(_round_up(size, block.pool.granule), block.size)
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)
        if nbytes < block.size:
            block.cut(nbytes)
        block.mapped = True
        return self._cache(block)

    def _unmap(self, block):
        """Unmap the granules that lie wholly within a free block."""
        granule, pool = block.pool.granule, block.pool
        begin = _round_up(block.address, granule)
        nbytes = (block.address + block.size) // granule * granule - begin
        if nbytes <= 0:
            return
        pool.remove(block)
        if begin > block.address:
            rest = block.cut(begin - block.address)
            pool.add(block)
            block = rest
        if block.size > nbytes:
            pool.add(block.cut(nbytes))
        block.mapped = False
        self.reserved -= nbytes
        self._cache(block)


def replay(
    allocator: CachingAllocator, held: Iterable[int], steps: Iterable[Sequence[tuple[int, int]]]
) -> CachingAllocator:
    """Replay the allocations and frees of training steps.

    Args:
        allocator (CachingAllocator): The allocator.
        held (Iterable[int]): Bytes of each tensor that is held between steps: parameters, buffers, optimizer states.
        steps (Iterable[Sequence[tuple[int, int]]]): For each step, its events in order: the number of a storage and the
            bytes that are allocated for it, or 0 when it is freed. Storages that are not freed end with their step.

    Returns:
        CachingAllocator: The allocator.

    Raises:
        OutOfMemory: If a step has no room.
    """
    for nbytes in held:
        allocator.allocate(nbytes)
    for step in steps:
        blocks = {}
        for number, nbytes in step:
            if nbytes:
                blocks[number] = allocator.allocate(nbytes)
            else:
                allocator.free(blocks.pop(number))
        for block in blocks.values():
            allocator.free(block)
    return allocator


def least_capacity(
    held: Sequence[int],
    steps: Sequence[Sequence[tuple[int, int]]],
    expandable: bool = False,
    unlimited: CachingAllocator | None = None,
) -> int:
    """Return the least capacity with which steps run, if cached segments are given back when memory runs out.

    Args:
        held (Sequence[int]): See :func:`replay`.
        steps (Sequence[Sequence[tuple[int, int]]]): See :func:`replay`.
        expandable (bool): See :class:`CachingAllocator`. Default: False.
        unlimited (CachingAllocator | None): Result of the steps without a limit. If ``None``, they are replayed.
            Default: None.

    Returns:
        int: The capacity, in bytes, up to half a percent too large.
    """
    unlimited = unlimited or replay(CachingAllocator(expandable=expandable), held, steps)
    low, high = unlimited.most_allocated, unlimited.most_reserved
    while high - low > _WITHIN * low:
        middle = (low + high) // 2
        try:
            replay(CachingAllocator(middle, expandable), held, steps)
            high = middle
        except OutOfMemory:
            low = middle
    return high


def _round_up(nbytes, multiple):
    return -(-nbytes // multiple) * multiple
