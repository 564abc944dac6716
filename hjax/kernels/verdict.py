"""Verdicts: which kernels and collectives a kind of device has been seen to compute right.

A *form* is one way to compute attention, experts' products, decoding or an exchange between
devices. ``python -m hjax.launch.check`` compares every form with the plain one on the devices at
hand and records what it finds, by kind of device and versions of JAX and its plugins, in a file of
the user's cache folder.

Without a verdict a run takes the forms that JAX or a vendor ships (*proven*), and the plain one in
place of hjax's own kernels. A form that was found wrong is never taken. Settings of the user, such
as ``model.attention=cudnn``, are obeyed.
"""

import dataclasses
import importlib.metadata
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hjax.devices import device_of_kind
from hjax.errors import DataError
from hjax.files import cache_folder, read_json

COMMAND = "python -m hjax.launch.check"
# Results of a form. A form of which any case was wrong, ran past its deadline or ended its process
# is not taken; one that none of its cases suits is left to the compiler's refusal.
RIGHT, WRONG, HUNG, CRASHED, UNSUITED = "right", "wrong", "hung", "crashed", "not for this device"


@dataclasses.dataclass(frozen=True)
class KernelForm:
    """One way to compute something.

    Attributes:
      platform: of devices that can take it, as JAX names it.
      instead: what is computed with where it is not taken.
      proven: shipped with JAX or by a vendor, and taken without a verdict.
    """

    platform: str
    instead: str
    proven: bool = False


SPLASH, CUDNN_ATTENTION, MEGABLOX = "attention=splash", "attention=cudnn", "grouped=megablox"
# cuDNN takes heads of more than 128 elements on some GPUs only.
CUDNN_WIDE_HEADS = "attention=cudnn, heads over 128"
TPU_DECODING, GPU_DECODING = "decode=tpu kernel", "decode=gpu kernel"
COLLECTIVE_MATMUL, EXPERT_RING = "collective matmul", "expert ring"
SPARSECORE = "sparsecore collectives"
FORMS = {
    SPLASH: KernelForm("tpu", "attention by blocks", proven=True),
    MEGABLOX: KernelForm("tpu", "experts' products by blocks", proven=True),
    SPARSECORE: KernelForm("tpu", "collectives of the compiler's defaults", proven=True),
    TPU_DECODING: KernelForm("tpu", "products over the cache by XLA"),
    COLLECTIVE_MATMUL: KernelForm("tpu", "sums of activations by the compiler"),
    EXPERT_RING: KernelForm("tpu", "tokens gathered before experts, sums scattered after"),
    CUDNN_ATTENTION: KernelForm("gpu", "attention by blocks", proven=True),
    CUDNN_WIDE_HEADS: KernelForm("gpu", "attention by blocks"),
    GPU_DECODING: KernelForm("gpu", "products over the cache by XLA"),
}
ALL_FORMS = frozenset(FORMS)
PROVEN_FORMS = frozenset(name for name, form in FORMS.items() if form.proven)


def forms_of(platform: str) -> list[str]:
    """The forms that a platform's devices can take."""
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    return [name for name, form in FORMS.items() if form.platform == platform]


@dataclasses.dataclass(frozen=True)
class FormVerdict:
    """What was found of the forms on a kind of device.

    Attributes:
      device_kind: as JAX names it.
      versions: of JAX and its plugins.
      results: by form, one of ``RIGHT``, ``WRONG``, ``HUNG``, ``CRASHED``, ``UNSUITED``.
    """

    device_kind: str
    versions: Mapping[str, str]
    results: Mapping[str, str]

    @property
    def taken(self) -> frozenset[str]:
        """The forms that a run takes."""
        right = {name for name, found in self.results.items() if found == RIGHT}
        return frozenset(right | (PROVEN_FORMS - self.results.keys())) & ALL_FORMS

    @property
    def path(self) -> Path:
        """Its file in the user's cache folder."""
        return verdict_file(self.device_kind, self.versions)


_PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip


def runtime_versions() -> dict[str, str]:
    """Versions of JAX and those of its plugins and of cuDNN that are installed."""
    return installed_versions(_PACKAGES)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions by name, of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text).strip("-").lower()


def device_name(kind: str) -> str:
    """One name for a kind of device, however JAX and Ray spell it."""
    known = device_of_kind(kind)
    return known.name if known is not None else _slug(kind)


def verdict_file(kind: str, versions: Mapping[str, str]) -> Path:
    """The file of a verdict: its name has the kind of device and the versions."""
    parts = [
        device_name(kind),
        *(f"{_slug(name)}-{_slug(each)}" for name, each in versions.items()),
    ]
    return cache_folder("verdicts", ",".join(parts) + ".json")


