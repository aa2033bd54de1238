"""Triton's interpreter without work that it repeats at each call, and with products in bfloat16."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

__all__ = ["quick_kernels"]


@contextmanager
def quick_kernels() -> Iterator[None]:
    """Make Triton's interpreter run kernels in a quarter of its time, in the `with` block.

    - It patches triton.language at each launch and again at each call of a function of a kernel.
      Here the first launch patches what all these functions see, until the end of the block.
    - It checks each sum and product of integers for overflow, in integers of 64 bits. An index
      that overflows reads or writes another place, so comparisons of the outputs find it too.
    - It makes a table of dtypes for each tensor, and objects for each length of its shape.
    - It compares the types of operands also where they are the same.
    - It copies each operand to the shape of the other. numpy computes without the copies.
    - It looks for lists in each argument of an operation, and at the size of each number.
    """
    if "TRITON_INTERPRET" not in os.environ:
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
    language = _PatchedLanguage(interpreter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_attr", _patch_attribute)
        patch.setattr(interpreter, "_patch_lang", language.patch)
        patch.setattr(interpreter.InterpretedFunction, "__call__", _call)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        patch.setattr(interpreter, "_get_np_dtype", _Dtypes(interpreter._get_np_dtype))
        _share_types(interpreter, patch)
        _compare_types_once(interpreter, patch)
        _check_values_once(interpreter, patch)
        _compute_bfloat16(interpreter, patch)
        try:
            yield
        finally:
            language.restore()


class _PatchedLanguage:
    """Changes of the interpreter to triton.language, made once for all launches."""

    def __init__(self, interpreter: Any) -> None:
        self._apply: Callable[[Any], Any] = interpreter._patch_lang
        language = interpreter.tl
        self._any_function = SimpleNamespace(__globals__={"tl": language, "core": language.core})
        self._scope: Any = None

    def patch(self, _function: object) -> Any:
        """Patch triton.language before the first launch. The result restores nothing."""
        if self._scope is None:
            self._scope = self._apply(self._any_function)
        return SimpleNamespace(restore=lambda: None)

    def restore(self) -> None:
        """Give triton.language back as it was."""
        if self._scope is not None:
            self._scope.restore()


def _patch_attribute(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Let a function of triton.language compute by the interpreter."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    semantic, function = interpreter.interpreter_semantic, getattr(member, "__wrapped__", member)

    def compute(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    scope.set_attr(target, name, compute)


def _share_types(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Let tensors of the same type share the objects that describe it."""
    core = interpreter.tl.core
    describe, equals = core.block_type.__init__, core.dtype.__eq__
    blocks: dict[tuple[object, ...], dict[str, Any]] = {}
    scalars: dict[str, tuple[Any, Any]] = {}

    def shape_of(lengths: tuple[int, ...]) -> tuple[Any, Any]:
        count = core.constexpr(math.prod(lengths))
        return core.tuple([core.constexpr(length) for length in lengths]), count

    def make_block(block: Any, element: Any, shape: Any) -> None:
        lengths = tuple([each.value if type(each) is core.constexpr else each for each in shape])
        key = (element.name, *lengths)
        if key not in blocks:
            describe(block, element, list(lengths))
            block.lengths, block.of_tensor = lengths, shape_of(lengths)
            blocks[key] = vars(block).copy()
        vars(block).update(blocks[key])
        block.element_ty = element

    def make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type = handle, kind
        if type(kind) is core.block_type:
            tensor.dtype = kind.element_ty
            tensor.shape, tensor.numel = kind.of_tensor
        else:
            tensor.dtype = kind.scalar
            if kind.name not in scalars:
                scalars[kind.name] = shape_of(())
            tensor.shape, tensor.numel = scalars[kind.name]

    patch.setattr(core.block_type, "__init__", make_block)
    patch.setattr(core.dtype, "lengths", (), raising=False)
    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(core.dtype, "__eq__", lambda x, y: x is y or equals(x, y))


