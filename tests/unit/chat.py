"""A small real tokenizer and chat templates of the shapes that open models use."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CHATML = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else '' }}
# Tools
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
        {%- endif %}

<tool_response>
{{ message.content }}
</tool_response>
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
    {%- elif message.role != 'system' or not tools %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

KIMI = """{%- for message in messages %}
    {%- if message.role == 'tool' -%}
        <|im_system|>{{ message.name }}<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
    {%- else -%}
        <|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
]  # fmt: skip
MERELY_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Added tokens that the library does not call special; Qwen's are like that."""
CORPUS = ["def mean(values):\n    return sum(values) / len(values)\n\n\nassert mean([1, 2, 3]) == 2\n"] * 4


@functools.cache
def tokenizer_json() -> str:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MERELY_ADDED])
    return str(made.to_str())
