"""A sequence's pages: growing, sharing, handing to the tree, giving back. No jax."""

from __future__ import annotations

from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.scheduler.kept import Kept, KeptPrefixes, Prefix
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.sequence import Sequence


class PageKeeper:
    """Moves pages between the cache and sequences. Copies that the device must make go into the step's plan."""

    def __init__(self, cache: PrefixCache, page_size: int, *, deterministic: bool) -> None:
        self.cache = cache
        self.page_size = page_size
        self.deterministic = deterministic
        self.kept = KeptPrefixes(cache, page_size, deterministic=deterministic)

    def match(self, sequence: Sequence) -> Prefix:
        """What of it is in the cache now, or kept for its program; not yet locked."""
        request, limit = sequence.request, sequence.match_limit
        handle = self.cache.match(request.namespace, sequence.tokens, limit)
        return self.kept.extend(handle, request.part.base, request.namespace, sequence.tokens[: max(limit, 0)])

    def acquire(self, prefix: Prefix) -> None:
        """Lock what is in the tree and take a reference to every page."""
        self.cache.tree.lock(prefix.handle)
        self.cache.pool.share(prefix.pages)

    def release(self, prefix: Prefix) -> None:
        """Undo acquire()."""
        self.cache.pool.release(prefix.pages)
        self.cache.tree.unlock(prefix.handle)

    def start(self, sequence: Sequence, row: int, prefix: Prefix) -> None:
        """Put a sequence on a row, with a prefix that was acquired for it."""
        sequence.start(row, self.capacity(sequence), prefix.handle, prefix.pages, prefix.num_tokens)
        sequence.tail_is_shared = prefix.num_tokens % self.page_size != 0

    def keep(self, sequence: Sequence) -> None:
        """Keep what is computed and known of a running sequence that is about to leave."""
        if not self.cache.enabled:
            return
        valid = self._num_valid(sequence)
        self.insert(sequence, valid)
        handle, part = sequence.handle, sequence.request.part
        assert handle is not None
        kept = Kept(
            namespace=sequence.request.namespace,
            tokens=sequence.tokens[:valid].copy(),
            pages=sequence.pages[: -(-valid // self.page_size)].copy(),
            handle=handle,
            lease_s=part.lease_s,
        )
        self.kept.keep(sequence.request.keep_as, kept)

    def room(self, sequence: Sequence) -> int:
        """Tokens that could still be computed with its own pages and all that are available."""
        pages = sequence.num_pages + self.cache.num_available
        return pages * self.page_size - sequence.num_computed

    def capacity(self, sequence: Sequence) -> int:
        """Pages that it can need at most."""
        return -(-sequence.request.max_total_tokens // self.page_size)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a page that is the sequence's own already."""
        return sequence.num_computed < sequence.num_pages * self.page_size and not sequence.tail_is_shared

    def grow(self, sequence: Sequence, size: int, plan: StepPlan) -> bool:
        """Make the pages of the next `size` tokens the sequence's own; False (nothing changed) if there are too few."""
        start = sequence.num_computed
        first = start // self.page_size
        # The last of those that share a partly filled page writes in it, the others in copies.
        shared = sequence.tail_is_shared and bool(self.cache.pool.references[sequence.pages[first]] > 1)
        count = -(-(start + size) // self.page_size) - sequence.num_pages
        if count + shared <= 0:
            sequence.tail_is_shared = False
            return True
        pages = self.cache.allocate(count + shared)
        if pages is None:
            return False
        if shared:
            old = sequence.pages[first : first + 1].copy()
            sequence.replace_page(first, int(pages[0]))
            plan.copy_page(int(old[0]), int(pages[0]))
            self.cache.pool.release(old)
            pages = pages[1:]
        sequence.tail_is_shared = False
        sequence.add_pages(pages)
        return True

    def insert(self, sequence: Sequence, end: int) -> None:
        """Give the tree the full pages of the first `end` tokens, so that later requests (and rows) may use them."""
        handle = sequence.handle
        if not self.cache.enabled or handle is None or sequence.keeps_to_itself:
            return
        start, end = handle.num_tokens, end // self.page_size * self.page_size
        if end <= start:
            return
        tokens, pages = sequence.tokens[start:end], sequence.pages[start // self.page_size : end // self.page_size]
        longer = self.cache.extend(handle, tokens, pages)
        if longer is None:
            sequence.keeps_to_itself = True
        else:
            sequence.handle = longer

    def share(self, parent: Sequence, child: Sequence, row: int) -> None:
        """Start `child` on `row` with the pages of its parent; who writes into a partly filled one copies it."""
        handle = parent.handle
        assert handle is not None
        self.cache.tree.lock(handle)
        pages = parent.pages[: -(-parent.num_computed // self.page_size)]
        self.cache.pool.share(pages)
        child.start(row, self.capacity(child), handle, pages, parent.num_computed)
        child.tail_is_shared = parent.tail_is_shared = parent.num_computed % self.page_size != 0

    def give_back(self, sequence: Sequence) -> None:
        """Release all its pages; what is full, computed and known stays in the tree."""
        valid = self._num_valid(sequence)
        handle = sequence.handle
        assert handle is not None
        start, end = handle.num_tokens, valid // self.page_size * self.page_size
        if self.cache.enabled and end > start:
            pages = sequence.pages[start // self.page_size : end // self.page_size]
            self.cache.deposit(handle, sequence.tokens[start:end], pages)
        self.cache.pool.release(sequence.pages[: sequence.num_pages])
        self.cache.tree.unlock(handle)
        sequence.handle = None
        sequence.num_pages = sequence.num_computed = 0

    def _num_valid(self, sequence: Sequence) -> int:
        """Tokens of it that others may use."""
        valid = min(sequence.num_computed, sequence.num_known)
        if self.deterministic:
            # K/V of decoded tokens comes from another program than that of a prompt: it may differ in the last bit.
            valid = min(valid, sequence.request.num_prompt_tokens)
        return valid
