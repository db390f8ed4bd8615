"""Protobuf messages as plain values, for JSON and for people."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def as_plain(message: Message) -> dict[str, Any]:
    """Every field by name, zeros included: numbers as numbers, bytes as hex, enums by name."""
    plain = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            plain[field.name] = [_plain_value(field, element) for element in value]
        else:
            plain[field.name] = _plain_value(field, value)
    return plain


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Message):
        return as_plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
