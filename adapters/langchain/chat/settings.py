"""The settings of a chat model, and what follows from them without a request.

Responsibility: constructor arguments, their ranges, serialization, and the node of a call.

Invariants: an unknown argument is an error; every sampling field of a program is a setting, also
one that is not declared here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    model_validator,
)

from conure.server.program.ir import Json, Sampling

from ...arguments import check_arguments
from ...client import AsyncClient, Client
from ...client.client_cache import ModelClients
from ...client.exchange.models import find_named
from .call_options import constraint_of, sampling_of, tools_of
from .model_info import ServerProfile
from .sampling_fields import with_sampling_fields

SAMPLING_FIELDS: Final = (*Sampling.__struct_fields__, "top_logprobs")
"""Settings that are sent with every call, unless the call overrides them."""


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


if TYPE_CHECKING:
    _SampledChatModel = BaseChatModel
else:
    _SampledChatModel = with_sampling_fields(BaseChatModel, Sampling)


class ChatSettings(_SampledChatModel):
    """The settings of `ChatConure`."""

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, extra="forbid")

    model: str = Field(default="default", validation_alias=AliasChoices("model", "model_name"))
    """Name of a model on the server."""
    api_key: SecretStr | None = Field(
        default_factory=lambda: SecretStr(key) if (key := os.getenv("CONURE_API_KEY")) else None
    )
    """Bearer token for a proxy. Default: that of the environment variable CONURE_API_KEY. None: no
    token."""
    base_url: str | None = None
    """URL of the server. None: the environment variable CONURE_URL, else 127.0.0.1:8400."""
    client: Client | None = Field(default=None, exclude=True)
    """An open client, used instead of `base_url`. The model does not close it."""
    default_headers: dict[str, str] | None = Field(default=None, exclude=True, repr=False)
    """HTTP headers that are sent with every request, for example for a proxy."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """0 decodes greedily. None: 1."""
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    """Maximum length of an answer. None: the rest of the model's context."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Tokens before which an answer does not end."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most likely tokens with this total probability. None: 1."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this number of most likely tokens. None or 0: from all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Minimum probability of a token, relative to that of the most likely token."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    """Divides the logits of tokens that occurred. None: 1."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logits of tokens that occurred in the answer."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """The same, per occurrence."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of token ids."""
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = Field(
        default=None, validation_alias=AliasChoices("stop", "stop_sequences")
    )
    """Texts that end an answer and are not part of it."""
    stop_token_ids: list[int] | None = None
    """Tokens that end an answer."""
    ignore_eos: bool | None = None
    """Continue after the model's end token, up to `max_tokens`."""
    seed: int | None = Field(default=None, ge=0)
    """Makes sampling repeatable."""
    logprobs: bool | int | None = None
    """Report the log probability of each token, and of this number of alternatives."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Number of alternatives, if `logprobs` is True."""
    n: int | None = None
    """Number of answers per call, returned in `ChatResult.generations`. None: 1."""
    timeout: float | None = Field(
        default=None, gt=0, validation_alias=AliasChoices("timeout", "request_timeout")
    )
    """Seconds for one call, including the time in the queue. None: no limit."""
    max_retries: int = Field(default=4, ge=0)
    """Number of retries of a refused request (status 429, 502, 503, 504). A request that gets no
    answer is sent again for some seconds. 0 disables both."""
    streaming: bool = False
    """Whether `invoke` streams, too, for callbacks that receive tokens."""
    profile: Any = Field(default=None, exclude=True)
    """Capabilities of the model, a `ModelProfile`; read by LangChain since core 1.1. None: those of
    every Conure model, and the context length that the server reports when it is read."""

    _clients: ModelClients = PrivateAttr(default_factory=ModelClients)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            known: set[str] = set()
            for name, field in cls.model_fields.items():
                alias = field.validation_alias
                known |= {
                    name,
                    *(map(str, alias.choices) if isinstance(alias, AliasChoices) else ()),
                }
            check_arguments(given, known, "ChatConure")
        return given

    @model_validator(mode="after")
    def _set_profile(self) -> Self:
        self._bind_profile()
        return self

    def _bind_profile(self) -> None:
        # The profile of another object, which this one copies, describes that object's model.
        if self.profile is None or isinstance(self.profile, ServerProfile):
            self.profile = ServerProfile(self._max_input_tokens)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, with its own profile unless the profile was given.

        Args:
            update: fields of the copy, which are not validated.
            deep: copy the values of the fields, too.
        """
        copied = super().model_copy(update=update, deep=deep)
        copied._bind_profile()  # pydantic runs no validators for a copy
        return copied

    def _max_input_tokens(self) -> int | None:
        models = self.connection().models()
        found = find_named(models, self.model) or next(iter(models), None)
        return None if found is None else found.get("max_model_len")

    @property
    def _llm_type(self) -> str:
        return "conure"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True; the client and keys are not serialized."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the namespace in which `langchain_core.load` finds the class."""
        return ["conure", "adapters", "langchain"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that are serialized as the name of an environment variable."""
        return {"api_key": "CONURE_API_KEY"}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # Equal models of two servers share no cached answer.
        return f"{super()._get_llm_string(stop, **kwargs)}---{self.connection().server}"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, **self.sampling({})}

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Return the token counts of several calls together."""
        usage: dict[str, int] = {}
        combined: dict[str, Any] = {}
        for output in llm_outputs:
            combined.update(output or {})
            for name, count in (output or {}).get("token_usage", {}).items():
                usage[name] = usage.get(name, 0) + count
        return {**combined, "token_usage": usage} if combined else {}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings = self.sampling(kwargs, stop=stop, strict=False)
        params = LangSmithParams(
            ls_provider="conure",
            ls_model_name=str(kwargs.get("model", self.model)),
            ls_model_type="chat",
        )
        if "temperature" in settings:
            params["ls_temperature"] = settings["temperature"]
        if "max_tokens" in settings:
            params["ls_max_tokens"] = settings["max_tokens"]
        if settings.get("stop"):
            params["ls_stop"] = settings["stop"]
        return params

    def sampling(
        self, kwargs: Mapping[str, Any], *, stop: list[str] | None = None, strict: bool = True
    ) -> dict[str, Json]:
        """Return the sampling fields of one call; arguments of the call override the fields.

        Raises:
            ValueError: if `strict` and an argument of the call is unknown.
        """
        defaults = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return sampling_of(defaults, kwargs, stop=stop, strict=strict)

    def node(
        self,
        node_id: str,
        variable: str,
        messages: list[dict[str, Json]],
        kwargs: Mapping[str, Any],
        *,
        stop: list[str] | None = None,
        form: str = "message",
    ) -> dict[str, Json]:
        """Return the `generate` node of one call to this model.

        Raises:
            ValueError: if an argument of the call is unknown.
        """
        sampling = self.sampling(kwargs, stop=stop)
        return {
            "id": node_id,
            "op": "generate",
            "model": kwargs.get("model") or self.model,
            "messages": messages,
            "output": {"variable": variable, "as": form, **sampling, **constraint_of(kwargs)},
            **tools_of(kwargs),
        }

    def connection(self) -> Client:
        """Return the client that calls go through.

        Raises:
            ProgramError: `client.base_url` if the URL is invalid.
        """
        if self.client is not None:
            return self.client
        key = None if self.api_key is None else self.api_key.get_secret_value()
        headers = tuple(sorted((self.default_headers or {}).items()))
        return self._clients.client(
            self.base_url, self.max_retries, key, timeout_s=self.timeout, headers=headers
        )

    def async_connection(self) -> AsyncClient:
        """Return the client that awaited calls go through."""
        return self._clients.asynchronous(self.connection())
