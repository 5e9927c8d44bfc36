"""Tokens as clients see them: text, bytes, and the scores of both dialects."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from jaxserve.server.schemas import ChatLogprobs, TokenScore, TopLogprob

from jaxserve.messages import TokenLogprob

Message = dict[str, Any]


class Tokenizer(Protocol):
    """The part of jaxserve.tokenizer.Tokenizer that the server uses. encode and apply_chat_template are called from
    several threads."""

    vocab_size: int
    special_ids: Collection[int]
    strip_leading_space: bool
    has_chat_template: bool

    def template_text(self, *, with_tools: bool) -> str:
        """The chat template that a conversation is written with; "" if there is none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def apply_chat_template(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> list[int]:
        """Raises ValueError saying what the template refuses."""
        ...


class TokenTable:
    """Text and bytes of single tokens, made once each. Ids of a padded vocabulary have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.special_ids = frozenset(tokenizer.special_ids)
        self.strip_leading_space = tokenizer.strip_leading_space

    def bytes_of(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            known = 0 <= token_id < self._tokenizer.vocab_size
            data = self._bytes[token_id] = self._tokenizer.token_bytes(token_id) if known else b""
        return data

    def text_of(self, token_id: int) -> str:
        r"""The token's text; for bytes that are no whole characters "bytes:\xf0\x9f", which names them exactly."""
        text = self._texts.get(token_id)
        if text is None:
            data = self.bytes_of(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token_id] = text
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence; half characters become U+FFFD."""
        special = self.special_ids if skip_special_tokens else ()
        data = b"".join([self.bytes_of(token) for token in token_ids if token not in special])
        if self.strip_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")


class CompletionScores:
    """Log-probabilities in the form of /v1/completions, block by block for one choice.

    num_top   best tokens that were asked for; as_ids: tokens are named token_id:N instead of by their text
    echoed    the prompt's text, if the choice repeats it
    """

    def __init__(
        self, table: TokenTable, *, num_top: int, as_ids: bool, skip_special_tokens: bool, echoed: str = ""
    ) -> None:
        self._table = table
        self._num_top = num_top
        self._as_ids = as_ids
        self._skip_special = skip_special_tokens
        self._echoed = echoed
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt_block(self, token_ids: Sequence[int], scores: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Scores of the echoed prompt, whose first token has none."""
        block = self._new_block()
        for token, score in zip(token_ids, scores, strict=True):
            self._append(block, token, score, self._prompt_advance(token))
        # Text after the prompt begins where the prompt's ends, whatever its last token left unfinished.
        self._decoder.reset()
        self._offset = len(self._echoed)
        return block

    def block(self, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
        block = self._new_block()
        for score in scores:
            token = score.token_id
            if token in self._table.special_ids:
                advance = 0 if self._skip_special else len(self._table.text_of(token))
            else:
                advance = len(self._decoder.decode(self._table.bytes_of(token)))
            self._append(block, token, score, advance)
        return block

    def _prompt_advance(self, token: int) -> int:
        """Characters of the echoed prompt that a token of it covers. A beginning-of-text token or a space that the
        tokenizer put before it is not part of the text."""
        if token in self._table.special_ids:
            text = self._table.text_of(token)
            return len(text) if self._echoed.startswith(text, self._offset) else 0
        data = self._table.bytes_of(token)
        if self._offset == 0 and data.startswith(b" ") and not self._echoed.startswith(" "):
            data = data[1:]
        return len(self._decoder.decode(data))

    @staticmethod
    def _new_block() -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _append(self, block: dict[str, Any], token: int, score: TokenLogprob | None, advance: int) -> None:
        block["tokens"].append(self._name(token))
        block["text_offset"].append(self._offset)
        self._offset += advance
        if score is None:
            block["token_logprobs"].append(None)
            block["top_logprobs"].append(None)
            return
        block["token_logprobs"].append(score.logprob)
        best: dict[str, float] = {}
        # The token itself belongs to the list even if it is none of the best.
        for other, logprob in [*alternatives(score, self._num_top), (token, score.logprob)]:
            name = self._name(other)
            if name in best and other != token:
                name = f"token_id:{other}"  # another token with the same text
            best.setdefault(name, logprob)
        block["top_logprobs"].append(best)

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._table.text_of(token)


def alternatives(score: TokenLogprob, num_top: int) -> list[tuple[int, float]]:
    """The best tokens and then those that were asked for by id, each once."""
    best = score.top[:num_top]
    known = {token for token, _ in best}
    return [*best, *((token, logprob) for token, logprob in dict(score.named).items() if token not in known)]


def chat_scores(table: TokenTable, scores: Sequence[TokenLogprob], *, num_top: int, as_ids: bool) -> ChatLogprobs:
    """Log-probabilities in the form of /v1/chat/completions. Every token, also one without text, has an entry."""

    def fields(token: int, logprob: float) -> dict[str, Any]:
        name = f"token_id:{token}" if as_ids else table.text_of(token)
        return {"token": name, "logprob": logprob, "bytes": list(table.bytes_of(token))}

    return ChatLogprobs(
        content=[
            TokenScore(
                **fields(score.token_id, score.logprob),
                top_logprobs=[TopLogprob(**fields(*best)) for best in alternatives(score, num_top)],
            )
            for score in scores
        ]
    )


def prompt_scores(
    table: TokenTable, scores: Sequence[TokenLogprob | None], *, num_top: int
) -> list[dict[str, Any] | None]:
    """prompt_logprobs in vLLM's form: for each token of the prompt, token id -> score, itself and the best."""
    result: list[dict[str, Any] | None] = []
    for score in scores:
        if score is None:
            result.append(None)
            continue
        ranked: dict[int, tuple[float, int | None]] = {token: (logprob, None) for token, logprob in score.named}
        ranked |= {token: (logprob, rank) for rank, (token, logprob) in enumerate(score.top[:num_top], 1)}
        ranked[score.token_id] = (score.logprob, score.rank)
        result.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": table.text_of(token)}
                for token, (logprob, rank) in ranked.items()
            }
        )
    return result