def read_verdict(kind: str, versions: Mapping[str, str] | None = None) -> FormVerdict | None:
    """The verdict on a kind of device under these versions, by default the installed ones; None if
    there is none.

    Raises:
      DataError: its file is damaged.
    """
    versions = runtime_versions() if versions is None else versions
    file = verdict_file(kind, versions)
    found = read_json(file)
    if found is None:
        return None
    results = found.get("results") if isinstance(found, dict) else None
    allowed = (RIGHT, WRONG, HUNG, CRASHED, UNSUITED)
    if not isinstance(results, dict) or not all(each in allowed for each in results.values()):
        raise DataError(f"{file} is no verdict of {COMMAND}; run it again, or remove the file")
    return FormVerdict(kind, versions, results)


def stale_verdict(kind: str) -> bool:
    """Whether there is a verdict on the kind of device under other versions only."""
    file = verdict_file(kind, runtime_versions())
    return not file.exists() and any(file.parent.glob(f"{device_name(kind)},*.json"))


@dataclasses.dataclass(frozen=True)
class FormChoice:
    """The forms that a run takes, and why.

    Attributes:
      forms: names.
      remark: one line for the user; empty on CPUs and where a verdict leaves nothing to say.
      verdict: that decided, of a resumed run the recorded one; None: there is none.
    """

    forms: frozenset[str]
    remark: str = ""
    verdict: FormVerdict | None = None

    def record(self, kind: str) -> dict[str, Any]:
        """The content of a workdir's kernels.json."""
        verdict = self.verdict or FormVerdict(kind, runtime_versions(), {})
        return {
            "device_kind": kind,
            "versions": dict(verdict.versions),
            "results": dict(verdict.results),
            "forms": sorted(self.forms),
        }


def choose_forms(platform: str, kind: str, recorded: Any = None) -> FormChoice:
    """The forms for devices of a platform and kind: a resumed run's, the verdict's, or the proven.

    Args:
      recorded: content of the workdir's kernels.json, which a resume on the same kind of device
        keeps; None: a new run.

    Raises:
      DataError: the verdict's file, or the record, is damaged.
    """
    possible = forms_of(platform)
    if not possible:
        return FormChoice(PROVEN_FORMS)
    if recorded is not None and device_name(recorded.get("device_kind", "")) == device_name(kind):
        earlier = FormVerdict(kind, recorded.get("versions", {}), recorded.get("results", {}))
        return FormChoice(_names(recorded.get("forms")), verdict=earlier)
    verdict = read_verdict(kind)
    if verdict is not None:
        bad = [f"{n} was {x}" for n, x in verdict.results.items() if x in (WRONG, HUNG, CRASHED)]
        said = f"{kind}: {', '.join(bad)} in {COMMAND}, and not taken" if bad else ""
        return FormChoice(verdict.taken, said, verdict)
    own = [name for name in possible if name not in PROVEN_FORMS]
    why = "has other versions of JAX or its plugins" if stale_verdict(kind) else "is missing"
    return FormChoice(
        PROVEN_FORMS,
        f"the verdict on {kind} {why}, so {', '.join(own)} are not taken; try them once with "
        f"{COMMAND}",
    )


def _names(forms: Any) -> frozenset[str]:
    if not isinstance(forms, list) or not all(isinstance(name, str) for name in forms):
        raise DataError("kernels.json of the workdir has no list of forms; use another --workdir")
    return frozenset(forms)


def local_forms(device: Any) -> frozenset[str]:
    """``choose_forms`` of a jax.Device outside a run; its remark is logged."""
    choice = choose_forms(device.platform, device.device_kind)
    if choice.remark:
        logging.getLogger(__name__).warning("%s", choice.remark)
    return choice.forms


def known_or_assumed(platform: str, kind: str) -> FormChoice:
    """Forms of devices that may not be here, and what to say of them: the verdict's if this machine
    has one, else all are assumed right."""
    possible = forms_of(platform)
    if not possible:
        return FormChoice(PROVEN_FORMS)
    verdict = read_verdict(kind)
    if verdict is None:
        said = f"assumed right on {kind} ({COMMAND} tries them there): {'; '.join(possible)}"
        return FormChoice(ALL_FORMS, said)
    taken = "; ".join(name for name in possible if name in verdict.taken) or "none"
    return FormChoice(verdict.taken, f"forms by the verdict on {kind}: {taken}", verdict)
