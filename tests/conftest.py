"""Settings of all tests."""

from hypothesis import settings

# An example's time says more about what else this machine does than about the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
