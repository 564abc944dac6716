"""The gateway that answers agents: identity, sampling, retries, streams, ends and errors."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from agents_double import asked, user
from serving_double import byte_tokenizer, wait_until

from hjax.agents import answer as answers
from hjax.agents.call_tree import CallTree
from hjax.agents.gateway import Gateway
from hjax.agents.session import Session
from hjax.environments.episode import DrawnTurn, EpisodeLimits
from hjax.environments.episode_text import ObservationEncoder
from hjax.serving.served_model import ServedModel

EOS = 257
LIMITS = EpisodeLimits(turns=64, turn_tokens=0, prompt_tokens=512, response_tokens=512)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


class Policy:
    """Answers what waits, by a script of texts; ``hold`` keeps it from drawing."""

    def __init__(self, **options):
        tokenizer = byte_tokenizer()
        self.encoder = ObservationEncoder(tokenizer, chat=True)
        self.gateway = Gateway(ServedModel("", None, tokenizer, 258, (EOS,)), **options)
        self.sessions, self.texts, self.requests = [], [], []
        self.hold, self.ended = threading.Event(), False
        self.hold.set()
        threading.Thread(target=self.draw, daemon=True).start()

    def draw(self):
        while not self.ended:
            self.gateway.queue.wait(lambda asking: bool(asking) or self.ended)
            self.hold.wait()
            for turn in self.gateway.queue.take(self.sessions):
                request = turn.request(0)
                self.requests.append(request)
                text = self.texts.pop(0) if self.texts else f"said {len(self.requests)}"
                tokens = [*text.encode(), EOS][: request.max_tokens]
                logs = [-0.5] * len(tokens)
                named = {"logprobs": logs, "policy_logprobs": logs}
                forced = [i % 2 == 0 for i in range(len(tokens))] if request.constraint else []
                failed = text if text.startswith(("constraint: ", "cancelled")) else ""
                turn.deliver(DrawnTurn(tokens, named, tokens[-1] == EOS, forced, failed))

    @contextlib.contextmanager
    def session(self, **options):
        limits = options.pop("limits", LIMITS)
        session = Session(len(self.sessions), CallTree(self.encoder, limits), **options)
        url = self.gateway.open(session)
        self.sessions.append(session)
        yield session, url
        self.hold.set()
        self.gateway.close(session)


@contextlib.contextmanager
def a_policy(**options):
    made = Policy(**options)
    yield made
    made.ended = True
    made.gateway.queue.notify()
    made.gateway.shut_down()


@pytest.fixture(scope="module")
def policy():
    with a_policy() as made:
        yield made


def refused(url, key, **body):
    """The status and the error of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        asked(url, key, **body)
    return caught.value.code, json.loads(caught.value.read())["error"]


def test_an_answer_has_what_was_drawn_and_is_recorded(policy):
    with policy.session() as (session, url):
        policy.texts = ["hm"]
        found = asked(url, session.key, messages=[user("a")], temperature=0.1, model="gpt-x")
        [call] = session.tree.calls
    [choice] = found["choices"]
    assert choice["message"]["content"] == "hm" and choice["finish_reason"] == "stop"
    assert call.drawn.tokens == [*b"hm", EOS] and call.drawn.logprobs["logprobs"] == [-0.5] * 3
    assert call.asked == {"temperature": 0.1}
    usage = found["usage"]
    assert usage["completion_tokens"] == 3 and usage["prompt_tokens"] == len(call.place.prompt)
    assert isinstance(usage["completion_tokens_details"], dict)
    assert isinstance(usage["prompt_tokens_details"], dict)


def test_tool_calls_come_back_and_the_conversation_goes_on(policy):
    with policy.session() as (session, url):
        policy.texts = [CALL, "seven"]
        first = asked(url, session.key, messages=[user("a")], tools=[TOOL], tool_choice="required")
        message = first["choices"][0]["message"]
        assert message["content"] is None and first["choices"][0]["finish_reason"] == "tool_calls"
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 3}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
        asked(url, session.key, messages=[user("a"), message, result], tools=[TOOL])
        one, two = session.tree.calls
    assert two.place.parent == 0 and two.place.prompt[: len(one.ids)] == one.ids
    assert one.asked == {"tool_choice": "required"}


def test_n_answers_are_siblings_with_draws_of_their_own(policy):
    with policy.session() as (session, url):
        found = asked(url, session.key, messages=[user("a")], n=2)
        asked(url, session.key, messages=[user("a")])
        assert [each["index"] for each in found["choices"]] == [0, 1]
        assert [call.place.parent for call in session.tree.calls] == [None] * 3
    assert len({request.episode for request in policy.requests[-3:]}) == 3


def test_a_chain_stays_in_its_branch_and_another_begins_one(policy):
    with policy.session() as (session, url):
        first = asked(url, session.key, messages=[user("a")])["choices"][0]["message"]
        for text in ("b", "c"):
            asked(url, session.key, messages=[user("a"), first, user(text)])
        one, two, other = policy.requests[-3:]
        calls = session.tree.calls
    assert one.episode == two.episode == session.number and one.first_draw == 0
    assert two.first_draw == len(calls[1].place.prompt) - len(calls[0].place.prompt)
    assert other.episode != session.number and other.first_draw == 0


