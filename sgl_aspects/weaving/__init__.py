"""The weaving core: hooks on functions of other people's modules, loaded or not.

Read the docstring of machine first, then in this order; each module imports only from those above it:

targets      parsing of target strings
attributes   lookup of targets in modules: attribute references
hooks        hook types, their order and rules, and advices
chain        the chain that runs the hooks of a target, under torch.compile too
templates    the generated code of woven functions
functions    what replaces a target: a woven function, or a proxy
descriptors  the attribute of a join point, opened and rebuilt around its replacement
referrers    the search of the heap, and the referrers that keep an original
rebinding    replacing an object in all of its referrers
joinpoints   join points: a woven attribute, its hooks, its original
modules      import callbacks; attributes and subclasses that are created later
changes      serialized changes of hooks
machine      the weaver: resolve, attach, apply, detach; its states
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
from sgl_aspects.weaving.modules import why_not_importable
from sgl_aspects.weaving.rebinding import Stale
from sgl_aspects.weaving.referrers import Pieces, in_pieces, unfrozen
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
    "unfrozen",
    "weave",
    "weaver",
    "why_not_importable",
    "woven",
]
