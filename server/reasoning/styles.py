"""How a model reasons before it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from jaxserve.server.answer_parts import PartParser
from jaxserve.server.reasoning.harmony import CONTROL, FINAL, HarmonyParser
from jaxserve.server.reasoning.thinking import ThinkingParser

# Tokens of reasoning for an effort, for models whose template knows of none.
EFFORT_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningStyle:
    """start, end      marks around the reasoning
    always_open        the answer begins inside it, whatever the prompt says
    answer_mark        text behind which the answer stands, and what to write to get there when a budget is used up
    """

    name: str
    start: str
    end: str
    always_open: bool = False
    answer_mark: str
    forced_end: str
    control: tuple[str, ...] = ()

    @property
    def is_harmony(self) -> bool:
        return self.name == "gpt_oss"

    def state(self, prompt_end: str) -> bool | None:
        """Whether a prompt leaves the reasoning open (True), has closed it (False), or leaves it to the model
        (None)."""
        opened, closed = prompt_end.rfind(self.start), prompt_end.rfind(self.end)
        if opened == closed == -1:
            return True if self.always_open else None
        return opened > closed


QWEN3 = ReasoningStyle(
    name="qwen3", start="<think>", end="</think>", answer_mark="</think>", forced_end="\n</think>\n\n"
)
DEEPSEEK_R1 = dataclasses.replace(QWEN3, name="deepseek_r1", always_open=True)
GPT_OSS = ReasoningStyle(
    name="gpt_oss",
    start="<|channel|>analysis",
    end="<|channel|>final",
    answer_mark=FINAL,
    forced_end="<|end|>" + FINAL,
    control=CONTROL,
)

STYLES = {style.name: style for style in (QWEN3, DEEPSEEK_R1, GPT_OSS)}
ALIASES = {"deepseek-r1": "deepseek_r1", "gpt-oss": "gpt_oss", "openai_gptoss": "gpt_oss", "harmony": "gpt_oss"}


def resolve_style(name: str, template: str) -> ReasoningStyle | None:
    """The style of this name; "auto": the one that the template speaks of; "none": None."""
    if name == "auto":
        return detect_style(template)
    return None if name == "none" else STYLES[ALIASES.get(name, name)]


def detect_style(template: str) -> ReasoningStyle | None:
    """The style that a model's chat template speaks of."""
    if "<|channel|>" in template:
        return GPT_OSS
    return QWEN3 if "</think>" in template else None


def make_parser(style: ReasoningStyle, *, is_open: bool, names: Collection[str] | None) -> Callable[[], PartParser]:
    """A maker of parsers of the reasoning; harmony's reads calls as well (names: functions there are)."""
    if style.is_harmony:
        return lambda: HarmonyParser(names)
    return lambda: ThinkingParser(style.start, style.end, is_open=is_open)
