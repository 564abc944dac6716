"""OpenAI's two forms, by OpenAI's client: over a service that says what the prompt ends with."""

import json

import openai
import pytest
from serving_double import END, EOS, HTTP, Scripted, answers, byte_tokenizer, served, wait_until

import hjax
from hjax.serving.limits import ServerLimits
from hjax.serving.request_models import parse_chat
from hjax.serving.served_model import ServedModel


def scripted():
    """A service of one's own: a server closes the one it has."""
    return Scripted(lambda request: said_after(request.prompt))


SERVICE = scripted()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def said_after(prompt):
    """What the service says: what stands after the last "say:", and the end."""
    text = bytes(token for token in prompt if token < 256).rpartition(b"say:")[2]
    return [*text.partition(b"\nassistant")[0], EOS]


@pytest.fixture(scope="module")
def url():
    SERVICE.reopen()  # a worker may come back to this module's tests after others
    with served(SERVICE, tokenizer=byte_tokenizer()) as (url, _, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, said, **fields):
    """The response to a prompt that has it said."""
    prompt = f"say:{said}"
    return client.completions.create(model="bytes", prompt=prompt, **{"max_tokens": 200} | fields)


def chat(client, said, **fields):
    messages = [{"role": "user", "content": f"say:{said}"}]
    return client.chat.completions.create(model="bytes", messages=messages, **fields)


