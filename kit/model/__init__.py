"""Find, check, load and quantise a causal language model, and attach adapters. Independent of the strategy.

A torchvision or torchaudio that cannot be imported, such as that of another build of torch, is not used: transformers
imports them in every run, of text too.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

from kit.system.console import say
from kit.system.errors import first_line

for _name in ("torchvision", "torchaudio"):
    if find_spec(_name):
        try:
            import_module(_name)
        except Exception as error:
            sys.modules[_name] = None  # type: ignore[assignment]  # transformers takes it for not installed
            fix = "uninstall it, or install the one of this torch"
            say(f"note: {_name} does not fit this torch ({first_line(error)}), and is not used: {fix}")
