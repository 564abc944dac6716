"""Conversations with tools: an environment that runs the calls of each turn."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.data.chat_messages import read_messages, read_template_arguments, read_tools
from hjax.data.template_continuation import template_continuation
from hjax.data.tokenizer import Tokenizer
from hjax.data.tool_call_forms import CallForm, call_form, split_calls
from hjax.environments.environment import Environment, Observation, Step
from hjax.environments.episode_text import ObservationEncoder
from hjax.environments.tools import SETTING, EpisodeTools, Tool, load_tools
from hjax.errors import ConfigError, DataError, short_repr
from hjax.sandbox.sandbox_settings import THIS_MACHINE, SandboxSettings

ARGUMENTS = "chat_template_kwargs"
TOOL_ENVIRONMENT = f"{__name__}:ToolEnvironment"


class ToolEnvironment(Environment):
    """Runs the tool calls of a turn until a turn has none, which is the answer.

    The row's ``prompt`` is a text or chat messages; its column ``tools``, definitions, says which
    of the tools it has, all if it has none, and ``tools_kwargs`` what classes are made with
    (``settings_of_row``). Each call's result is a message of the role ``tool``;
    an error, a call of no tool and one with arguments that its tool does not take are results too.
    A call that cannot be read is answered by a user's message. Rewards are 0: what scores the last
    turn is the run's reward function.

    Metrics of a turn: ``tool_calls``, and ``tool_errors``, those that could not be run.

    Args:
      tools: as in ``environment.tools``.
      form: how the chat template has calls written, as ``dataclasses.asdict`` of a CallForm.
      setting: that names the tools, for messages.
      sandbox: of tools that run programs.
    """

    def __init__(
        self,
        tools: str,
        form: Mapping[str, Any],
        setting: str = SETTING,
        sandbox: SandboxSettings = THIS_MACHINE,
    ):
        self._sandbox = sandbox
        self._tools = _loaded(tools, setting)
        self._form, self._setting = CallForm(**form), setting
        self._episode = EpisodeTools([], 0)

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        prompt = task.get("prompt")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        self._turn = 0
        tools, definitions = tools_of_row(self._tools, task, self._setting)
        settings = settings_of_row(tools, task)
        self._episode = EpisodeTools(tools, seed, self._sandbox, settings)
        return Observation(
            messages=read_messages(prompt, "prompt"),
            tools=definitions,
            template_arguments=read_template_arguments(task.get(ARGUMENTS), ARGUMENTS),
        )

    def step(self, action: str) -> Step:
        self._turn += 1
        parameters = {tool.name: tool.parameters for tool in self._tools}
        text, calls, is_malformed = split_calls(action, self._form, parameters)
        if is_malformed:
            said = "error: the tool call could not be read; write it as the tools say"
            messages = [{"role": "user", "content": said}]
            return Step(
                Observation(messages=messages), valid=False,
                metrics={"tool_calls": 1, "tool_errors": 1},
            )  # fmt: skip
        if not calls:
            return Step(Observation(""), done=True, metrics={"tool_calls": 0, "tool_errors": 0})
        asked = [(call.name, json.loads(call.arguments)) for call in calls]
        answers = self._episode.call_all(asked)
        read, results = [], []
        for number, ((name, arguments), (result, _)) in enumerate(zip(asked, answers, strict=True)):
            # Nine letters and digits, as Mistral's templates ask for; the same in a replay.
            key = f"call{self._turn % 1000:03}{number % 100:02}"
            function = {"name": name, "arguments": arguments}
            read.append({"id": key, "type": "function", "function": function})
            results.append({"role": "tool", "name": name, "tool_call_id": key, "content": result})
        turn = {"role": "assistant", "content": text, "tool_calls": read}
        errors = sum(not valid for _, valid in answers)
        return Step(
            Observation(messages=[turn, *results]),
            valid=not errors,
            metrics={"tool_calls": len(calls), "tool_errors": errors},
        )

    def close(self) -> None:
        self._episode.close()


def tool_definitions(
    spec: str, tokenizer: Tokenizer | None, setting: str = SETTING
) -> list[dict[str, Any]]:
    """The definitions of tools, as the chat template takes them.

    Raises:
      ConfigError: tools or a template that cannot be used.
    """
    _form_of_calls(tokenizer, setting)
    return [tool.definition for tool in load_tools(spec, setting)]


def _form_of_calls(tokenizer: Tokenizer | None, setting: str) -> CallForm:
    """How calls are written by a tokenizer's chat template.

    Raises:
      ConfigError: no tokenizer or template, or one that does not take calls, leaves them out of a
        conversation, or does not say how they are written.
    """
    if tokenizer is None:
        raise ConfigError(f"{setting}: tools are of chats, and there is no tokenizer")
    try:
        found = template_continuation(tokenizer)
    except DataError as error:
        raise ConfigError(f"{setting}: tools are of chats: {error}") from error
    form = call_form(tokenizer.template_for([]) or "")
    why = found.kind if found.refuses_tools or found.loses_calls else ""
    if why or form is None:
        raise ConfigError(
            f"{setting}: the chat template of tokenizer {tokenizer.name} "
            + (f"{why}" if why else "does not say how calls are written in a form read here")
            + "; take one that writes them between <tool_call> and </tool_call>, as JSON or in "
            "tags (Qwen's, Hermes's), or as Llama 3.1 does"
        )
    tags = tokenizer.encode(form.begin + form.end, add_special=False) if form.begin else []
    if form.begin not in tokenizer.decode(tags):
        raise ConfigError(
            f"{setting}: {form.begin} is a special token of tokenizer {tokenizer.name}, so the "
            "text of a turn has no calls; write it into tokenizer.json as an added token that is "
            "not special"
        )
    return form


def tool_options(
    spec: str,
    encoder: ObservationEncoder,
    setting: str = SETTING,
    sandbox: SandboxSettings = THIS_MACHINE,
) -> dict[str, Any]:
    """Options of a ToolEnvironment, whose conversations are tried with the template.

    Args:
      spec: of the tools.
      encoder: of the observations.
      setting: that names the tools.
      sandbox: of tools that run programs.

    Raises:
      ConfigError: tools, a sandbox or a template that cannot be used.
    """
    form = _form_of_calls(encoder.tokenizer, setting)
    tools = load_tools(spec, setting)
    call = {"name": tools[0].name, "arguments": {"x": "1"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00000", "type": "function", "function": call}]}  # fmt: skip
    result = {"role": "tool", "name": call["name"], "tool_call_id": "call00000", "content": "2"}
    try:
        encoder.check([tool.definition for tool in tools], [turn, result])
    except DataError as error:
        raise ConfigError(f"{setting}: {error}") from error
    if any(tool.uses_sandbox for tool in tools):
        sandbox.make()
    return {
        "tools": spec, "form": dataclasses.asdict(form), "setting": setting, "sandbox": sandbox
    }  # fmt: skip


@functools.lru_cache(maxsize=4)
def _loaded(spec: str, setting: str) -> list[Tool]:
    return load_tools(spec, setting)


def tools_of_row(
    tools: Sequence[Tool], row: Mapping[str, Any], setting: str = SETTING
) -> tuple[list[Tool], list[dict[str, Any]]]:
    """The tools that a row has, those of its column ``tools`` or all, and their definitions.

    Raises:
      DataError: the column defines a tool that there is not, or takes other arguments.
    """
    wanted = read_tools(row.get("tools"))
    if not wanted:
        return list(tools), [tool.definition for tool in tools]
    known = {tool.name: tool for tool in tools}
    found = []
    for each in wanted:
        function = each.get("function", each)
        tool = known.get(function["name"])
        if tool is None:
            raise DataError(
                f"tools: the row has {short_repr(function['name'])}, and {setting} has "
                f"{', '.join(known)}; add its function there"
            )
        given = (function.get("parameters") or {}).get("properties") or {}
        taken = tool.parameters.get("properties", {})
        if unknown := [name for name in given if name not in taken]:
            raise DataError(
                f"tools: the row's {tool.name} has the argument {unknown[0]!r}, which the function "
                f"of {setting} does not take ({', '.join(taken) or 'none'})"
            )
        found.append(tool)
    return found, wanted


def settings_of_row(tools: Sequence[Tool], row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a row makes its tools with, by tool, in verl's form: ``tools_kwargs``, of its own or in
    ``extra_info``, has ``{TOOL: {"create_kwargs": {...}}}``.

    Raises:
      DataError: a tool that the row has not, an argument that its class does not take, or others
        than those of ``create_kwargs``.
    """
    given = row.get("tools_kwargs") or (row.get("extra_info") or {}).get("tools_kwargs") or {}
    known, found = {tool.name: tool for tool in tools}, dict[str, dict[str, Any]]()
    for name, groups in given.items():
        groups = {key: value for key, value in (groups or {}).items() if value}
        if not groups:
            continue
        if name not in known:
            raise DataError(f"tools_kwargs: {name!r} is no tool of the row: {', '.join(known)}")
        if other := next((key for key in groups if key != "create_kwargs"), ""):
            raise DataError(
                f"tools_kwargs: {name}.{other} is not read here, only create_kwargs, with which a "
                "tool's class is made; leave it out"
            )
        arguments = {k: v for k, v in groups["create_kwargs"].items() if v is not None}
        if unknown := sorted(arguments.keys() - known[name].settings):
            taken = ", ".join(sorted(known[name].settings)) or "nothing"
            raise DataError(
                f"tools_kwargs: {name}.create_kwargs has {unknown[0]!r}; a class of this name "
                f"takes it in __init__ (it takes {taken})"
            )
        found[name] = arguments
    return found
