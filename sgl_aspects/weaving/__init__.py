"""The weaving core: hooks on functions of other people's modules, loaded or not.

targets     what a target text means               places      where it leads in a module
hooks       hook types and their rules             chain       hooks to one callable
kinds       descriptors and what is in them        homes       the attribute that is written
codegen     code with the exact signature          functions   functions made of it, and their steering
proxies     callables that are no function         joinpoint   one woven place
classes     one replaced class                     keeping     what a replacement holds of its own
rebind      every holder of the old object         holders     kinds of them
references  is there any other holder?             fabric      all woven places
importing   modules as they load                   interest    which hooks a module may be about
lazy        attributes that modules make late      missing     targets that are not there
core        brings hooks to their places           reporting   what every hook did
faces       decorators, handles, SGLang's names
"""

from sgl_aspects.weaving.arguments import argument_reader
from sgl_aspects.weaving.faces import (
    Aspect,
    Handle,
    HookRegistry,
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
from sgl_aspects.weaving.hooks import Advice, HookSource, HookType, Observer, Result, State, current_source
from sgl_aspects.weaving.rebind import Stale, in_pieces
from sgl_aspects.weaving.reporting import HookReport, Report
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
