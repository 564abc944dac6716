"""Training runs and saved states, as the Tinker API lists them."""

import time
from collections.abc import Mapping
from typing import Any

from hjax.serving.request_errors import RequestRefused
from hjax.training_service.saved_state import saved_lora
from hjax.training_service.state_store import (
    SAMPLER_WEIGHTS,
    TYPES,
    WEIGHTS,
    StateName,
    StateStore,
)
from hjax.training_service.tinker_service import TinkerService


def training_runs(service: TinkerService) -> list[dict[str, Any]]:
    """Every model that is loaded or has saved states."""
    return [training_run(service, each) for each in {*service.models, *service.store.models()}]


def training_run(service: TinkerService, model_id: str) -> dict[str, Any]:
    """What is known of a model; RequestRefused (404) if there is none."""
    saved = service.store.saved(model_id)
    model = service.models.get(model_id)
    if model is None and not saved:
        raise RequestRefused(f"there is no training run {model_id[:200]}", 404)
    if model is not None:
        base, lora, seen = model.base_model, model.learner.lora, model.seen
        metadata = model.metadata
    else:
        about = saved[-1][1]
        base, lora, seen = about["base_model"], saved_lora(about), about["saved_at"]
        metadata = about.get("model_metadata", {})
    found: dict[str, Any] = {
        "training_run_id": model_id,
        "base_model": base,
        "model_owner": "local",
        "is_lora": lora is not None,
        "lora_rank": None if lora is None else lora.rank,
        "last_request_time": _time(seen),
        "user_metadata": metadata or None,
    }
    for kind, key in ((WEIGHTS, "last_checkpoint"), (SAMPLER_WEIGHTS, "last_sampler_checkpoint")):
        of_kind = [_checkpoint(name, about) for name, about in saved if name.kind == kind]
        found |= {key: of_kind[-1]} if of_kind else {}
    return found


def checkpoints(store: StateStore, model_id: str = "") -> list[dict[str, Any]]:
    """The saved states of a model, or of all."""
    return [_checkpoint(name, about) for name, about in store.saved(model_id)]


def weights_info(store: StateStore, path: str) -> dict[str, Any]:
    """What is known of a saved state; ConfigError if there is none."""
    about = store.about(StateName.parse(path))
    lora = saved_lora(about)
    return {
        "base_model": about["base_model"],
        "is_lora": lora is not None,
        "lora_rank": None if lora is None else lora.rank,
        "train_unembed": False,
        "train_mlp": about["train_mlp"],
        "train_attn": about["train_attn"],
    }


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _checkpoint(name: StateName, about: Mapping[str, Any]) -> dict[str, Any]:
    expires = about.get("expires_at")
    return {
        "checkpoint_id": f"{name.kind}/{name.name}",
        "checkpoint_type": TYPES[name.kind],
        "time": _time(about["saved_at"]),
        "tinker_path": str(name),
        "user_metadata": about.get("user_metadata") or None,
        "expires_at": None if expires is None else _time(expires),
    }
