"""The thoughts of reasoning models, cut out of what they write. No jax."""

from __future__ import annotations

# model type -> (begin mark, end mark, whether the thoughts begin at once, the mark being part of the prompt)
_MARKS = {
    "deepseek-r1": ("<think>", "</think>", True),
    "deepseek-v3": ("<think>", "</think>", False),
    "qwen3": ("<think>", "</think>", False),
    "qwen3-thinking": ("<think>", "</think>", True),
    "glm45": ("<think>", "</think>", False),
    "kimi": ("◁think▷", "◁/think▷", False),
}
SUFFIX = "_reasoning_content"


def check_model_type(model_type: str | None) -> str:
    """The key of a model type, without regard to case. Raises ValueError naming those that are known."""
    key = (model_type or "").lower()
    if key not in _MARKS:
        raise ValueError(f"model_type: got {model_type!r}; allowed: {', '.join(_MARKS)}")
    return key


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(thoughts, what comes after them). Thoughts that never end are all thoughts."""
    begin, end, begins_at_once = _MARKS[model_type]
    start = text.find(begin)
    if start < 0 and not (begins_at_once or end in text):
        return "", text
    before, inside = ("", text) if start < 0 else (text[:start], text[start + len(begin) :])
    thoughts, mark, answer = inside.partition(end)
    if not mark:
        return thoughts.strip(), before.strip()
    return thoughts.strip(), (before + answer).strip()