def test_r7_answers_are_cut_to_the_room_and_stop_strings_hold(policy):
    limits = EpisodeLimits(turns=9, turn_tokens=0, prompt_tokens=512, response_tokens=20)
    with policy.session(limits=limits) as (session, url):
        asked(url, session.key, messages=[user("a")], max_tokens=64000, stop=["x"])
    assert policy.requests[-1].max_tokens == 20 and policy.requests[-1].stop == ("x",)


def test_r7_constrained_enforces_what_is_asked_and_tells_what_had_no_choice():
    """A form that is invalid is refused by name; an answer that cannot match is no call."""
    pytest.importorskip("llguidance")
    with a_policy(constrained=True) as policy, policy.session() as (session, url):
        policy.texts = [CALL]
        said = {"messages": [user("a")], "tools": [TOOL]}
        asked(url, session.key, **said, tool_choice="required", temperature=0.3)
        [call], [request] = session.tree.calls, policy.requests
        assert request.constraint.grammar and call.asked == {"temperature": 0.3}
        assert list(call.drawn.forced) == [i % 2 == 0 for i in range(len(call.drawn.tokens))]
        policy.texts = ["constraint: it grew"]
        assert refused(url, session.key, **said, tool_choice="required")[0] >= 400
        code, error = refused(url, session.key, messages=[user("a")], guided_regex="(")
        assert code == 400 and "guided_regex" in error["message"]
        asked(url, session.key, messages=[user("a")])
        assert policy.requests[-1].constraint is None and len(session.tree.calls) == 2


def test_r10_a_retry_joins_or_replays_and_the_same_body_alone_is_a_new_sample(policy):
    with policy.session() as (session, url):
        policy.hold.clear()
        found = []

        def ask(count):
            headers = {"x-stainless-retry-count": str(count)}
            found.append(asked(url, session.key, headers, messages=[user("a")]))

        threads = [threading.Thread(target=ask, args=(count,)) for count in (0, 1)]
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        policy.hold.set()
        for thread in threads:
            thread.join()
        ask(2)
        assert len(session.tree.calls) == 1 and session.counts["retries"] == 2
        assert found[0]["choices"] == found[1]["choices"] == found[2]["choices"]
        ask(0)
        assert len(session.tree.calls) == 2
        assert found[3]["choices"] != found[0]["choices"]


@pytest.mark.parametrize("count", ["1", "0", "a"])
def test_r10_a_retry_of_a_call_that_failed_with_503_is_drawn_anew_and_is_one_call(policy, count):
    with policy.session(most_calls=1) as (session, url):
        policy.texts = ["cancelled", "second"]
        said = {"messages": [user("a")]}
        status, error = refused(url, session.key, **said)
        assert status == 503 and error["code"] is None and not session.tree.calls
        found = asked(url, session.key, {"x-stainless-retry-count": count}, **said)
        assert found["choices"][0]["message"]["content"] == "second"
        [call] = session.tree.calls  # within the limit of one call: the failed one is not counted
        assert call.text == "second" and call.place.parent is None
        assert session.counts == {"retries": 0, "abandoned": 0} and not session.running


def test_r10_an_answer_that_nobody_got_is_no_call(policy, monkeypatch):
    monkeypatch.setattr(answers, "RETRY_SECONDS", 0.2)
    with policy.session() as (session, url):
        policy.hold.clear()
        request = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps({"messages": [user("a")]}).encode(),
            {"Authorization": f"Bearer {session.key}"},
        )
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(request, timeout=1.0)
        wait_until(lambda: session.counts["abandoned"] == 1)
        policy.hold.set()
        asked(url, session.key, messages=[user("b")])
        [call] = session.tree.calls
    assert call.place.chat.messages[-1]["content"] == "b"


def test_r11_a_stream_has_the_same_answer_in_parts_after_it_is_recorded(policy, monkeypatch):
    monkeypatch.setattr(answers, "KEEPALIVE_SECONDS", 0.05)
    with policy.session() as (session, url):
        policy.texts = [f"so {CALL}"]
        policy.hold.clear()
        threading.Timer(0.5, policy.hold.set).start()
        text = asked(
            url, session.key, messages=[user("a")], stream=True, tools=[TOOL],
            stream_options={"include_usage": True},
        )  # fmt: skip
        assert len(session.tree.calls) == 1
    events = [line for line in text.split("\n\n") if line]
    assert events[0] == ": keepalive" and events[-1] == "data: [DONE]"
    chunks = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    first, last, usage = chunks
    delta = first["choices"][0]["delta"]
    assert delta["role"] == "assistant" and delta["content"] == "so "
    assert delta["tool_calls"][0]["index"] == 0
    assert last["choices"][0]["finish_reason"] == "tool_calls" and not usage["choices"]
    assert usage["usage"]["completion_tokens"] > 0


