"""`Gpu`: what the backend asks of a device: arrays on it, copies to and from it, and launches, all on one stream."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import CapacityExceeded, ConfigError, StageError
from .._arrays import I64Array
from .compile import INSTALL, cubin

DeviceArray: TypeAlias = Any
"""A C-contiguous array in device memory, with NumPy's `shape`, `dtype`, `size`, `reshape`, `view` and slices of its first
axis: a CuPy array on a GPU."""
Size: TypeAlias = tuple[int, ...]
"""Of a grid or a block: one to three numbers."""


class Gpu(ABC):
    """A device and a stream on it. Everything is done in the order in which it was asked for.

    Attributes:
        name: what messages call it.
    """

    name: str

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that the device can still give."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array of any values.

        Raises:
            CapacityExceeded: the device has not that many bytes.
        """

    @abstractmethod
    def persistent(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array of any values in an allocation of its own, which can be shared. Raises as `empty`."""

    @abstractmethod
    def share(self, array: DeviceArray) -> bytes:
        """What another process of this machine attaches a `persistent` array by.

        Raises:
            StageError: the system shares no memory of devices.
        """

    @abstractmethod
    def attach(self, handle: bytes, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array that another process shares, on this device or another; it is there while the other process lives.

        Raises:
            StageError: this process cannot have it.
        """

    @abstractmethod
    def upload(self, array: NDArray[Any]) -> DeviceArray:
        """A copy on the device. Raises as `empty`."""

    def upload_tables(self, *tables: I64Array) -> list[DeviceArray]:
        """Copies of i64 tables on the device, in one transfer: what takes the time is their number."""
        flat = self.upload(np.concatenate([table.reshape(-1) for table in tables]))
        ends = np.cumsum([table.size for table in tables]).tolist()
        return [flat[end - table.size : end] for table, end in zip(tables, ends, strict=True)]

    @abstractmethod
    def download(self, array: DeviceArray) -> NDArray[Any]:
        """A copy on the host, once all before it is done."""

    @abstractmethod
    def clear(self, array: DeviceArray) -> None:
        """Zeroes an array."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until all that was asked for is done."""

    @abstractmethod
    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Copies between arrays of one shape and dtype that do not overlap; `dst` may be on another device."""

    @abstractmethod
    def export(self, array: DeviceArray) -> Any:
        """What has `__dlpack__` and `__dlpack_device__` for an array: whoever takes it over waits for what was asked for until
        then, on a stream of its own."""

    @abstractmethod
    def address(self, array: DeviceArray) -> int:
        """Where an array begins on the device."""

    @abstractmethod
    def launch(self, kernel: str, grid: Size, block: Size, args: Sequence[Any], shared: int = 0) -> None:
        """Launches a kernel of `src/kernels.cu` on a grid of blocks of threads, each with `shared` bytes.

        `args` are device arrays and NumPy scalars of the very types that the kernel declares.
        """

    @abstractmethod
    def lost(self, error: BaseException) -> bool:
        """Whether an error is the device's own, after which it does nothing more in this process: an illegal address, a fault
        of its memory, that it is gone."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what is under way, and gives back what is kept for later arrays."""


class CupyGpu(Gpu):
    """A GPU by CuPy, on a stream of its own that does not wait for others.

    Args:
        index: its number among the visible devices.

    Raises:
        ConfigError: CuPy is not installed, or there is no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        self._cupy = cupy = _cupy()
        count = visible_gpus()
        if not 0 <= index < count:
            raise ConfigError(f"GPU {index} of {count}: there is none; use --device cpu, or look at CUDA_VISIBLE_DEVICES")
        self._device = cupy.cuda.Device(index)
        with self._device:
            properties = cupy.cuda.runtime.getDeviceProperties(index)
            self.name = f"{properties['name'].decode()} {identity(properties, self._device.pci_bus_id)}"
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._module = cupy.RawModule(path=str(cubin(f"sm_{properties['major']}{properties['minor']}")))
        self._functions: dict[str, Any] = {}

    def free_bytes(self) -> int:
        with self._device:
            return int(self._cupy.cuda.runtime.memGetInfo()[0]) + int(self._cupy.get_default_memory_pool().free_bytes())

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        try:
            with self._device, self._stream:
                return self._cupy.empty(shape, dtype)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise CapacityExceeded(f"{self.name}: {error}; close sessions, or pass a smaller budget_bytes") from error

    def persistent(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        with self._device:
            try:
                memory = self._cupy.cuda.Memory(size)  # not of the pool: a handle names the allocation that holds an array
            except self._cupy.cuda.runtime.CUDARuntimeError as error:
                raise CapacityExceeded(f"{self.name}: no {size} bytes ({error}); pass a smaller budget_bytes") from error
            return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    def share(self, array: DeviceArray) -> bytes:
        with self._device:
            try:
                return bytes(self._cupy.cuda.runtime.ipcGetMemHandle(array.data.ptr))
            except self._cupy.cuda.runtime.CUDARuntimeError as error:
                raise StageError(f"{self.name} shares no memory with other processes: {error}") from error

    def attach(self, handle: bytes, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        cupy, size = self._cupy, math.prod(shape) * np.dtype(dtype).itemsize
        with self._device:
            try:
                address = cupy.cuda.runtime.ipcOpenMemHandle(handle)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise StageError(f"{self.name} cannot reach the memory of the next stage's GPU: {error}") from error
            memory = cupy.cuda.UnownedMemory(address, size, self, self._device.id)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        out = self.empty(array.shape, array.dtype)
        with self._device:
            out.set(np.ascontiguousarray(array), stream=self._stream)
        return out

    def download(self, array: DeviceArray) -> NDArray[Any]:
        with self._device:
            host: NDArray[Any] = array.get(stream=self._stream)
            self._stream.synchronize()
        return host

    def wait(self) -> None:
        self._stream.synchronize()

    def clear(self, array: DeviceArray) -> None:
        with self._device:
            array.data.memset_async(0, array.nbytes, self._stream)

    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        with self._device:
            dst.data.copy_from_device_async(src.data, src.nbytes, self._stream)

    def export(self, array: DeviceArray) -> Any:
        return _Exported(array, self._device, self._stream)

    def address(self, array: DeviceArray) -> int:
        return int(array.data.ptr)

    def launch(self, kernel: str, grid: Size, block: Size, args: Sequence[Any], shared: int = 0) -> None:
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = self._module.get_function(kernel)
        if shared > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared
        with self._device, self._stream:
            function(grid, block, tuple(args), shared_mem=shared)

    def lost(self, error: BaseException) -> bool:
        cuda = self._cupy.cuda
        return isinstance(error, cuda.runtime.CUDARuntimeError | cuda.driver.CUDADriverError)

    def close(self) -> None:
        self.wait()
        with self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()


class _Exported:
    """An array for other libraries. CuPy has their stream wait for the one that is current when they ask."""

    def __init__(self, array: DeviceArray, device: Any, stream: Any) -> None:
        self._array, self._device, self._stream = array, device, stream

    def __dlpack__(self, **asked: Any) -> Any:
        with self._device, self._stream:
            return self._array.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


def visible_gpus() -> int:
    """How many GPUs this process sees; none without a driver.

    Raises:
        ConfigError: CuPy is not installed.
    """
    runtime = _cupy().cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def identity(properties: Mapping[str, Any], pci_bus_id: str) -> str:
    """What names a device however devices are numbered: its UUID, as `nvidia-smi -L` writes it, else its place on the bus.

    CuPy gives the UUID as a C string, which ends at a byte that is 0: then it is not whole.
    """
    digits = bytes(properties.get("uuid", b"")).hex()
    if len(digits) != 32:
        return pci_bus_id
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"the CUDA backend needs CuPy ({error}): {INSTALL}") from error
    return cupy
