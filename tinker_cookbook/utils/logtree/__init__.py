"""Reports that grow while code runs, nested like the scopes of the code.

::

    with logtree.init_trace("Step 12", path=folder / "train.html") as trace:
        with logtree.scope_header("Grading"):
            logtree.log_text("the answer is 4, the reference is 5")
        logtree.table([{"sample": 0, "reward": 1.0}])
    logtree.write_trace_json(trace, folder / "train_logtree.json")

The current position in the report is a context variable: tasks and threads
(``asyncio.to_thread``) that start inside a scope write into that scope, and concurrent tasks do not
affect each other. Without an open report all functions do nothing, so libraries can always call
them.
"""

from tinker_cookbook.utils.imports import official_names
from tinker_cookbook.utils.logtree.formatters import ConversationFormatter, Formatter
from tinker_cookbook.utils.logtree.log import (
    log_formatter,
    log_html,
    log_text,
    optional_enable_logging,
    scope_disable,
    scope_div,
    scope_header,
    table,
)
from tinker_cookbook.utils.logtree.nodes import Node, Raw
from tinker_cookbook.utils.logtree.trace import Trace, init_trace, write_trace_json

__getattr__ = official_names(__name__)

__all__ = [
    "ConversationFormatter", "Formatter", "Node", "Raw", "Trace", "init_trace", "log_formatter",
    "log_html", "log_text", "optional_enable_logging", "scope_disable", "scope_div", "scope_header",
    "table", "write_trace_json",
]  # fmt: skip
