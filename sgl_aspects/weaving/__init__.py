"""The weaving core: hooks on functions of other people's modules, loaded or not.

Read in this order; each module imports only from those above it:

targets      parsing of target strings
attributes   lookup of targets in modules: attribute references
hooks        hook types, their rules, and the chain that runs them, under torch.compile too
functions    the woven function that replaces a target
proxies      proxies that replace callables of other types
descriptors  unwrapping descriptors, and rebuilding them around woven callables
rebinding    replacing an object in all of its referrers
joinpoints   join points: a woven attribute, its hooks, its original
replacements class replacements, and referrers that keep the original
modules      import callbacks; attributes and subclasses that are created later
table        the table of all join points
changes      serialized changes of hooks
core         the weaver: attaches hooks now, or when a module loads
api          decorators, handles, SGLang's registry, reports

Code outside this package imports from here only.
"""

from sgl_aspects.weaving.api import (
    Aspect,
    Handle,
    HookRegistry,
    HookReport,
    Report,
    after,
    around,
    before,
    explain,
    native,
    observe,
    plugin_hook,
    replace,
    report,
    weave,
    weaver,
    woven,
)
from sgl_aspects.weaving.hooks import (
    Advice,
    HookSource,
    HookType,
    Observer,
    Result,
    State,
    argument_reader,
    current_source,
)
from sgl_aspects.weaving.rebinding import Pieces, Stale, in_pieces
from sgl_aspects.weaving.targets import Target

__all__ = [
    "Advice",
    "Aspect",
    "Handle",
    "HookRegistry",
    "HookReport",
    "HookSource",
    "HookType",
    "Observer",
    "Pieces",
    "Report",
    "Result",
    "Stale",
    "State",
    "Target",
    "after",
    "argument_reader",
    "around",
    "before",
    "current_source",
    "explain",
    "in_pieces",
    "native",
    "observe",
    "plugin_hook",
    "replace",
    "report",
    "weave",
    "weaver",
    "woven",
]
