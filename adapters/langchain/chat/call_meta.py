"""Identifiers that LangChain and LangGraph give a call, for the `meta` of its node.

LangChain passes the run of a call to `_generate`, but not to `_stream`. `CallRun` therefore keeps
the identifiers of the current call in the context while LangChain starts the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    CallbackManagerForLLMRun,
)
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs

from conure.server.program.ir import Json

from ...speculation.active_run import ActiveRunVar

THREAD_PREFIX: Final = "thread "
"""Prefix of sessions that the app names."""
MAX_SESSION_CHARS: Final = 256

_META_FIELDS: Final = (
    "thread_id",
    "langgraph_node",
    "langgraph_step",
    "langgraph_checkpoint_ns",
)


def meta_of(metadata: Mapping[str, Any], **ids: Any) -> dict[str, Json]:
    """Return LangChain's and LangGraph's metadata of a call, for the node's `meta`.

    Args:
        metadata: metadata of the LangChain run.
        ids: run ids.
    """
    meta = {name: metadata[name] for name in _META_FIELDS if name in metadata}
    meta |= {name: str(value) for name, value in ids.items() if value is not None}
    return {k: v if isinstance(v, str | int) else str(v) for k, v in meta.items()}


def session_of(meta: Mapping[str, Json] | None) -> str | None:
    """Return the session that the app names for a call through `thread_id`, if any.

    Args:
        meta: result of `meta_of` for the call.
    """
    thread = str((meta or {}).get("thread_id", ""))
    return f"{THREAD_PREFIX}{thread}"[:MAX_SESSION_CHARS] if thread else None


def session_of_run(config: RunnableConfig) -> str | None:
    """Return the session that the app names for a run of a chain through `thread_id`, if any.

    Args:
        config: complete config of the run, from `ensure_config`.
    """
    fields = (config.get("metadata", {}), config.get("configurable", {}))
    thread = next((each["thread_id"] for each in fields if "thread_id" in each), None)
    return None if thread is None else session_of({"thread_id": thread})


class CallRun(BaseCallbackHandler):
    """The identifiers of the LangChain run of one call.

    A call that LangChain starts with a run manager has them at once. Another call gets them as a
    callback (`add_to`), when LangChain starts its run.
    """

    run_inline = True
    """LangChain calls the handler before the model, also in async code."""

    def __init__(
        self, manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None
    ) -> None:
        self.meta: dict[str, Json] | None = None
        """None: unknown."""
        if manager is not None:
            self.meta = meta_of(
                manager.metadata, run_id=manager.run_id, parent_run_id=manager.parent_run_id
            )

    @property
    def ignore_llm(self) -> bool:
        """Return True: tokens are not reported to this handler."""
        return True

    def on_chat_model_start(
        self,
        *args: Any,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the identifiers of the run."""
        self.meta = meta_of(metadata or {}, run_id=run_id, parent_run_id=parent_run_id)

    def add_to(self, config: RunnableConfig | None) -> RunnableConfig:
        """Return a config of a call with this callback, and else equal to `config`."""
        given = ensure_config(config)
        merged = merge_configs({"callbacks": given.get("callbacks")}, {"callbacks": [self]})
        return {**given, "callbacks": merged.get("callbacks")}

    def active(self) -> AbstractContextManager[None]:
        """Make this the run of the calls that start within the block."""
        return _CURRENT.activate(self)


_CURRENT: Final = ActiveRunVar[CallRun]("conure_call_run")


def current_meta() -> dict[str, Json] | None:
    """Return the `meta` of the call that LangChain is starting; None if it is unknown."""
    current = _CURRENT.get()
    return None if current is None else current.meta
