"""The shared trainings and servers."""

from tests.rig.fixtures import *  # noqa: F403
