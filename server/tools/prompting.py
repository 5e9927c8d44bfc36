"""Tools for models whose chat template knows nothing of them: described in the system message, as Hermes models are
told of them, and earlier calls written out."""

from __future__ import annotations

import json
import re
from typing import Any

Turn = dict[str, Any]

_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def knows_calls(template: str) -> bool:
    return "tool_calls" in template


def describe_tools(turns: list[Turn], tools: list[dict[str, Any]]) -> list[Turn]:
    """The same turns with the tools in the system message."""
    text = _DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}".lstrip()}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def write_calls_out(turns: list[Turn]) -> list[Turn]:
    """Calls and their results as text of ordinary turns."""
    result: list[Turn] = []
    for turn in turns:
        if turn.get("tool_calls"):
            calls = "\n".join(
                "<tool_call>\n" + json.dumps(call["function"], ensure_ascii=False) + "\n</tool_call>"
                for call in turn["tool_calls"]
            )
            content = f"{turn['content']}\n{calls}".lstrip()
            turn = {**{key: value for key, value in turn.items() if key != "tool_calls"}, "content": content}
        elif turn["role"] == "tool":
            response = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if result and result[-1].get("is_result"):
                result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n{response}"}
                continue
            turn = {"role": "user", "content": response, "is_result": True}
        result.append(turn)
    return [{key: value for key, value in turn.items() if key != "is_result"} for turn in result]
