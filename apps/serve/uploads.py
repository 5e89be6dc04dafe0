"""A multipart form that is written to disk as it comes: one file, and fields of a few bytes."""

from __future__ import annotations

from collections.abc import Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from .errors import ApiError, refused

_MOST_PARTS = 16
_MOST_FIELD_NBYTES = 1024


class UploadForm:
    """`fields` are the small parts by name, `filename` is what the client calls its file, None without one."""

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """`write` takes the content of the part "file". Raises ApiError for another kind of body."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(415, "the body must be multipart/form-data", code="unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._write = write
        self._num_parts = 0
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._ended = False
        try:
            self._parser = MultipartParser(boundary, self._callbacks())  # type: ignore[arg-type]
        except FormParserError as error:
            raise refused(f"the form cannot be read: {error}", code="invalid_form") from None

    def add(self, data: bytes) -> None:
        """The next piece of the body. Raises ApiError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise refused(f"the form cannot be read: {error}", code="invalid_form") from None

    def end(self) -> None:
        """No more comes. Raises ApiError where the form is not whole."""
        if not self._ended:
            raise refused("the form ends before its last boundary", code="invalid_form")

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        def end() -> None:
            self._ended = True

        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, begin, end: self._header[0].extend(data[begin:end]),
            "on_header_value": lambda data, begin, end: self._header[1].extend(data[begin:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": lambda data, begin, end: self._add(data[begin:end]),
            "on_part_end": self._end_part,
            "on_end": end,
        }

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise refused(f"the form has more than {_MOST_PARTS} parts", code="invalid_form")
        self._disposition, self._value = b"", bytearray()

    def _end_header(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise refused("the form has more than one file", "file")
            self.filename = options.get(b"filename", b"file.jsonl").decode(errors="replace")

    def _add(self, data: bytes) -> None:
        if self._is_file:
            self._write(data)
            return
        self._value.extend(data)
        if len(self._value) > _MOST_FIELD_NBYTES:
            raise refused(
                f"the field {self._name[:64]!a} is longer than {_MOST_FIELD_NBYTES} bytes", code="invalid_form"
            )

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode(errors="replace")
