"""The weaving core: hooks on functions of other people's modules, loaded or not.

Read in this order; each module imports only from those above it:

targets      what a target's text means
attributes   where a target leads in a module: attribute references
hooks        hook types, their rules, and the chain that runs them, under torch.compile too
functions    the function that stands for a target, and its hooks
proxies      what stands for callables of other types
descriptors  the callable in an attribute, and the same attribute around another one
rebinding    every referrer of an old object gets the new one
joinpoints   one woven attribute, its hooks, and the way back
replacements classes in the place of others, and what holds an original on purpose
modules      modules as they load, and what they make later
table        all join points, and putting them in place
changes      one change of hooks at a time
core         the weaver: hooks to their places, now or later
api          decorators, handles, SGLang's registry, reports

Code outside imports from here only.
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
