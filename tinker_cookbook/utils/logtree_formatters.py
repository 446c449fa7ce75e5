"""Formatters of reports: objects that ``logtree.log_formatter`` takes."""

from tinker_cookbook.utils.logtree.formatters import CONVERSATION_CSS, ConversationFormatter

__all__ = ["CONVERSATION_CSS", "ConversationFormatter"]
