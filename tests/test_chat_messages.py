"""Chat messages as they are read for templates, and what of them is refused, by its name."""

import pytest

from hjax.data.chat_messages import (
    MessageError,
    read_messages,
    read_template_arguments,
    read_tools,
    read_weights,
)

USER = {"role": "user", "content": "w?"}
CALL = {"name": "get", "arguments": {"city": "Paris"}}
CALLED = {"type": "function", "function": CALL}
SAID = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (USER | {"tool_calls": None, "name": None, "anything": None}, USER),
        ({"role": "user", "tool_calls": [], "content": "w?"}, USER),
        ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
        ({"role": "user", "content": [{"type": "text", "text": "a"},
                                      {"type": "text", "text": "b", "image": None}]},
         {"role": "user", "content": "ab"}),
        ({"role": "user", "content": "a", "name": "Eve"},
         {"role": "user", "content": "a", "name": "Eve"}),
        # Calls, with content that is null, empty or absent; arguments as an object or as its text.
        ({"role": "assistant", "content": None, "tool_calls": [CALLED | {"id": "1"}]},
         SAID | {"tool_calls": [CALLED | {"id": "1"}]}),
        (SAID | {"tool_calls": [{"index": 0, "function": {"name": "get", "arguments":
                                                          '{"city": "Paris"}'}}]},
         SAID | {"tool_calls": [CALLED]}),
        ({"role": "assistant", "tool_calls": [CALL]}, SAID | {"tool_calls": [CALLED]}),
        ({"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "now"}}]},
         {"role": "assistant", "content": "so", "tool_calls":
          [{"type": "function", "function": {"name": "now", "arguments": {}}}]}),
        ({"role": "assistant", "content": None, "function_call":
          {"name": "get", "arguments": '{"city": "Paris"}'}}, SAID | {"tool_calls": [CALLED]}),
        ({"role": "function", "name": "get", "content": "21"},
         {"role": "tool", "content": "21", "name": "get"}),
        # An argument that JSON says to be null is one.
        (SAID | {"tool_calls": [{"name": "f", "arguments": {"a": None}}]},
         SAID | {"tool_calls": [{"type": "function", "function":
                                 {"name": "f", "arguments": {"a": None}}}]}),
        # Reasoning, under each of its names.
        *((SAID | {key: "so"}, SAID | {"reasoning_content": "so", "thinking": "so"})
          for key in ("reasoning_content", "reasoning", "thinking")),
        (SAID | {"weight": 0, "refusal": None, "annotations": []}, SAID),
    ],
)  # fmt: skip
def test_messages_are_read_as_templates_take_them(given, read):
    assert read_messages([given]) == [read]