def test_r12_a_session_at_its_limit_is_told_so_in_plain_words_and_then_refused(policy):
    with policy.session(most_calls=1) as (session, url):
        asked(url, session.key, messages=[user("a")])
        for _ in range(3):
            found = asked(url, session.key, messages=[user("b")])
            assert "limit of 1 calls" in found["choices"][0]["message"]["content"]
            assert found["choices"][0]["finish_reason"] == "stop"
        code, error = refused(url, session.key, messages=[user("b")])
        assert (code, error["code"]) == (400, "context_length_exceeded")
        assert len(session.tree.calls) == 1 and session.ended_by == "max_turns"


def test_r12_a_conversation_without_room_ends_so(policy):
    limits = EpisodeLimits(turns=9, turn_tokens=0, prompt_tokens=64, response_tokens=64)
    with policy.session(limits=limits) as (session, url):
        found = asked(url, session.key, messages=[user("a" * 150)])
        assert "no room left" in found["choices"][0]["message"]["content"]
        assert session.ended_by == "context" and not session.tree.calls
        asked(url, session.key, messages=[user("a" * 60000)])
        assert not session.tree.calls


def test_r12_an_ended_session_answers_nothing(policy):
    with policy.session() as (session, url):
        session.sealed = True
        assert refused(url, session.key, messages=[user("a")])[0] == 400
    assert refused(url, session.key, messages=[user("a")])[0] == 401


def test_r13_path_and_key_must_both_be_the_sessions(policy):
    with policy.session() as (session, url), policy.session() as (other, other_url):
        assert refused(url, other.key, messages=[user("a")])[0] == 401
        assert refused(other_url, session.key, messages=[user("a")])[0] == 401
        assert refused(url, "", messages=[user("a")])[0] == 401
        assert refused(url.replace("/s/", "/t/"), session.key, messages=[user("a")])[0] == 401
        models = urllib.request.Request(
            f"{url}/models", headers={"Authorization": f"Bearer {session.key}"}
        )
        assert json.load(urllib.request.urlopen(models))["data"][0]["id"] == "policy"
        for path in ("reward", "reward_info", "seal", "rl/set_reward", "export", "../../admin"):
            request = urllib.request.Request(
                f"{url}/{path}", b"{}", {"Authorization": f"Bearer {session.key}"}
            )
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request)
            assert caught.value.code in (401, 404)
        assert not session.tree.calls and not other.tree.calls


def test_r13_calls_of_a_session_that_run_together_are_bounded(policy):
    with policy.session(concurrent=2) as (session, url):
        policy.hold.clear()
        threads = [
            threading.Thread(target=asked, args=(url, session.key), kwargs={"messages": [user(t)]})
            for t in "ab"
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: session.running == 2)
        code, error = refused(url, session.key, messages=[user("c")])
        assert code == 429 and error["type"] == "rate_limit_error"
        policy.hold.set()
        for thread in threads:
            thread.join()
    assert len(session.tree.calls) == 2


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": "a"}], "unknown": 3}, "unknown"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 0}, "n"),
    ],
)
def test_r15_what_cannot_be_answered_is_refused_by_name_with_400(policy, body, named):
    with policy.session() as (session, url):
        code, error = refused(url, session.key, **body)
        assert code == 400 and named in error["message"] and not session.tree.calls


def test_openais_own_client_streams_calls_tools_and_retries(policy):
    """Its time-out retries join the first request; a dead end and a tool loop are as recorded."""
    openai = pytest.importorskip("openai")
    with policy.session() as (session, url):
        client = openai.OpenAI(base_url=url, api_key=session.key, max_retries=2)
        policy.texts = [CALL, "seven"]
        policy.hold.clear()
        threading.Timer(1.5, policy.hold.set).start()
        messages = [user("a")]
        first = client.with_options(timeout=0.5).chat.completions.create(
            model="any", messages=messages, tools=[TOOL], temperature=0.2
        )
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
        messages += [message, result]
        with client.chat.completions.stream(model="any", messages=messages, tools=[TOOL]) as s:
            for _ in s:
                pass
            assert s.get_final_completion().choices[0].message.content == "seven"
        one, two = session.tree.calls
        assert session.counts["retries"] >= 1 and two.place.parent == 0
        assert one.drawn.tokens == [*CALL.encode(), EOS]
        assert client.models.list().data[0].id == "policy"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="other").models.list()
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="any", input="a")


def test_the_responses_api_is_the_same_conversation_in_another_form(policy):
    openai = pytest.importorskip("openai")
    with policy.session() as (session, url):
        client = openai.OpenAI(base_url=url, api_key=session.key)
        policy.texts = [f"so {CALL}", "seven", "eight"]
        tools = [{"type": "function", "name": "add", "parameters": {}, "strict": True}]
        items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
        said = {"model": "any", "instructions": "be", "tools": tools}
        first = client.responses.create(input=items, **said)
        text, call = first.output
        assert first.output_text == "so " and json.loads(call.arguments) == {"a": 3}
        items += [each.model_dump() for each in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "7"})
        with client.responses.stream(input=items, **said) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "seven"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        one, two = session.tree.calls
        assert two.place.parent == 0 and one.asked == {"strict": True}
        for wrong in ({"previous_response_id": "r"}, {"tools": [{"type": "web_search"}]}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                client.responses.create(input="a", model="any", **wrong)
