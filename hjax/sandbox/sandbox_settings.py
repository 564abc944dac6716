"""Which sandbox a run uses: this machine's, or a class of the user's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError, truncate
from hjax.sandbox.local_sandbox import LocalSandbox, Sandbox, sandbox_layers
from hjax.user_code import load_object
from hjax.user_input import user_path

_CALLS = ("create", "exec", "write", "read", "kill")


@dataclasses.dataclass(frozen=True)
class SandboxSettings:
    """The config section ``sandbox``.

    Attributes:
      function: ``path.py:Class`` with the calls of ``Sandbox``; empty: ``LocalSandbox``.
      allow_network: run programs also where nothing keeps them from the network.
    """

    function: str = ""
    allow_network: bool = False

    @classmethod
    def of_config(cls, section: Mapping[str, Any]) -> "SandboxSettings":
        """From a config, with the path absolute, as other processes have other folders."""
        where, colon, name = section["function"].rpartition(":")
        if colon:
            where = str(user_path(where, "sandbox.function=").absolute())
        return cls(f"{where}{colon}{name}", section["allow_network"])

    def make(self) -> Sandbox:
        """The sandbox.

        Raises:
          ConfigError: no such class, it raises or lacks a call; or this machine's layers do not
            confine programs.
        """
        if not self.function:
            return LocalSandbox(allow_network=self.allow_network)
        said = f"sandbox.function={self.function}"
        found = load_object(self.function, "sandbox.function")
        try:
            made: Sandbox = found()
        except Exception as error:
            told = truncate(f"{type(error).__name__}: {error}", 300)
            raise ConfigError(f"{said}, called without arguments: {told}") from error
        if missing := [name for name in _CALLS if not callable(getattr(made, name, None))]:
            raise ConfigError(
                f"{said}: its objects have no call {missing[0]}; a sandbox has "
                f"{', '.join(_CALLS)} (docs/security.md)"
            )
        return made

    def describe(self) -> str:
        """The sandbox in one line, for a run's head; raises as ``make`` does."""
        self.make()
        return f"sandbox: {self.function}" if self.function else sandbox_layers(self.allow_network)


THIS_MACHINE = SandboxSettings()