def function(arguments):
    return {"function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        # As OpenAI's client dumps an answer, LiteLLM and OpenRouter theirs.
        ({"role": "assistant", "content": "hi", "refusal": None, "annotations": [{"type": "u"}],
          "audio": None, "function_call": None, "tool_calls": None},
         {"role": "assistant", "content": "hi"}),
        ({"role": "assistant", "content": "hi", "id": "msg_1", "type": "message", "tool_calls": [],
          "provider_specific_fields": {"refusal": None}, "images": [], "prefix": False},
         {"role": "assistant", "content": "hi"}),
        (USER | {"type": "text", "tool_calls": [], "reasoning": "", "id": 3}, USER),
        (SAID | {"reasoning": "so", "reasoning_content": "so", "thinking_blocks": [{"text": "so"}]},
         SAID | {"reasoning_content": "so", "thinking": "so"}),
        (SAID | {"content": None}, SAID),
        ({"role": "tool", "tool_call_id": "1", "content": None},
         {"role": "tool", "tool_call_id": "1", "content": ""}),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"t": 1}}]},
         {"role": "user", "content": "a"}),
        (SAID | {"tool_calls": [CALLED | {"id": "1", "index": 2, "extra_content": {"a": 1}}]},
         SAID | {"tool_calls": [CALLED | {"id": "1"}]}),
        # Arguments that are empty, and those that were cut: the text that there is.
        *((SAID | {"tool_calls": [function(text)]},
           SAID | {"tool_calls": [{"type": "function", **function(arguments)}]})
          for text, arguments in (("", {}), (" \n", {}), (None, {}), ('{"a": 1, "b', '{"a": 1, "b'),
                                  ('{"a": "\\ud83d', '{"a": "\\ud83d'))),
    ],
)  # fmt: skip
def test_what_servers_and_clients_add_to_messages_is_taken_of_requests(given, read):
    assert read_messages([given], request=True) == [read]


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        (SAID | {"audio": {"id": "a"}}, ".audio", "not supported"),
        (SAID | {"refusal": "no"}, ".refusal", '="no": not supported'),
        (SAID | {"reasoning_details": [{"text": "so"}]}, ".reasoning_details", "reasoning_content"),
        (SAID | {"thinking_blocks": [1], "reasoning": ""}, ".thinking_blocks", "reasoning_content"),
        (SAID | {"prefix": True}, ".prefix", "not supported"),
        (SAID | {"weight": 1}, ".weight", "not supported"),
        (USER | {"tool_call_id": "1"}, ".tool_call_id", "only in messages of the tool"),
        ({"role": "user", "content": None}, ".content", "is missing"),
        ({"role": "assistant"}, ".content", "is missing"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "image": "b"}]},
         ".content[0].image", "not supported"),
        (SAID | {"tool_calls": [function({}) | {"custom": {"name": "f"}}]},
         ".tool_calls[0].custom", "not supported"),
        *((SAID | {"tool_calls": [function(text)]}, ".tool_calls[0].function.arguments",
           "an object, or its JSON text") for text in ("[1]", "[", "call me", "3", 3)),
    ],
)  # fmt: skip
def test_what_carries_content_that_is_not_used_is_named(message, field, says):
    with pytest.raises(MessageError) as caught:
        read_messages([USER, message], request=True)
    assert caught.value.field == f"messages[1]{field}" and says in str(caught.value)


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        ("hi", "", "must be an object"),
        ({"content": "a"}, ".role", "must be one of developer, function, system, user"),
        ({"role": "gpt", "content": "a"}, ".role", '="gpt"'),
        ({"role": "user"}, ".content", "is missing"),
        ({"role": "assistant", "content": None}, ".content", "is missing"),
        ({"role": "user", "content": 3}, ".content", "=3: must be text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         ".content", 'has {"type": "image_url"'),
        ({"role": "user", "content": [{"type": "audio"}]}, ".content", "only parts of text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache": {}}]},
         ".content[0].cache", "not supported"),
        (USER | {"tool_calls": [CALLED]}, ".tool_calls", "only in messages of the assistant"),
        (USER | {"reasoning": "so"}, ".reasoning", "only in messages of the assistant"),
        (USER | {"tool_call_id": "1"}, ".tool_call_id", "only in messages of the tool"),
        (USER | {"images": ["a.png"]}, ".images", "not supported"),
        (USER | {"name": 3}, ".name", "must be text"),
        (SAID | {"refusal": "no"}, ".refusal", "not supported"),
        (SAID | {"reasoning": "a", "thinking": "b"}, ".reasoning", "another text than thinking"),
        (SAID | {"function_call": CALL, "tool_calls": [CALL]}, ".function_call", "keep one"),
        (SAID | {"tool_calls": "f()"}, ".tool_calls", "must be a list of calls"),
        (SAID | {"tool_calls": [CALLED | {"index": 1}]}, ".tool_calls[0].index", "must be 0"),
        (SAID | {"tool_calls": [CALLED | {"type": "custom"}]}, ".tool_calls[0].type", "function"),
        (SAID | {"tool_calls": [CALLED | {"extra": 1}]}, ".tool_calls[0].extra", "not supported"),
        (SAID | {"tool_calls": [{"id": "1"}]}, ".tool_calls[0].function", "is missing"),
        (SAID | {"tool_calls": [{"function": {"arguments": {}}}]},
         ".tool_calls[0].function.name", "is missing"),
        *((SAID | {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
           ".tool_calls[0].function.arguments", "an object, or its JSON text")
          for arguments in ("{", "[]", "", '{"a": "\\ud83d"}', [1], 3)),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_message_is_named(message, field, says):
    with pytest.raises(MessageError) as caught:
        read_messages([USER, message], "prompt")
    assert caught.value.field == f"prompt[1]{field}" and says in str(caught.value)
    assert str(caught.value).startswith(caught.value.field) and "\n" not in str(caught.value)


def test_a_result_belongs_to_a_call():
    call = SAID | {"tool_calls": [CALLED | {"id": "1"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "21"}
    assert read_messages([USER, call, result])[2] == result
    assert read_messages([USER, result])[1] == result  # the call stands before what is given
    with pytest.raises(MessageError, match=r'messages\[2\].tool_call_id="2": no call .* are 1$'):
        read_messages([USER, call, result | {"tool_call_id": "2"}])
    for nothing in ([], "hi", None, {}):
        with pytest.raises(MessageError, match="must be a list of chat messages"):
            read_messages(nothing)


def test_weights_say_which_turns_are_learned():
    turns = [USER | {"weight": 0}, SAID | {"weight": 1}, SAID | {"train": False}, SAID]
    assert read_weights(turns) == [False, True, False, None]
    for wrong, says in [
        ({"weight": 0.5}, "weight=0.5: must be 1"),
        ({"train": "no"}, 'train="no": must be 1'),
        ({"weight": 1, "train": False}, "train=false: says another thing"),
    ]:
        with pytest.raises(MessageError, match=says):
            read_weights([SAID | wrong])
    with pytest.raises(MessageError, match=r"messages\[0\].train=true: only turns of the"):
        read_weights([USER | {"train": True}])


def test_tools_and_arguments_as_objects_or_as_text():
    tools = [{"type": "function", "function": {"name": "get", "parameters": {}}}, {"name": "now"}]
    assert read_tools(tools) == tools and read_tools(None) == []
    assert read_tools('[{"name": "now"}]') == [{"name": "now"}]
    for wrong in ("get", {"name": "get"}, ["get"], [{"type": "function"}], '["get"]'):
        with pytest.raises(MessageError, match=r"^tools"):
            read_tools(wrong)
    name = "chat_template_kwargs"
    assert read_template_arguments('{"enable_thinking": false}', name) == {"enable_thinking": False}
    assert read_template_arguments(None, name) == {}
    for wrong, says in [([1], "must be an object"), ({"messages": [1]}, "messages: hjax sets")]:
        with pytest.raises(MessageError, match=says):
            read_template_arguments(wrong, name)
