"""Base of the parameter classes: a Python object with the fields and defaults of one C struct."""

import difflib
import math
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from sdsage._ffi import encode, ffi, image_from_c, image_to_c, lib, text
from sdsage.enums import C_ENUMS
from sdsage.errors import BadRequest

# Pointer fields that are lists, and the field that holds their length.
LENGTHS = {
    "embeddings": "embedding_count",
    "layers": "layer_count",
    "custom_sigmas": "custom_sigmas_count",
    "id_images": "id_images_count",
    "loras": "lora_count",
    "ref_images": "ref_images_count",
    "control_frames": "control_frames_size",
}
_CLASSES: dict[str, type["Struct"]] = {}


def as_image(value: Any, where: str) -> Any:
    """A uint8 array H x W x C of a NumPy array or a PIL image; None stays None."""
    if value is None:
        return None
    pixels = np.asarray(value)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or 0 in pixels.shape:
        raise BadRequest(
            f"{where}: an array of {pixels.dtype} with shape {pixels.shape} is not a picture; "
            "give uint8 of shape H x W x 3 (or H x W x 1 for a mask)"
        )
    return pixels


class Struct:
    """Fields by their C names. Values are checked when they are set; a wrong one is a BadRequest.

    Lists stand for pointer and length together: the length field can be read, not set.
    """

    _c_type: ClassVar[str]
    # How the defaults come about: an init function and its struct, then attributes down to this struct.
    _c_init: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        _CLASSES[cls._c_type] = cls

    def __init__(self, **values: Any) -> None:
        self._begin(self._c_init)
        for name, value in values.items():
            setattr(self, name, value)

    def _begin(self, origin: tuple[str, ...]) -> None:
        """Nothing is set; `origin` says where the defaults are, in the manner of `_c_init`.

        They are read from the engine when somebody first asks for one: who only sets fields needs no engine.
        """
        object.__setattr__(self, "_explicit", set())
        object.__setattr__(self, "_origin", origin)

    @classmethod
    @cache
    def _fields(cls) -> dict[str, Any]:
        """Name -> cffi type of every field."""
        return {name: field.type for name, field in ffi.typeof(cls._c_type).fields}

    def _defaults(self) -> Any:
        if not self._origin:
            return ffi.new(f"{self._c_type} *")[0]
        init, c_type, *path = self._origin
        struct = ffi.new(f"{c_type} *")
        getattr(lib, init)(struct)
        value = struct[0]
        for name in path:
            value = getattr(value, name)
        # a struct inside another is a view: copy it, so that it does not outlive its owner
        copy = ffi.new(f"{self._c_type} *")
        copy[0] = value
        return copy[0]

    @classmethod
    def from_c(cls, struct: Any) -> Self:
        """A Python object with the values of a C struct."""
        made = cls.__new__(cls)
        made._begin(())
        made._read(struct)
        return made

    @classmethod
    def revived(cls, origin: tuple[str, ...], explicit: list[str], values: dict[str, Any]) -> Self:
        """The object that was taken apart by `parts`, values checked. Raises BadRequest if it can't be one."""
        fields = cls._fields()
        if not set(explicit) <= set(values) <= set(fields) - set(LENGTHS.values()):
            raise BadRequest(f"{cls.__name__} has no such fields: {sorted(values)}")
        if origin and origin[:2] not in {c._c_init[:2] for c in _CLASSES.values()}:
            raise BadRequest(f"{cls.__name__} can't have its defaults from {origin}")
        made = cls.__new__(cls)
        made._begin(origin)
        for name, value in values.items():
            made.__dict__[name] = _checked(value, fields[name], f"{cls.__name__}.{name}", name in LENGTHS)
        made._explicit.update(explicit)
        return made

    def parts(self) -> tuple[tuple[str, ...], list[str], dict[str, Any]]:
        """What makes this object: origin of its defaults, fields that were assigned, and the values that it holds."""
        return self._origin, sorted(self._explicit), {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def _read(self, struct: Any) -> None:
        """Takes the fields that are not set yet from a C struct."""
        for name, c_type in self._fields().items():
            if name not in LENGTHS.values() and name not in self.__dict__:
                length = getattr(struct, LENGTHS[name]) if name in LENGTHS else 0
                self.__dict__[name] = _to_python(getattr(struct, name), c_type, length)

    def _values(self) -> dict[str, Any]:
        """All fields but the lengths, in order."""
        return {name: getattr(self, name) for name in self._fields() if name not in LENGTHS.values()}

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self._fields()
        if name not in fields:
            raise AttributeError(self._unknown(name))
        if name in LENGTHS.values():
            owner = next(k for k, v in LENGTHS.items() if v == name)
            raise AttributeError(f"{type(self).__name__}.{name} is the length of {owner!r}: set that list instead")
        self.__dict__[name] = _checked(value, fields[name], f"{type(self).__name__}.{name}", name in LENGTHS)
        self._explicit.add(name)

    def __getattr__(self, name: str) -> Any:
        # only called when the instance has no such attribute
        fields = self._fields()
        if name not in fields:
            raise AttributeError(self._unknown(name))
        for owner, length in LENGTHS.items():
            if name == length and owner in fields:
                return len(getattr(self, owner))
        if self._origin and fields[name].kind == "struct" and fields[name].cname in _CLASSES:
            inner = _CLASSES[fields[name].cname]
            self.__dict__[name] = made = inner.__new__(inner)
            made._begin((*self._origin, name))
        else:
            self._read(self._defaults())
        return self.__dict__[name]

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._fields(), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{type(self).__name__} has no field {name!r}{hint}"

    def was_set(self, name: str) -> bool:
        """True if the field was assigned, rather than left at the C default."""
        return name in self._explicit

    def to_c(self, keep: list[Any]) -> Any:
        """A pointer to a filled C struct; `keep` must live until the engine has read it."""
        struct = ffi.new(f"{self._c_type} *")
        keep.append(struct)
        self._fill(struct, keep)
        return struct

    def _fill(self, struct: Any, keep: list[Any]) -> None:
        for name, c_type in self._fields().items():
            if name in LENGTHS.values():
                continue
            value = getattr(self, name)
            if name in LENGTHS:
                setattr(struct, name, _list_to_c(value, c_type.item, keep))
                setattr(struct, LENGTHS[name], len(value))
            elif isinstance(value, Struct):
                value._fill(getattr(struct, name), keep)
            elif c_type.cname == "sd_image_t":
                setattr(struct, name, image_to_c(value, keep))
            elif c_type.kind == "pointer":
                string = encode(value)
                keep.append(string)
                setattr(struct, name, string)
            else:
                setattr(struct, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, nested; enums by the engine's names, pictures by their shape."""
        return {name: _plain(value) for name, value in self._values().items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Struct) or type(self) is not type(other):
            return NotImplemented
        theirs = other._values()
        return all(_same(v, theirs[k]) for k, v in self._values().items())

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={self.__dict__[k]!r}" for k in self._fields() if k in self._explicit)
        return f"{type(self).__name__}({shown})"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a is not None and b is not None and np.array_equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return value.to_dict()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return "x".join(map(str, value.shape))
    return getattr(value, "engine_name", value)


def _to_python(value: Any, c_type: Any, length: int) -> Any:
    """The Python value of a C field."""
    if c_type.cname == "sd_image_t":
        return None if value.data == ffi.NULL else image_from_c(value)
    if c_type.kind == "struct":
        return _CLASSES[c_type.cname].from_c(value)
    if c_type.kind == "enum":
        return C_ENUMS[c_type.cname.removeprefix("enum ")](int(value))
    if c_type.kind == "pointer":
        if c_type.item.cname == "char":
            return None if value == ffi.NULL else text(value)
        return [_to_python(value[i], c_type.item, 0) for i in range(length)]
    if c_type.cname == "_Bool":
        return bool(value)
    return value


def _checked(value: Any, c_type: Any, where: str, is_list: bool) -> Any:
    """`value` as the field keeps it; raises BadRequest if it can't be one."""
    if is_list:
        items = list(value if value is not None else [])
        return [_checked(item, c_type.item, f"{where}[{i}]", False) for i, item in enumerate(items)]
    if c_type.cname == "sd_image_t":
        return as_image(value, where)
    if c_type.kind == "struct":
        cls = _CLASSES[c_type.cname]
        if isinstance(value, Mapping):
            value = cls(**value)
        if not isinstance(value, cls):
            raise BadRequest(f"{where} takes a {cls.__name__}, got {type(value).__name__}")
        return value
    if c_type.kind == "enum":
        try:
            return C_ENUMS[c_type.cname.removeprefix("enum ")].parse(value)
        except BadRequest as error:
            raise BadRequest(f"{where}: {error}") from None
    if c_type.kind == "pointer":
        if value is not None and not isinstance(value, str | os.PathLike):
            raise BadRequest(f"{where} takes text or a path, got {type(value).__name__}")
        if value is not None and "\0" in os.fspath(value):
            raise BadRequest(f"{where}: a NUL character can't be part of it")
        return value if value is None or isinstance(value, str) else os.fspath(value)
    return _number(value, c_type, where)


def _number(value: Any, c_type: Any, where: str) -> bool | int | float:
    if c_type.cname == "_Bool":
        if not isinstance(value, bool | np.bool_):
            raise BadRequest(f"{where} takes True or False, got {value!r}")
        return bool(value)
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise BadRequest(f"{where} takes a number, got {value!r}")
    if c_type.cname == "float":
        number = float(value)
        # +inf is the C API's "not set" in several fields
        if math.isnan(number) or number == -math.inf or (abs(number) > 3.4028235e38 and number != math.inf):
            raise BadRequest(f"{where} is {value!r}: a finite number is needed")
        return number
    if int(value) != value:
        raise BadRequest(f"{where} takes a whole number, got {value!r}")
    try:
        ffi.new(f"{c_type.cname} *", int(value))
    except OverflowError:
        raise BadRequest(f"{where} is {value!r}, which does not fit {c_type.cname}") from None
    return int(value)


def _list_to_c(values: list[Any], item: Any, keep: list[Any]) -> Any:
    if not values:
        return ffi.NULL
    array = ffi.new(f"{item.cname.removeprefix('const ')}[]", len(values))
    keep.append(array)
    for i, value in enumerate(values):
        if isinstance(value, Struct):
            value._fill(array[i], keep)
        elif item.cname == "sd_image_t":
            array[i] = image_to_c(value, keep)
        else:
            array[i] = value
    return array