def joined(chunks):
    """Text, logprobs and finish reason of a stream's only choice."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join(c.text for c in choices), choices[-1].finish_reason


def test_models(client):
    assert [model.id for model in client.models.list()] == ["bytes"]
    assert client.models.retrieve("bytes").max_model_len == SERVICE.max_tokens
    with pytest.raises(openai.NotFoundError, match="this server has bytes") as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_a_completion(client):
    found = complete(client, "Grüße 😀")
    [choice] = found.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("Grüße 😀", "stop", None)
    assert found.object == "text_completion" and found.model == "bytes"
    drawn = len("Grüße 😀".encode()) + 1  # the end too
    assert found.usage.to_dict() == {
        "prompt_tokens": drawn + 3, "completion_tokens": drawn, "total_tokens": 2 * drawn + 3,
        "prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {},
    }  # fmt: skip


def test_a_chat(client):
    found = chat(client, "Grüße")
    [choice] = found.choices
    assert choice.message.role == "assistant" and choice.message.content == "Grüße"
    assert choice.finish_reason == "stop" and found.object == "chat.completion"
    prompt = "<|im_start|>user\nsay:Grüße<|im_end|>\n<|im_start|>assistant\n"
    for special in ("<|im_start|>", END):
        prompt = prompt.replace(special, "x")  # a token each
    assert found.usage.prompt_tokens == len(prompt.encode())


@pytest.mark.parametrize("limit, text", [(1, "\ufffd"), (2, "é"), (3, "éa")])
def test_a_length_is_kept(client, limit, text):
    found = complete(client, "éab", max_tokens=limit)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (text, "length")
    assert found.usage.completion_tokens == limit


def test_what_is_not_limited(client):
    assert complete(client, "a" * 40, max_tokens=None).choices[0].text == "a" * 16
    before = len(SERVICE.requests)
    chat(client, "a" * 40)
    request = SERVICE.requests[before]
    assert len(request.prompt) + request.max_tokens == SERVICE.max_tokens


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_has_two_names_for_its_length(client, field):
    found = chat(client, "abcdef", **{field: 3})
    assert found.choices[0].message.content == "abc"


@pytest.mark.parametrize(
    "prompt, said",
    [
        ("say:ab", ["ab"]),
        (["say:ab", "say:c"], ["ab", "c"]),
        ([*b"say:ab"], ["ab"]),
        ([[*b"say:ab"], [*b"say:c"]], ["ab", "c"]),
    ],
)
def test_forms_of_prompts(client, prompt, said):
    found = client.completions.create(model="bytes", prompt=prompt, n=2, echo=True, max_tokens=9)
    assert [c.text for c in found.choices] == [f"say:{t}{t}" for t in said for _ in range(2)]
    numbers = [*range(2 * len(said))]
    assert [c.index for c in found.choices] == numbers
    assert [request.choice for request in SERVICE.requests[-len(numbers) :]] == numbers
    assert found.usage.prompt_tokens == sum(len(f"say:{t}") for t in said)


def test_draws_follow_from_the_seed_alone(client):
    complete(client, "a", seed=7, n=2)
    assert [(r.seed, r.choice) for r in SERVICE.requests[-2:]] == [(7, 0), (7, 1)]
    complete(client, "a"), complete(client, "a")
    first, second = SERVICE.requests[-2:]
    assert first.seed != second.seed


@pytest.mark.parametrize("piece", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "stop, said, text, tokens",
    [
        ("END", "to the EN of the END. END", "to the EN of the ", 20),
        (["x", "é!"], "caféé! x", "café", 8),
        (["never"], "to the never", "to the ", 12),
        (["neverz"], "to the never", "to the never", 13),
        ([], "all", "all", 4),
    ],
)
def test_stop_strings_end_the_text_wherever_pieces_are_cut(
    client, monkeypatch, stop, said, text, tokens, piece
):
    monkeypatch.setattr(SERVICE, "_piece", piece)
    found = complete(client, said, stop=stop)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (text, "stop")
    assert found.usage.completion_tokens == tokens
    streamed = list(complete(client, said, stop=stop, stream=True))
    assert joined(streamed) == (text, "stop")
    # What was shown was never the beginning of a stop string that came whole.
    shown = ""
    for chunk in streamed:
        shown += chunk.choices[0].text
        assert text.startswith(shown)


def test_a_stop_string_frees_the_engine(client, monkeypatch):
    monkeypatch.setattr(SERVICE, "_pause", 0.01)
    before = len(SERVICE.cancelled)
    complete(client, "END" + "more" * 40, stop="END", max_tokens=1000)
    wait_until(lambda: len(SERVICE.cancelled) > before)
    assert len(SERVICE.cancelled) == before + 1


def test_before_min_tokens_nothing_ends(client):
    found = complete(client, "a.b.c.", stop=".", extra_body={"min_tokens": 3})
    assert found.choices[0].text == "a.b"
    assert SERVICE.requests[-1].options.min_tokens == 3


def test_a_stop_token_is_counted_and_not_shown(client):
    found = complete(client, "ab", extra_body={"stop_token_ids": [98]})
    assert set(SERVICE.requests[-1].options.stop) == {EOS, 98}
    assert found.choices[0].text == "a" and found.choices[0].finish_reason == "stop"


def test_how_tokens_are_drawn(client):
    fields = {"temperature": 0.5, "top_p": 0.25, "presence_penalty": 1, "frequency_penalty": -1.5}
    own = {"top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5}
    complete(client, "a", **fields, logit_bias={"97": 5, "98": -100}, extra_body=own)
    options = SERVICE.requests[-1].options
    for name, value in (fields | own).items():
        assert getattr(options, name) == value
    assert options.logit_bias == {97: 5, 98: -100}
    complete(client, "a", extra_body={"top_k": -1})
    assert SERVICE.requests[-1].options.top_k == 0


def test_logprobs_of_completions(client):
    found = complete(client, "aé", logprobs=1).choices[0].logprobs
    tokens = [*"aé".encode(), EOS]
    assert found.tokens == ["a", "\ufffd", "\ufffd", END]
    assert found.token_logprobs == [-token / 256 for token in tokens]
    assert found.text_offset == [0, 1, 1, 2]
    # The service tells no others than the one drawn.
    assert found.top_logprobs[0] == {"a": -97 / 256} and len(found.top_logprobs) == 4
    assert complete(client, "aé", logprobs=0).choices[0].logprobs.top_logprobs is None


def test_logprobs_of_chats(client):
    found = chat(client, "aé", logprobs=True).choices[0].logprobs.content
    assert [each.logprob for each in found] == [-t / 256 for t in [*"aé".encode(), EOS]]
    assert [each.bytes for each in found] == [[97], None, None, list(END.encode())]
    assert all(each.top_logprobs == [] for each in found)


def test_a_stream_of_completions_is_the_whole_in_parts(client):
    fields = {"logprobs": 0, "n": 2, "extra_body": {"return_token_ids": True}}
    whole = complete(client, "Grüße 😀 END", stop="END", **fields)
    usage = {"include_usage": True}
    chunks = list(
        complete(client, "Grüße 😀 END", stop="END", stream=True, stream_options=usage, **fields)
    )
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    for index, expected in enumerate(whole.choices):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert len(parts) > 2
        assert "".join(part.text for part in parts) == expected.text
        ids = [token for part in parts for token in part.token_ids]
        assert ids == expected.token_ids == list("Grüße 😀 END".encode())
        assert parts[0].prompt_token_ids == expected.prompt_token_ids
        for name in ("tokens", "token_logprobs", "text_offset"):
            found = [x for part in parts for x in getattr(part.logprobs, name)]
            assert found == getattr(expected.logprobs, name)
        assert [part.finish_reason for part in parts][-2:] == [None, expected.finish_reason]


def test_a_stream_of_a_chat_is_the_whole_in_parts(client):
    whole = chat(client, "Grüße 😀", logprobs=True).choices[0]
    chunks = list(chat(client, "Grüße 😀", logprobs=True, stream=True))
    parts = [chunk.choices[0] for chunk in chunks]
    assert parts[0].delta.role == "assistant"
    assert all(part.delta.role is None for part in parts[1:])
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert [x for p in parts for x in p.logprobs.content] == whole.logprobs.content
    assert parts[-1].finish_reason == whole.finish_reason == "stop"
    assert chunks[0].object == "chat.completion.chunk"


def test_a_stream_can_echo(client):
    chunks = list(complete(client, "abc", stream=True, echo=True, max_tokens=2))
    assert joined(chunks) == ("say:abcab", "length")


def test_events_end_with_done(url):
    body = {"prompt": "say:a", "stream": True}
    with HTTP.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_calls_of_tools(client):
    found = chat(client, f"So:\n{CALL}\n{CALL}", tools=[TOOL]).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content == "So:\n"
    calls = found.message.tool_calls
    assert [call.function.name for call in calls] == ["add", "add"]
    assert json.loads(calls[0].function.arguments) == {"a": 1}
    assert calls[0].id != calls[1].id
    prompt = bytes(token for token in SERVICE.requests[-1].prompt if token < 256).decode()
    assert f"<tools>{json.dumps([TOOL])}</tools>" in prompt


def test_a_stream_with_calls(client):
    parts = [c.choices[0] for c in chat(client, f"So:\n{CALL}", tools=[TOOL], stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == "So:\n"
    [call] = [call for part in parts for call in part.delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "add")
    assert parts[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(client, fields):
    found = chat(client, CALL, **fields).choices[0]
    assert found.message.content == CALL and found.message.tool_calls is None
    assert found.finish_reason == "stop"
    assert b"<tools>" not in bytes(t for t in SERVICE.requests[-1].prompt if t < 256)


def test_a_call_and_its_answer_go_into_the_prompt(client):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    client.chat.completions.create(
        model="bytes",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "},
                                              {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "say:2"},
        ],
    )  # fmt: skip
    prompt = bytes(token for token in SERVICE.requests[-1].prompt if token < 256).decode()
    assert prompt == (
        "system\nBe brief.\nuser\n1?\nassistant\n"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\ntool\nsay:2\nassistant\n'
    )


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": 1}, "guided_grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"structured_outputs": {"json_object": True, "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"priority": 1}, "priority"),
        ({"store": True}, "store"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"cache_salt": "a"}, "cache_salt"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats"),
        ({"structured_outputs": "a+"}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "[a&&b]"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 2**18}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"], "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 2.0}, "n"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": [str(i) for i in range(129)]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"stop_token_ids": [13]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"97": 101}}, "logit_bias"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 4094}, "max_tokens"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [97, 260]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "a" * 4090}, "max_tokens"),
        ({"prompt": "a" * 5000}, "prompt"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_completion_is_named(url, fields, param):
    count = len(SERVICE.requests)
    body = {"model": "bytes", "prompt": "abc"} | fields
    answer = HTTP.post(f"{url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and len(SERVICE.requests) == count
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param.split(".")[-1] in error["message"] and "\n" not in error["message"]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema":
         {"type": "wrong"}}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format"),
        ({"guided_regex": "a", "tools": [TOOL]}, "tools"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]},
         "tool_choice"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
         "tools[0].function.strict"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "f", "parameters": {
         "not": {}}}}], "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
         "type": "array"}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"functions": [TOOL["function"]]}, "functions"),
        ({"function_call": {"name": "add"}}, "function_call"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [USER, {"role": "robot", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "["}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
         "response_format.json_schema"),
        ({"prompt": "a"}, "prompt"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_chat_is_named(url, fields, param):
    answer = HTTP.post(f"{url}/v1/chat/completions", json={"messages": [USER]} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 60_000,
        b'{"n": NaN}',
        b'{"n": %s}' % (b"9" * 5000),
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"\xed\xa0\x80": 1}',
        r'{"\ud800": 1}'.encode("utf-16"),
        rb'{"\ud800": 1}',
        rb'{"prompt": "\ud800"}',
    ],
)
def test_a_body_that_is_no_object(url, body):
    answer = HTTP.post(f"{url}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body is")


@pytest.mark.parametrize("depth", [300, 900, 5000, 20_000])
@pytest.mark.parametrize("field", ["prompt", "stop", "seed", "unknown", "tools"])
def test_values_that_are_nested_deeply(url, field, depth):
    value = b'{"x":[' * depth + b"]}" * depth
    if field == "tools":
        value = b'[{"function": {"name": "f", "parameters": %s}}]' % value
    body = b'{"messages": [{"role": "user", "content": "say:a"}], "%s": %s}' % (
        field.encode(),
        value,
    )
    answer = HTTP.post(f"{url}/v1/chat/completions", content=body)
    assert answer.status_code == 400 or (field == "tools" and answer.status_code == 200)


def test_null_is_not_given_and_remarks_change_nothing(client):
    fields = {"suffix": None, "best_of": None, "user": "u", "stop": None, "logit_bias": None}
    assert complete(client, "a", **fields).choices[0].text == "a"


NEUTRAL = {
    "best_of": 1, "store": False, "use_beam_search": False, "length_penalty": 1.0, "priority": 0,
    "early_stopping": False, "include_stop_str_in_output": False, "bad_words": [], "user": "u",
    "spaces_between_special_tokens": True, "logits_processors": [], "metadata": {"a": "b"},
    "guided_decoding_backend": "auto", "kv_transfer_params": {}, "vllm_xargs": {}, "n": 1,
    "service_tier": "flex", "prompt_cache_key": "k", "request_id": "r", "structured_outputs": {},
    "guided_regex": "", "guided_choice": [], "stop": [], "logit_bias": {}, "top_k": -1,
    "return_tokens_as_token_ids": False, "ignore_eos": False, "skip_special_tokens": True,
    "cache_salt": None, "unheard_of": None, "stream_options": {},
}  # fmt: skip
NEUTRAL_OF_CHATS = {
    "functions": [], "function_call": "auto", "tools": [], "tool_choice": "none", "echo": False,
    "modalities": ["text"], "verbosity": "medium", "include_reasoning": True, "top_logprobs": 0,
    "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False,
    "documents": [], "reasoning_effort": "medium", "audio": None, "response_format":
    {"type": "text"}, "prediction": {"type": "content", "content": "b"}, "web_search_options": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "path, body, more",
    [("completions", {"prompt": "say:ab"},
      {"suffix": "", "echo": False, "add_special_tokens": True}),
     ("chat/completions", {"messages": [USER | {"content": "say:ab"}]}, NEUTRAL_OF_CHATS)],
)  # fmt: skip
def test_fields_that_change_nothing_at_their_value_are_taken(url, path, body, more):
    asked = []
    for fields in ({}, NEUTRAL | more):
        answer = HTTP.post(f"{url}/v1/{path}", json=body | {"seed": 1} | fields)
        assert answer.status_code == 200, answer.text
        asked.append((SERVICE.requests[-1], answer.json()["choices"]))
    assert asked[0] == asked[1]


@pytest.mark.parametrize("fields, schema", [
    ({"guided_json": {"type": "integer"}}, {"type": "integer"}),
    ({"guided_json": '{"type": "integer"}'}, {"type": "integer"}),
    ({"guided_json": {}}, {}),
    ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ({"guided_regex": "[0-9]+"}, None),
    ({"guided_choice": ["1", "7"], "guided_decoding_backend": "guidance"}, None),
    ({"guided_grammar": "start: /[0-9]/"}, None),
])  # fmt: skip
def test_vllms_older_fields_of_formats(client, fields, schema):
    assert complete(client, "7", extra_body=fields).choices[0].text == "7"
    constraint = SERVICE.requests[-1].constraint
    if schema is not None:
        assert json.loads(constraint.json_schema) == schema
    assert bool(constraint.regex) == ("guided_regex" in fields or "guided_choice" in fields)
    assert constraint.grammar == fields.get("guided_grammar")


def test_any_int64_is_a_seed(client):
    seeds = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, -1, -(2**32), 2**63 - 1, -(2**63)]
    for seed in [*seeds, *seeds]:
        complete(client, "a", seed=seed)
    drawn = [request.seed for request in SERVICE.requests[-2 * len(seeds) :]]
    assert drawn[: len(seeds)] == drawn[len(seeds) :] and len({*drawn}) == len(seeds)
    assert drawn[:3] == seeds[:3] and all(0 <= seed < 2**32 for seed in drawn)


def test_as_many_stops_as_harnesses_send(client):
    stops = ["Question:", "Q:", "</s>", "<|im_end|>", "\n\n", "?"]
    assert complete(client, "so\n\nQ: b", stop=stops).choices[0].text == "so"


def test_end_tokens_that_are_ignored_and_special_ones_that_are_shown():
    service = Scripted(lambda request: [97, 256, EOS, 98, 99])
    with served(service, tokenizer=byte_tokenizer()) as (url, _, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as own:

            def text(**fields):
                fields = {"stop_token_ids": [99]} | fields
                found = own.completions.create(
                    model="bytes", prompt=[256, 65], echo=True, extra_body=fields
                )
                return found.choices[0].text

            assert text(ignore_eos=True) == "Aab"
            shown = text(ignore_eos=True, skip_special_tokens=False)
            assert shown == f"<|im_start|>Aa<|im_start|>{END}b"
            assert service.requests[-1].options.stop == (99,)
            assert text() and set(service.requests[-1].options.stop) == {EOS, 99}


@pytest.mark.parametrize(
    "template, effort, variables",
    [("{{ reasoning_effort }}{{ enable_thinking }}", "high", "high"),
     ("{{ reasoning_effort }}", "none", "none"),
     ("{{ enable_thinking }}", "none", "False"), ("{{ enable_thinking }}", "low", "True"),
     ("{{ other }}", "none", ""), ("{{ other }}", "medium", "")],
)  # fmt: skip
def test_reasoning_effort_is_the_templates(template, effort, variables):
    model = ServedModel("bytes", SERVICE, byte_tokenizer(f"[{template}]"), 260, (EOS,))
    body = {"messages": [USER], "reasoning_effort": effort}
    parsed = parse_chat(body, model, ServerLimits())
    assert bytes(parsed.prompts[0].tokens) == f"[{variables}]".encode()
    parsed = parse_chat(body | {"chat_template_kwargs": {"other": "x"}}, model, ServerLimits())
    assert ("x" in bytes(parsed.prompts[0].tokens).decode()) == ("other" in template)


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_beside_tools_is_that_of_the_text(client, stream):
    fields = {"tools": [TOOL], "response_format": FORMAT}
    found = {}
    for said in (CALL, '{"a": 7}'):
        if stream:
            parts = [c.choices[0] for c in chat(client, said, **fields, stream=True)]
            text = "".join(part.delta.content or "" for part in parts)
            calls = [call for part in parts for call in part.delta.tool_calls or []]
            found[said] = text, calls, parts[-1].finish_reason
        else:
            choice = chat(client, said, **fields).choices[0]
            message = choice.message
            found[said] = message.content or "", message.tool_calls or [], choice.finish_reason
    assert found['{"a": 7}'] == ('{"a": 7}', [], "stop")
    text, [call], finish = found[CALL]
    assert not text and call.function.name == "add" and finish == "tool_calls"
    # Where a call is forced there is no text that could have a format.
    chat(client, CALL, **fields, tool_choice="required")
    assert "%json" in SERVICE.requests[-1].constraint.grammar
    assert '"a": {"type": "integer"' not in SERVICE.requests[-1].constraint.grammar


def test_token_ids_of_a_chats_prompt_stand_at_the_top_too(client):
    body = {"return_token_ids": True}
    found = chat(client, "ab", extra_body=body)
    assert found.prompt_token_ids == found.choices[0].prompt_token_ids
    assert found.prompt_token_ids == list(SERVICE.requests[-1].prompt)
    first, *rest = chat(client, "ab", extra_body=body, stream=True)
    assert first.prompt_token_ids == found.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in rest)
    assert not hasattr(chat(client, "ab"), "prompt_token_ids")


def test_the_version(url):
    assert HTTP.get(f"{url}/version").json() == {"version": hjax.__version__}


@pytest.mark.parametrize("origins", [("*",), ("https://a.example", "http://localhost:3000"), ()])
def test_web_pages_of_these_origins_may_ask(origins):
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    service = scripted()
    limits = ServerLimits(origins=origins)
    with served(service, limits, key="k", tokenizer=byte_tokenizer()) as (url, _, _):
        url = f"{url}/v1/completions"
        before = HTTP.options(url, headers=asked)
        refused = HTTP.post(url, headers={"Origin": asked["Origin"]}, json={})
        other = HTTP.options(url, headers=asked | {"Origin": "https://b.example"})
    allowed = "Access-Control-Allow-Origin"
    assert refused.status_code == 401
    if not origins:
        assert before.status_code == 401 and allowed not in refused.headers
        return
    assert before.status_code == 200
    assert "authorization" in before.headers["Access-Control-Allow-Headers"].lower()
    for answer in (before, refused):  # a page reads why it was refused, too
        assert answer.headers[allowed] in ("*", asked["Origin"])
    assert (allowed in other.headers) == (origins == ("*",))


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this server has bytes"):
        client.completions.create(model="other", prompt="a")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_said_and_ends_the_server(stream):
    service = Scripted(lambda request: [])
    with served(service, tokenizer=byte_tokenizer()) as (url, server, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as own:
            with pytest.raises(openai.APIError, match="the script is empty") as caught:
                list(own.completions.create(model="bytes", prompt="a", stream=stream))
            assert stream or caught.value.status_code == 500
        wait_until(lambda: not answers(url))
        assert server.failure == "the script is empty"


def test_a_model_without_tokenizer_takes_and_gives_ids():
    with served(scripted()) as (url, _, _):
        body = {"prompt": [*b"say:ab"], "return_token_ids": True, "logprobs": 0}
        [choice] = HTTP.post(f"{url}/v1/completions", json=body).json()["choices"]
        assert choice["text"] == "" and choice["token_ids"] == [97, 98, EOS]
        assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98", f"token_id:{EOS}"]
        for path, wrong in [
            ("completions", {"prompt": "text"}),
            ("completions", {"prompt": [1], "stop": "a"}),
            ("chat/completions", {"messages": [USER]}),
        ]:
            answer = HTTP.post(f"{url}/v1/{path}", json=wrong)
            assert answer.status_code == 400 and "no tokenizer" in answer.text


@pytest.mark.parametrize(
    "template, fields, why",
    [(None, {}, "no chat template"), ("{{ messages }}", {"tools": [TOOL]}, "no place for them"),
     ("{{ tools }}", {"tools": [TOOL], "tool_choice": "required"}, "does not say how calls"),
     ("{{ tools }}", {"tools": [TOOL], "parallel_tool_calls": False}, "does not say how calls"),
     ("{{ tools }}<tool_call><function=f><parameter=a></parameter></function></tool_call>",
      {"tools": [TOOL], "tool_choice": "required"}, "calls written in tags"),
     ("{{ raise_exception('roles must alternate') }}", {}, "roles must alternate")],
)  # fmt: skip
def test_chat_templates_that_do_not_do(template, fields, why):
    with served(scripted(), tokenizer=byte_tokenizer(template)) as (url, _, _):
        answer = HTTP.post(f"{url}/v1/chat/completions", json={"messages": [USER]} | fields)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]
