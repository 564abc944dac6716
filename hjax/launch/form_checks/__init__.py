"""Cases that try every kernel and collective form of a device, for ``hjax.launch.check``."""
