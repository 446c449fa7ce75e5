"""Audio in messages, as the bytes and the format that chat APIs take."""

from __future__ import annotations

import base64
from typing import Any

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.image_processing_utils import read_media
from tinker_cookbook.renderers.base import AudioPart

_FORMATS = ("wav", "mp3", "flac")
# Other endings of files and other names in data URIs.
_OTHER_NAMES = {"x-wav": "wav", "wave": "wav", "mpeg": "mp3", "x-flac": "flac"}


def audio_part_to_input_audio(part: AudioPart) -> dict[str, Any]:
    """Returns the object ``input_audio`` of the OpenAI API for a part.

    It has ``data`` in base64 and ``format``, and ``num_frames`` and ``sample_rate`` (Hz) if the
    part has them. Raises DataFormatError for audio that cannot be read, and for a file other than
    WAV without these two numbers.
    """
    source, written = part["audio"], part.get("format")
    if isinstance(source, bytes):
        data, found = source, "wav"
    elif isinstance(source, str):
        data, found = read_media(source, "audio"), _format_in(source)
    else:
        raise DataFormatError(
            f"audio: got {type(source).__name__}, expected bytes, the path of a file or a data URI"
        )
    if written and isinstance(source, str) and source.startswith("data:") and written != found:
        raise DataFormatError(f"format: got {written!r}, but the data URI says {found!r}")
    if (kind := written or found) not in _FORMATS:
        raise DataFormatError(f"format: got {kind!r}, expected one of {', '.join(_FORMATS)}")
    result = {"data": base64.b64encode(data).decode("ascii"), "format": kind}
    return result | _frames(part, required=kind != "wav")


def _format_in(source: str) -> str:
    if source.startswith("data:"):
        name = source.removeprefix("data:audio/").partition(",")[0].partition(";")[0]
    else:
        name = source.rpartition(".")[2]
    return _OTHER_NAMES.get(name.lower(), name.lower())


def _frames(part: AudioPart, required: bool) -> dict[str, int]:
    both = {"num_frames": part.get("num_frames"), "sample_rate": part.get("sample_rate")}
    numbers = {name: number for name, number in both.items() if number is not None}
    if len(numbers) == 1 or (required and not numbers):
        raise DataFormatError(
            f"audio: got {', '.join(numbers) or 'neither'}; the part must provide num_frames and "
            "sample_rate together, and for mp3 and flac both"
        )
    if any(number <= 0 for number in numbers.values()):
        raise DataFormatError(f"audio: got {numbers}; num_frames and sample_rate must be positive")
    return numbers
