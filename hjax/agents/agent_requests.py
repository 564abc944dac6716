"""What agents ask, and what training lets them have of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hjax.rollout.sampling_params import OPTIONS, SamplingParams
from hjax.serving.request_models import ParsedRequest, RequestPrompt
from hjax.serving.response_format import FormatFields

# Fields that say how to draw, where the run says it; and which form an answer has.
_SAMPLING = {
    *OPTIONS, "seed", "logit_bias", "stop_token_ids", "ignore_eos", "min_tokens", "best_of",
}  # fmt: skip
_FORMS = {*FormatFields.model_fields, "response_format"}


def drawn_by_the_run(
    body: Mapping[str, Any], constrained: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request's body with what training uses of it, and the rest of it.

    The policy is drawn from as the trainer says, or the log-probs would be of another distribution
    than it computes. So tools need not be called, and no format is enforced, unless
    ``constrained``.
    """
    used, asked = dict(body), dict[str, Any]()
    for name in (_SAMPLING if constrained else _SAMPLING | _FORMS) & used.keys():
        asked[name] = used.pop(name)
    if constrained:
        return used, {name: value for name, value in asked.items() if value is not None}
    if used.get("tool_choice") not in (None, "auto", "none"):
        asked["tool_choice"] = used.pop("tool_choice")
    if used.get("parallel_tool_calls") is not None:
        asked["parallel_tool_calls"] = used.pop("parallel_tool_calls")
    tools = used.get("tools")
    if isinstance(tools, list) and any(_strict(tool) for tool in tools):
        asked["strict"] = True
        used["tools"] = [_without_strict(tool) for tool in tools]
    return used, {name: value for name, value in asked.items() if value is not None}


def any_client(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body without what some clients send for nothing: a model's name, as there is one model, and
    options of a stream where there is none."""
    made = {name: value for name, value in body.items() if name != "model"}
    if not made.get("stream"):
        made.pop("stream_options", None)
    if not made.get("tools"):
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            made.pop(name, None)
    return made


def no_request(body: Mapping[str, Any]) -> ParsedRequest:
    """What an answer that nobody draws is to."""
    options = body.get("stream_options")
    return ParsedRequest(
        prompts=(RequestPrompt((0,), 1),),
        n=1,
        options=SamplingParams(),
        seed=0,
        stop=(),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        token_ids=False,
        skip_special=True,
        logprobs=None,
    )


def _strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and bool(function.get("strict"))


def _without_strict(tool: Any) -> Any:
    if not _strict(tool):
        return tool
    function = {name: x for name, x in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}
