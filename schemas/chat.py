"""How a run's model is spoken to, as one digest: its tokenizer, chat template and tool format.

The genesis holds it. Under other ones the same run would go on with prompts that its model was never trained on, and
nothing else would tell: the folder that the configuration names is only a path.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgpack

from headway.schemas.config import Config
from headway.schemas.errors import ConfigError
from headway.schemas.wire import digest_of

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""What prompts are made by. All but the first may be missing."""
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
"""For the byte vocabulary, which has no folder."""


def chat_digest(config: Config) -> str:
    """SHA-256 of what prompts are made by and calls are read by. Raises ConfigError where the folder cannot be read."""
    folder = config.agent.tokenizer
    made_by = [[name, _file_digest(Path(folder) / name)] for name in FILES] if folder else PLAIN_TEMPLATE
    return digest_of(msgpack.packb([config.agent.tool_format, made_by]))


def require_same_chat(recorded: str, config: Config) -> None:
    """Raise ConfigError unless this machine speaks to the model as the run's genesis recorded; "" recorded nothing."""
    if not recorded or (here := chat_digest(config)) == recorded:
        return
    raise ConfigError(
        "the chat template, tokenizer or tool format is not the one that the run began with",
        why=f"{config.agent.tokenizer or 'the byte vocabulary'} has digest {here[:12]}, the genesis {recorded[:12]}",
        hint=f"copy the run's own {', '.join(FILES)} here, or give the run another name",
    )


def _file_digest(path: Path) -> str:
    """Empty for a missing file, except for the one that there must be."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.name != FILES[0]:
            return ""
        raise ConfigError(
            f"cannot read {path}", why=str(error)[:200], hint="agent.tokenizer names the folder, on the trainer too"
        ) from None