def _compare_types_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Let operations take their operands as they are where nothing is to convert."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    promote, check_types = semantic.computation_type_impl, semantic.binary_op_type_checking_impl
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast
    promoted: dict[tuple[object, ...], Any] = {}
    constants: dict[tuple[object, ...], Any] = {}
    common: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}

    def promoted_type(self: Any, x: Any, x_is: bool, y: Any, y_is: bool, divides: bool) -> Any:
        key = (x.name, x_is, y.name, y_is, divides)
        if key not in promoted:
            promoted[key] = promote(self, x, x_is, y, y_is, divides)
        return promoted[key]

    def checked(self: Any, x: Any, y: Any, *flags: bool, **options: Any) -> Any:
        x_is, y_is = type(x) is core.tensor, type(y) is core.tensor
        if options or not (x_is or y_is):
            return check_types(self, x, y, *flags, **options)
        if x_is and y_is:
            kind = x.dtype
            if type(kind) is core.pointer_type:
                is_known = flags[:1] == (True,) and y.dtype.is_int()
            else:
                is_known = kind is y.dtype and (flags[3:] != (True,) or kind.is_int())
            return spread(x, y) if is_known else check_types(self, x, y, *flags)
        tensor, number = (x, y) if x_is else (y, x)
        key = (tensor.type.name, x_is, type(number), number, flags)
        if key not in constants:
            operands = check_types(self, x, y, *flags)
            if operands[y_is] is not tensor:
                return operands
            constants[key] = operands[x_is]
        return (x, constants[key]) if x_is else (constants[key], y)

    def spread(x: Any, y: Any) -> tuple[Any, Any]:
        """Give both operands the type of the result. numpy repeats their elements."""
        lengths = x.type.lengths, y.type.lengths
        if lengths[0] == lengths[1]:
            return x, y
        if lengths not in common:
            common[lengths] = np.broadcast_shapes(*lengths)
        shape = common[lengths]
        return tuple(each if each.type.lengths == shape else typed(each, shape) for each in (x, y))

    def typed(tensor: Any, lengths: tuple[int, ...]) -> Any:
        return core.tensor(tensor.handle, core.block_type(tensor.dtype, lengths))

    def broadcasted(self: Any, x: Any, y: Any) -> Any:
        x_lengths, y_lengths = x.type.lengths, y.type.lengths
        if x_lengths == y_lengths:
            return x, y
        if x_lengths and not y_lengths:
            kind = core.block_type(y.dtype, x_lengths)
            return x, self.tensor(self.builder.create_splat(kind, y.handle), kind)
        return broadcast(self, x, y)

    def converted(self: Any, x: Any, kind: Any, *rounding: Any) -> Any:
        return x if x.dtype is kind.scalar else cast(self, x, kind, *rounding)

    patch.setattr(semantic, "binary_op_type_checking_impl", checked)
    patch.setattr(semantic, "computation_type_impl", promoted_type)
    patch.setattr(semantic, "broadcast_impl_value", broadcasted)
    patch.setattr(semantic, "cast", converted)


def _check_values_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Let operations take what they computed or were given as it is."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    unwrap, compute = core._unwrap_if_constexpr, interpreter.InterpreterBuilder.binary_op
    collections = (list, tuple, core.tuple)

    def unwrapped(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, collections) else value

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr

    def binary_op(self: Any, x: Any, y: Any, operation: Callable[..., Any]) -> Any:
        output = operation(x.data, y.data)
        if output.dtype is not x.data.dtype:
            return compute(self, x, y, operation)
        return handle(output, x.dtype.scalar)

    patch.setattr(core, "_unwrap_if_constexpr", unwrapped)
    patch.setattr(interpreter.InterpreterBuilder, "binary_op", binary_op)
    patch.setattr(handle, "__init__", make_handle)


def _compute_bfloat16(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter compute products and conversions in bfloat16 as a GPU does.

    It multiplies the bits as integers, and rounds half away from zero without a carry.
    """
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    language = interpreter.tl
    own = {name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp")}
    fma, dot = builder.create_fma, builder.create_dot

    def is_half(value: Any) -> bool:
        return bool(value.dtype.scalar == language.bfloat16)

    def converted(name: str) -> Callable[..., Any]:
        def convert(self: Any, source: Any, kind: Any, *further: Any) -> Any:
            target = kind.scalar
            if is_half(source) and target.is_floating():
                widened = handle(_as_float32(source.data), language.float32)
                is_wide = target == language.float32
                return widened if is_wide else own[name](self, widened, kind, *further)
            if source.dtype.scalar == language.float32 and target == language.bfloat16:
                return handle(_as_bfloat16(source.data), target)
            return own[name](self, source, kind, *further)

        return convert

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_half(z):
            return fma(self, x, y, z)
        one, other, addend = (_as_float32(each.data).astype(np.float64) for each in (x, y, z))
        exact = (one * other + addend).astype(np.float32)
        return handle(_as_bfloat16(exact), language.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *further: Any) -> Any:
        if is_half(a):
            a, b = (handle(_as_float32(each.data), language.float32) for each in (a, b))
        return dot(self, a, b, *further)

    for name in own:
        patch.setattr(builder, name, converted(name))
    patch.setattr(builder, "create_fma", create_fma)
    patch.setattr(builder, "create_dot", create_dot)

    def get_bf16(self: Any, value: float) -> Any:
        return handle(_as_bfloat16(np.array([value], np.float32)), language.bfloat16)

    patch.setattr(builder, "get_bf16", get_bf16, raising=False)


def _as_float32(bits: Any) -> Any:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _as_bfloat16(numbers: Any) -> Any:
    """Round to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _call(function: Any, *args: object, **options: object) -> object:
    """Call a function of a kernel that runs."""
    return function.rewrite()(*args, **options)


class _Dtypes:
    """numpy's dtypes for those of Triton."""

    def __init__(self, find: Callable[[Any], np.dtype[Any]]) -> None:
        self._find = find
        self._found: dict[str, np.dtype[Any]] = {}

    def __call__(self, dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in self._found:
            self._found[name] = self._find(dtype)
        return self._found[name]
