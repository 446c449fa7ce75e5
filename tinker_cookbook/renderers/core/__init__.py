"""Types and functions that the chat formats share: messages, text codec, parsers, rendering."""
