"""What a model writes is read as calls or as a mistake that it is told about; it never raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.rollout_agent.tokenizer import ByteTokenizer, HFTokenizer
from headway.rollout_agent.tool_formats import CALLS_MAX, FORMATS, Call, Malformed, ToolResult

from .chat import tokenizer_json

KIMI = "<|tool_call_begin|>functions.{0}:{1}<|tool_call_argument_begin|>{2}<|tool_call_end|>"


def hermes(name: str, arguments: object) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def coder(name: str, arguments: dict[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def kimi(*calls: tuple[str, object]) -> str:
    inner = "".join(KIMI.format(name, n, json.dumps(arguments)) for n, (name, arguments) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


VALID = {
    "hermes": "I look.\n" + hermes("read", {"path": "a.py"}) + "\n" + hermes("write", {"text": "</tool_call>{"}),
    "qwen3_coder": "I look." + coder("read", {"path": "a.py"}) + coder("write", {"text": "a\n\nb <c>"}),
    "kimi_k2": "I look." + kimi(("read", {"path": "a.py"}), ("write", {"text": "<|tool_call_end|>"})),
    "compact": "w x*2\n",
}


def test_calls_are_read_in_order() -> None:
    read, write = FORMATS["hermes"].parse(VALID["hermes"])  # type: ignore[misc]
    assert (read, write) == (
        Call(name="read", arguments={"path": "a.py"}),
        Call(name="write", arguments={"text": "</tool_call>{"}),
    )
    assert FORMATS["qwen3_coder"].parse(VALID["qwen3_coder"])[1].arguments == {"text": "a\n\nb <c>"}  # type: ignore[index]
    assert FORMATS["kimi_k2"].parse(VALID["kimi_k2"]) == (
        Call(name="read", arguments={"path": "a.py"}, id="functions.read:0"),
        Call(name="write", arguments={"text": "<|tool_call_end|>"}, id="functions.write:1"),
    )
    assert FORMATS["compact"].parse("w x*2\n") == (Call(name="w", arguments={"expression": "x*2"}),)
    assert FORMATS["compact"].parse("t\n") == (Call(name="t"),)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2"])
def test_words_alone_and_thoughts_about_calls_are_no_calls(name: str) -> None:
    assert FORMATS[name].parse("I am done.") == ()
    assert FORMATS[name].parse(f"<think>{VALID[name]}</think>I am done.") == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>{'name': 'read'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "read", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>["read"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "read", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "read", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "read", "arguments": {"x": "\\ud800"}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"x": ' + "1" * 10_000 + "}</tool_call>"),
        ("hermes", hermes("read", {}) * (CALLS_MAX + 1)),
        ("qwen3_coder", hermes("read", {})),
        ("qwen3_coder", "<tool_call><function=read><parameter=path>a</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=read></function>"),
        ("kimi_k2", "<|tool_call_begin|>read<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.read:0{}<|tool_call_end|>"),
        ("kimi_k2", KIMI.format("read", 0, "[]")),
        ("compact", "x\n"),
        ("compact", "r"),
        ("compact", "w \ud800\n"),
    ],
)
def test_a_mistake_is_named_and_not_repeated(name: str, text: str) -> None:
    found = FORMATS[name].parse(text)
    assert isinstance(found, Malformed)
    assert found.why.isascii()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_nothing_that_is_written_raises(name: str, data: st.DataObject) -> None:
    valid = VALID[name]
    marks = st.sampled_from(
        ["<tool_call>", "</tool_call>", "{", "}", '"', "<function=", ">", "functions.a:0", "\\ud800", "NaN"]
    )
    damaged = st.tuples(st.integers(0, len(valid)), st.integers(0, 9), st.one_of(st.text(max_size=5), marks)).map(
        lambda cut: valid[: cut[0]] + cut[2] + valid[cut[0] + cut[1] :]
    )
    text = data.draw(st.one_of(st.text(), damaged, st.lists(marks).map("".join)))
    found = FORMATS[name].parse(text)
    if not isinstance(found, Malformed):
        assert all(isinstance(call, Call) and call.name for call in found)
        json.dumps([call.arguments for call in found], ensure_ascii=False).encode()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=30))
def test_no_ids_raise(ids: list[int]) -> None:
    for made in (HFTokenizer(tokenizer_json()), ByteTokenizer()):
        text = made.decode([t for t in ids if t < made.vocab_size])
        for format_ in FORMATS.values():
            format_.parse(text)


def test_results_go_back_under_their_calls() -> None:
    call = Call(name="read", id="functions.read:0")
    [message] = FORMATS["kimi_k2"].render([ToolResult(call=call, text="x", ok=True)])
    assert (message.role, message.content, message.name, message.call_id) == ("tool", ("x",), "read", call.id)
    [line] = FORMATS["compact"].render([ToolResult(call=Call(name="t"), text="pass", ok=True)])
    assert line.content == ("pass\n>",)
