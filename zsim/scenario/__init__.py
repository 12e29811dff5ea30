"""The scenario file: what a user asks, read and checked (`load`), then made of the parts it names (`resolve`)."""

from zsim.scenario.load import Scenario, json_schema, load
from zsim.scenario.resolve import Setup

__all__ = ["Scenario", "Setup", "json_schema", "load"]
