"""What the scheduler keeps of one request besides the request itself. No jax."""

from __future__ import annotations

import numpy as np

from jaxserve.cache.radix_tree import Handle
from jaxserve.request import Request, Status

_NO_PAGES = np.empty(0, np.int32)


class Sequence:
    """One request's tokens, pages and progress. Only the scheduler changes it.

    tokens        int32 buffer; the first num_known are known to the host
    num_pending   tokens sampled by steps in flight: the device knows them, the host not yet
    num_computed  tokens whose K/V is in the cache once all dispatched steps have run
    pages         int32 buffer whose first num_pages belong to the sequence, in order. Steps in flight hold views of
                  it: entries once written are never changed, a copy on write takes a new buffer
    keeps_to_itself  the tree has the same tokens on other pages: nothing of this sequence is inserted while it runs
    is_miscounted    the device's token counts of its row (for penalties) have to start anew
    key           place in the policy's order, smaller runs first; reverse_key orders the other way round
    tail_is_shared  its last page is partly filled and other continuations use it too: copied before it is written
    stop_ids      tokens that end it, once min_tokens have been made
    handle        locked position in the radix tree; its num_tokens of the sequence have been inserted or matched
    num_scored    prompt scoring: scores of prompt tokens below this index have been asked of the device
    num_unscored_next  tokens of next_ids whose score has not come yet
    """

    __slots__ = (
        "common", "handle", "is_miscounted", "keeps_to_itself", "key", "num_computed", "num_known", "num_pages",
        "num_passed_over", "num_pending", "num_preemptions", "num_prompt", "num_scored", "num_unscored_next", "order",
        "pages", "request", "reverse_key", "row", "stop_ids", "tail_is_shared", "tokens", "was_admitted",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, key: tuple[int, int, int]) -> None:
        self.request = request
        self.order = order
        self.set_key(key)
        self.tokens = np.empty(request.max_total_tokens, np.int32)
        self.num_known = self.num_prompt = request.num_prompt_tokens
        self.tokens[: self.num_known] = request.prompt
        self.stop_ids = frozenset() if request.params.ignore_eos else request.eos_token_ids
        if request.params.stop_token_ids:
            self.stop_ids = self.stop_ids.union(request.params.stop_token_ids)
        self.num_pending = 0
        self.num_computed = 0
        self.num_scored = self.num_prompt
        if request.params.prompt_logprobs is not None:
            # The first prompt token has no score.
            self.num_scored = min(max(1, request.params.prompt_logprobs_start), self.num_prompt)
        self.num_unscored_next = len(request.part.next_ids)
        self.row = -1
        self.pages = _NO_PAGES
        self.num_pages = 0
        self.handle: Handle | None = None
        self.keeps_to_itself = False
        self.tail_is_shared = False
        self.is_miscounted = False
        self.common: dict[int, int] = {}  # other sequence's order -> length of the common prefix
        self.num_passed_over = 0
        self.num_preemptions = 0
        self.was_admitted = False

    def set_key(self, key: tuple[int, int, int]) -> None:
        self.key = key
        self.reverse_key = (-key[0], -key[1], -key[2])

    @property
    def length(self) -> int:
        """Tokens that the device knows or will know from the steps in flight."""
        return self.num_known + self.num_pending

    @property
    def num_missing(self) -> int:
        """Tokens still to be computed; 1 for a sequence that decodes."""
        return self.length - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        computed = self.num_computed
        return computed < self.num_prompt or self.num_known + self.num_pending - computed > 1

    @property
    def may_grow(self) -> bool:
        """Whether another token may be sampled once everything known has been computed."""
        return self.num_known + self.num_pending < self.request.max_total_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next row is one token, with another to be sampled after it."""
        computed, length = self.num_computed, self.num_known + self.num_pending
        return self.num_prompt <= computed >= length - 1 and length < self.request.max_total_tokens

    @property
    def wants_scores(self) -> bool:
        """Whether scores of its prompt have yet to be asked of the device."""
        return self.num_scored < self.num_prompt

    @property
    def num_samples_at_end(self) -> int:
        """Samples that the chunk which ends the prompt takes."""
        return len(self.request.part.next_ids) or 1

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache: the last one is computed, and what has no score yet."""
        if self.request.pooling == "mean":
            return 0  # the state of every token is needed, and pages hold keys and values only
        return (self.num_scored if self.num_scored < self.num_prompt else self.num_known) - 1

    def append(self, token: int) -> None:
        """A pending token became known."""
        self.tokens[self.num_known] = token
        self.num_known += 1
        self.num_pending -= 1
        self.request.output_ids.append(token)

    def start(self, row: int, capacity: int, handle: Handle, pages: np.ndarray, num_tokens: int) -> None:
        """Take a row and the pages of the first num_tokens tokens. capacity: pages that max_total_tokens can need.

        handle is locked and covers no more than those tokens; a last page that is partly filled is shared.
        """
        self.row = row
        self.pages = np.zeros(capacity, np.int32)
        self.num_pages = len(pages)
        self.pages[: self.num_pages] = pages
        self.num_computed = num_tokens
        self.handle = handle
        self.keeps_to_itself = False
        self.tail_is_shared = False
        self.request.status = Status.RUNNING

    def add_pages(self, pages: np.ndarray) -> None:
        self.pages[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)

    def replace_page(self, index: int, page: int) -> None:
        """Copy on write. Steps in flight keep the old buffer."""
        self.pages = self.pages.copy()
        self.pages[index] = page

    def shares_prompt(self, other: Sequence, count: int) -> bool:
        """Whether the first `count` > 0 tokens of two prompts are the same."""
        a, b = self.request.prompt, other.request.prompt
        # Most prompts that are compared differ there, or before.
        if count > len(a) or count > len(b) or a[count - 1] != b[count - 1]:
            return False
        return self.common_prefix(other) >= count

    def common_prefix(self, other: Sequence) -> int:
        """Length of the common prefix of two prompts, remembered."""
        known = self.common.get(other.order)
        if known is None:
            a, b = self.request.prompt, other.request.prompt
            size = min(len(a), len(b))
            differs = a[:size] != b[:size]
            first = int(differs.argmax()) if size else 0
            known = first if size and differs[first] else size
            self.common[other.order] = known
        return known
