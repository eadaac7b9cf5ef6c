"""The structs and functions of the C sources as ctypes reads them: fields and types are those that C compiles."""

from __future__ import annotations

import ctypes
import keyword
import re
from functools import cache

from mmspec.cpu.c_library import SOURCES

NUMBERS = {
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
STRUCT = re.compile(r"typedef struct \{([^{}]*)\} (\w+);")
FUNCTION = re.compile(r"^EXPORT (\w+) (\w+)\(([^)]*)\)", re.MULTILINE)


@cache
def _bodies() -> dict[str, str]:
    """{name of a struct: its declarations}, of all headers."""
    text = "".join(source.decode() for name, source in SOURCES.items() if name.endswith(".h"))
    return {name: body for body, name in STRUCT.findall(COMMENT.sub("", text))}


def fields_of(struct: str, **nested: type[ctypes.Structure]) -> list[tuple[str, type]]:
    """`_fields_` of a struct; a field whose name is a keyword of Python ends with an underscore.

    Args:
        struct: its name in C.
        nested: {name in C: class} of structs that it holds by value.

    Raises:
        KeyError: no header has the struct, or a field is of a type that is not known here.
    """
    found: list[tuple[str, type]] = []
    for declaration in filter(None, map(str.strip, _bodies()[struct].split(";"))):
        kind, _, names = declaration.removeprefix("const ").partition(" ")
        for name in map(str.strip, names.split(",")):
            plain = name.lstrip("*")
            field_type = ctypes.c_void_p if name != plain else nested.get(kind) or NUMBERS[kind]
            found.append((f"{plain}_" if keyword.iskeyword(plain) else plain, field_type))
    return found


def declare_functions(library: ctypes.CDLL) -> None:
    """Give the functions of a library the types of their arguments and results.

    Raises:
        AttributeError: the library lacks one.
    """
    for source in SOURCES.values():
        for result, name, arguments in FUNCTION.findall(source.decode()):
            function = getattr(library, name)
            function.argtypes = list(map(_type_of, arguments.split(",")))
            function.restype = NUMBERS.get(result)


def _type_of(argument: str) -> type:
    """The type of an argument such as `const weights *w`; structs and functions are passed by address."""
    return ctypes.c_void_p if "*" in argument else NUMBERS.get(argument.split()[0], ctypes.c_void_p)
