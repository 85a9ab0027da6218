"""Who answers a request: the base, an adapter version, or a weighted sum of several."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace

from adapters.errors import AdapterUnavailable
from adapters.manifest import AdapterRef, WeightedAdapter
from api.errors import BadRequest, Missing
from api.schemas import Sampling
from api.services import Services
from base_engine.request import SamplingParams
from base_engine.tokenizer import ChatTokenizer
from registry.errors import Conflict, NotFound
from registry.routing import resolve


@dataclass(frozen=True)
class Target:
    """`adapters` is empty for the base. `names` are `name@version`, one for each adapter.

    `vocab_size` bounds the token ids of prompts; `own_template` says that the chat template is the
    adapter's, which takes a while to render.
    """

    adapters: tuple[WeightedAdapter, ...]
    salt: str
    tokenizer: ChatTokenizer
    vocab_size: int
    own_template: bool = False

    @property
    def answered_by(self) -> str:
        return " + ".join(map(_shown, self.adapters)) or "base"

    @property
    def fingerprint(self) -> str:
        if not self.adapters:
            return "fp_base"
        if self._single and not self.adapters[0].ref.manifest.speaks:
            return "fp_" + self.adapters[0].ref.digest[:16]
        parts = sorted(
            f"{item.ref.digest}*{item.weight!r}{item.ref.manifest.speech}" for item in self.adapters
        )
        return "fp_" + hashlib.sha256("+".join(parts).encode()).hexdigest()[:16]

    @property
    def headers(self) -> dict[str, str]:
        """Which versions answer, for the response."""
        if not self.adapters:
            return {}
        if not self._single:
            return {"x-lorikeet-adapters": ", ".join(map(_shown, self.adapters))}
        ref = self.adapters[0].ref
        return {
            "x-lorikeet-adapter-version": ref.name.rpartition("@")[2],
            "x-lorikeet-adapter-digest": ref.digest,
        }

    def sampling(self, body: Sampling, room: int, choice: int) -> SamplingParams:
        """The sampling parameters of choice number `choice`, with `room` tokens left.

        What ends an answer of the adapter's own tokenizer ends it too.
        """
        params = body.sampling(room, choice)
        ends = {token for item in self.adapters for token in item.ref.manifest.eos_ids}
        if not ends or params.ignore_eos:
            return params
        return replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(ends)))

    @property
    def _single(self) -> bool:
        return len(self.adapters) == 1 and self.adapters[0].weight == 1.0


async def find_target(services: Services, tenant: str, body: Sampling) -> Target:
    """Who `body` asks for; the adapters begin to load.

    Raises NotFound, WrongBase, Conflict, AdapterUnavailable, BadRequest.
    """
    engine = services.engine
    adapters: tuple[WeightedAdapter, ...]
    if body.adapters is None:
        single = find_adapter(services, tenant, body.model)
        adapters = (WeightedAdapter(single),) if single is not None else ()
    else:
        adapters = _weighted(services, tenant, body)
    for item in adapters:
        engine.prefetch(item.ref)
    manifest = adapters[0].ref.manifest if len(adapters) == 1 else None
    if manifest is None or not manifest.speaks:
        vocab_size = max([engine.base.vocab_size, *(a.ref.manifest.vocab_size for a in adapters)])
        return Target(adapters, tenant, engine.tokenizer, vocab_size)
    if not services.settings.may_bring_tokenizer(tenant):
        raise Conflict(
            f"{adapters[0].ref.name} was uploaded with tokens or a chat template of its own, which "
            "this server does not allow any more (--adapter-tokenizers)."
        )
    # Made when first asked for, which takes a second or two where the vocabulary is large.
    tokenizer = await asyncio.to_thread(engine.tokenizer.for_adapter, manifest)
    return Target(
        adapters,
        tenant,
        tokenizer,
        manifest.vocab_size or engine.base.vocab_size,
        own_template=manifest.chat_template is not None,
    )


def find_adapter(services: Services, tenant: str, model: str) -> AdapterRef | None:
    """The adapter version that `model` names, None for the base."""
    route = resolve(services.store.snapshot, tenant, model, services.engine.base)
    if route.adapter is None or route.version is None:
        return None
    try:
        folder = services.blobs.open(route.version.digest)
    except NotFound as error:
        raise AdapterUnavailable(str(error)) from error
    name = f"{route.adapter.name}@{route.version.number}"
    return AdapterRef(route.version.digest, name, folder, route.version.manifest)


def find_summand(services: Services, tenant: str, name: str, where: str) -> AdapterRef:
    """The adapter version `name` in the list entry `where`. Raises Missing, BadRequest, and what
    `find_adapter` does."""
    try:
        ref = find_adapter(services, tenant, name)
    except NotFound as error:
        raise Missing(str(error), f"{where}.name", "model_not_found") from None
    if ref is None:
        raise BadRequest(f"{where}.name: is the base, not an adapter.", f"{where}.name")
    return ref


def _weighted(services: Services, tenant: str, body: Sampling) -> tuple[WeightedAdapter, ...]:
    base = services.engine.base.name
    if body.model != base:
        message = f"model: with adapters, it must be the base, {base!r}, that they are added to."
        raise BadRequest(message, "model")
    found: dict[str, WeightedAdapter] = {}
    for i, choice in enumerate(body.adapters or ()):
        where = f"adapters[{i}]"
        ref = find_summand(services, tenant, choice.name, where)
        if ref.digest in found:
            first = found[ref.digest].ref.name
            message = f"{where}.name: has the same weights as {first}; give their sum once."
            raise BadRequest(message, f"{where}.name")
        found[ref.digest] = WeightedAdapter(ref, choice.weight)
    if len(found) > 1 or any(item.weight != 1.0 for item in found.values()):
        for i, item in enumerate(found.values()):
            if not item.ref.manifest.plain:
                message = (
                    f"adapters[{i}]: {item.ref.name} is more than LoRA on linear layers, which "
                    "cannot be weighted or added up; ask for it alone, as model."
                )
                raise BadRequest(message, f"adapters[{i}]", "unsupported_parameter")
    return tuple(found.values())


def _shown(item: WeightedAdapter) -> str:
    return item.ref.name if item.weight == 1.0 else f"{item.ref.name}*{item.weight:g}"
