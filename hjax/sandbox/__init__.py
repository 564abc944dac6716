"""Sandboxes for programs that a model writes. ``local_sandbox.LocalSandbox`` is the in-tree one."""
