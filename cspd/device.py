"""The device: which one, its memory, precision, and transfers between it and the CPU."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import math
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cspd.option import check_integer
from cspd.terminal import switched_on

# The machine: its devices and their memory, its name in reports, and how repeated timings spread.

LARGE = 2**30  # bytes of weights that a message mentions


def pick_device(device: str | torch.device) -> torch.device:
    """The device with its index; "auto" is CUDA if available. Raises ValueError if the device cannot be used."""
    is_auto = device == "auto"
    if is_auto:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device: use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if picked.type == "cpu":
        return picked
    if picked.type == "mps":
        raise ValueError(
            f"device={device!r} is not supported: it lacks float64, which VQ models and calibrations use, and exact"
            " 64-bit integers, which all draws use: use device='cpu'"
        )
    if picked.type != "cuda":
        raise ValueError(f"device={device!r} is not supported: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch {torch.__version__} sees no CUDA device: use device='cpu'")
    if picked.index is None:  # the current device may change later
        picked = torch.device("cuda", torch.cuda.current_device())
    if picked.index >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r}, but there are {torch.cuda.device_count()} CUDA devices: use a lower index"
        )
    if _is_too_old(picked):
        problem = f"torch {torch.__version__} was not built for {torch.cuda.get_device_name(picked)}, an older GPU"
        if is_auto:
            warnings.warn(f"{problem}, so the CPU is used: install torch for an older CUDA version", stacklevel=2)
            return torch.device("cpu")
        raise ValueError(f"device={device!r}, but {problem}: install torch for an older CUDA version, or use 'cpu'")
    return picked


def _is_too_old(device: torch.device) -> bool:
    """Whether a GPU is older than all that this torch has kernels for, as a V100 is for CUDA 13."""
    built_for = [int(number) for number in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    major, minor = torch.cuda.get_device_capability(device)
    return bool(built_for) and 10 * major + minor < min(built_for)  # for ROCm there are other names


def seconds_of(
    work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds until a device has finished some work."""
    synchronize(device)
    start = clock()
    work()
    synchronize(device)
    return clock() - start


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device; all of it if the system does not tell."""
    if device.type == "cuda":
        # what torch's allocator holds and no tensor uses
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        return free + unused
    return _proc_bytes("/proc/meminfo", "MemAvailable") or all_bytes(device)


def all_bytes(device: torch.device) -> int:
    """Memory of a device, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if sys.platform == "win32":
        # a MEMORYSTATUSEX: its first number is its own size, and the second one all memory
        status = (ctypes.c_uint64 * 8)(64)
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return status[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _proc_bytes(path: str, name: str) -> int | None:
    """A value of a file in /proc, whose lines are such as "VmHWM:  1024 kB".

    None if it cannot be read: not on Linux, not in every container, or the process has too many files open.
    """
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    return None


def gibibytes(number: float) -> str:
    """A number of bytes for messages."""
    return f"{number / 2**30:.1f} GiB"


def room_told(needed: int, device: torch.device) -> str:
    """For a message, after the name of weights: the memory that they take of a device; empty if it is little."""
    return f", which takes {gibibytes(needed)} of {gibibytes(free_bytes(device))} free" if needed >= LARGE else ""


def check_fits(per_slot: int, max_batch: int, what: str, fix: str, device: torch.device, once: int = 0) -> None:
    """Raises ValueError unless `max_batch` slots of `per_slot` bytes, and `once` bytes for all of them, are free.

    Args:
        what: follows "max_batch=N" in the message. fix: the remedy if not even one slot fits.
    """
    check_integer("max_batch", max_batch, 1, 2**20, "it is the number of sequences in flight")
    free = free_bytes(device)
    needed = once + per_slot * max_batch
    if needed > free:
        most = (free - once) // per_slot
        if most > 0:
            fix = f"use max_batch <= {most}"
        raise ValueError(
            f"max_batch={max_batch}{what} needs about {gibibytes(needed)} and {device} has {gibibytes(free)} free:"
            f" {fix}"
        )


def describe(device: torch.device) -> dict:
    """The name of a device, the number of CPU threads, and the version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _cpu_name() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):  # Linux, where Python does not know the name
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


SLACK = 0.5  # of a CPU core that may be missing without a hint


class Load:
    """How many CPU cores other processes keep busy, from its creation on; known on Linux only."""

    def __init__(self) -> None:
        self._began = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float] | None:
        """The moment, and the seconds that all other processes and virtual machines have computed by then."""
        try:
            user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
        except (OSError, ValueError):
            return None
        busy = (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy - time.process_time()

    def cores(self) -> float:
        """The mean number of cores that others kept busy, 0 if that is not known."""
        ended = self._seconds()
        if self._began is None or ended is None or ended[0] == self._began[0]:
            return 0.0
        return max(0.0, (ended[1] - self._began[1]) / (ended[0] - self._began[0]))


def crowded(others: float, cores: int, threads: int) -> str | None:
    """A hint if this process' threads and `others` busy cores are more than there are, or None.

    All threads of an operation wait for the last one. On two cores, two threads beside one busy process were forty
    times as slow as one thread.
    """
    if threads == 1 or others + threads <= cores + SLACK:
        return None
    return (
        f"other programs keep {others:.1f} of {cores} CPU cores busy, and {threads} threads wait for each other:"
        f" --threads {max(1, int(cores - others))} may be many times as fast"
    )


def trim() -> None:
    """Returns to the system what earlier work has freed. Later work is slower until it has the memory again."""
    with contextlib.suppress(AttributeError, TypeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak(device: torch.device) -> None:
    """Starts measuring peak memory again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # only on Linux, and not in every container
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Peak bytes of the device, or on a CPU of this process, since `reset_peak`.

    If the system cannot reset the measurement, since the start of the process; 0 on Windows, which does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _proc_bytes("/proc/self/status", "VmHWM")
    if peak is not None:
        return peak
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# The precision policy.

POLICIES = {
    "fp32": "float32 throughout, but for decoding on CUDA: the reference",
    "tf32": "float32 storage, 10-bit mantissas inside CUDA matrix products; on a CPU the same as fp32",
    "bf16": "bfloat16 copies of the weights of matrix products; chain, tables and first denoising step in float32",
}
# switches in the environment, for CUDA
DECODING = "CSPD_TF32_DECODING"
# cuDNN has a plan for each batch and length, which takes it up to half a second to make, and our lengths vary
CUDNN_ATTENTION = "CSPD_CUDNN_ATTENTION"
Module = TypeVar("Module", bound=nn.Module)


class Precision:
    """The precision policy of an engine. Inside `fast`, modules from `prepare` compute as fast as the policy allows.

    Under every policy the first denoising step computes in float32, and images are decoded alike, see `decoding`.
    Inside all of these contexts attention does not use cuDNN, unless CSPD_CUDNN_ATTENTION=1 is in the environment.

    Raises:
        ValueError: the policy is unknown, or a switch in the environment is neither 0 nor 1.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        if not isinstance(policy, str) or policy not in POLICIES:
            raise ValueError(f"precision={policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy, self.device = policy, device
        self._tf32_decoding = switched_on(DECODING, usually=True)
        self._cudnn_attention = switched_on(CUDNN_ATTENTION, usually=False)
        self._prepared: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def prepare(self, module: Module) -> Module:
        """The module to compute with inside `fast`: under bf16, with bfloat16 copies of the weights of linear layers.

        The copies are made once and live as long as the module. All other parameters are shared with the module,
        which does not change. Children named in `FLOAT32` of its class are not copied. Neither is a module with an
        `own_type`: it computes in the type of its weights under every policy.
        """
        if self.policy != "bf16" or hasattr(module, "own_type"):
            return module
        if module not in self._prepared:
            if isinstance(module, nn.Linear):
                self._prepared[module] = BFloat16Linear(module)
            else:
                self._prepared[module] = self._twin(module)
        return self._prepared[module]

    def _twin(self, module: nn.Module) -> nn.Module:
        """A module with the same parameters and prepared children."""
        twin = copy.copy(module)
        twin._modules = dict(module._modules)  # the shallow copy would share it
        for name, child in self._copied(module):
            twin._modules[name] = self.prepare(child)
        return twin

    @staticmethod
    def _copied(module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The children whose linear layers have copies, by name."""
        exact = getattr(module, "FLOAT32", ())
        children = module._modules.items()  # `named_children` would leave out the second name of a shared child
        return [(name, child) for name, child in children if child is not None and name not in exact]

    def bytes_to_copy(self, module: nn.Module | None) -> int:
        """Bytes of the copies that `prepare` would make of a module, if it has not made them."""
        if self.policy != "bf16" or module is None or module in self._prepared or hasattr(module, "own_type"):
            return 0
        if isinstance(module, nn.Linear):
            return torch.bfloat16.itemsize * sum(parameter.numel() for parameter in module.parameters())
        return sum(self.bytes_to_copy(child) for _, child in self._copied(module))

    @property
    def dtype(self) -> torch.dtype:
        """The type of matrix products inside `fast`."""
        return torch.bfloat16 if self.policy == "bf16" else torch.float32

    def type_of(self, module: nn.Module) -> torch.dtype:
        """The type of this module's matrix products inside `fast`."""
        return getattr(module, "own_type", self.dtype)

    @property
    def uniform(self) -> bool:
        """Whether `fast` computes the same as `full`."""
        return self.policy == "fp32"

    def fast(self) -> contextlib.AbstractContextManager[None]:
        """A context in which matrix products are as fast as the policy allows."""
        return self._products(tf32=self.policy == "tf32")

    def full(self) -> contextlib.AbstractContextManager[None]:
        """A context in which matrix products are in true float32, also inside `fast`."""
        return self._products(tf32=False)

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """A context to decode images in: TF32 products on CUDA, unless CSPD_TF32_DECODING=0 is in the environment."""
        return self._products(tf32=self._tf32_decoding)

    def _products(self, tf32: bool) -> contextlib.AbstractContextManager[None]:
        if self.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):  # nothing would change
            return contextlib.nullcontext()
        return self._switch(tf32)

    @contextlib.contextmanager
    def _switch(self, tf32: bool) -> Iterator[None]:
        before = {flag: _flag(*flag) for flag in FLAGS}
        cudnn_before = torch.backends.cuda.cudnn_sdp_enabled()
        try:
            _set_products(tf32)
            torch.backends.cuda.enable_cudnn_sdp(self._cudnn_attention)
            with torch.autocast(self.device.type, enabled=False):  # the caller may have enabled it
                yield
        finally:
            for (module, name), value in before.items():
                if value is not None:
                    _set_flag(module, name, value)
            torch.backends.cuda.enable_cudnn_sdp(cudnn_before)

    def flags(self) -> dict[str, Any]:
        """Flags of torch inside `fast`, for records. They are of CUDA: the dictionary is empty on a CPU.

        "matmul_precision": of float32 products, "ieee" (float32 throughout) or "tf32". "bf16_reduction": whether sums
        of bfloat16 products may be rounded to bfloat16 on the way. "decoding": the precision of products that decode
        images. "cudnn_attention": whether attention may use cuDNN.
        """
        if self.device.type != "cuda":
            return {}
        with self.fast():
            is_tf32 = _flag(MATMUL, OLDER) or _flag(MATMUL, NEWER) == TF32
            allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
            cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
        return {
            "matmul_precision": TF32 if is_tf32 else IEEE,
            "bf16_reduction": allowed,
            "decoding": TF32 if self._tf32_decoding else IEEE,
            "cudnn_attention": cudnn_attention,
        }


# Flags of torch, which hold for the whole process. The precision of float32 products has two interfaces: `allow_tf32`,
# and from torch 2.9 `fp32_precision`. Setting the older one also sets the newer one. Reading the older one raises
# RuntimeError after the newer one was set to another value; until then torch.compile may read it.

MATMUL, CUDNN, CONV = "cuda.matmul", "cudnn", "cudnn.conv"  # in torch.backends
OLDER, NEWER, REDUCTION = "allow_tf32", "fp32_precision", "allow_bf16_reduced_precision_reduction"
FLAGS = ((MATMUL, OLDER), (CUDNN, OLDER), (MATMUL, NEWER), (CONV, NEWER), (MATMUL, REDUCTION))
TF32, IEEE = "tf32", "ieee"


def _flag(module: str, name: str) -> Any:
    """The value of a flag; None if this version of torch does not have it, or if it cannot be read."""
    try:
        owner = attrgetter(module)(torch.backends)
        value = getattr(owner, name)
    except (AttributeError, RuntimeError):
        return None
    split_k = getattr(owner, f"{name}_split_k", None)  # newer versions set both, and a single value would reset this
    return value if split_k is None else (value, split_k)


def _set_flag(module: str, name: str, value: Any) -> None:
    """Sets a flag, unless it has the value: one that is inherited from `torch.backends` would no longer be."""
    if _flag(module, name) != value:
        setattr(attrgetter(module)(torch.backends), name, value)


def _set_products(tf32: bool) -> None:
    """Sets the precision of float32 products, and keeps sums of bfloat16 products in float32."""
    for older, newer in ((MATMUL, MATMUL), (CUDNN, CONV)):
        if _flag(older, OLDER) is not None:
            _set_flag(older, OLDER, tf32)
        precision = _flag(newer, NEWER)
        if precision is not None and (precision == TF32) != tf32:  # False of the older one may mean: as inherited
            _set_flag(newer, NEWER, TF32 if tf32 else IEEE)
    reduction = _flag(MATMUL, REDUCTION)
    _set_flag(MATMUL, REDUCTION, (False, reduction[1]) if isinstance(reduction, tuple) else False)


def precision_of(precision: str | Precision, device: torch.device) -> Precision:
    """The policy with this name for a device; that of another engine on the same device is returned as it is.

    Raises:
        ValueError: the policy is unknown, or has its copies of weights on another device.
    """
    if not isinstance(precision, Precision):
        if precision == "bf16" and _emulates_bfloat16(device):
            warnings.warn(
                f"precision='bf16', which {torch.cuda.get_device_name(device)} emulates slowly: use precision='fp32'"
                " (--precision fp32)",
                stacklevel=3,
            )
        return Precision(precision, device)
    if precision.device != device:
        raise ValueError(
            f"precision is of an engine on {precision.device}, but this engine is on {device}: pass"
            f" {precision.policy!r} instead"
        )
    return precision


def _emulates_bfloat16(device: torch.device) -> bool:
    """Whether a device has no bfloat16 in hardware, as NVIDIA's GPUs before Ampere (V100, T4)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)


class BFloat16Linear(nn.Module):
    """A linear layer with weights and outputs in bfloat16; inputs may have any type."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        with torch.inference_mode(False):
            self.register_buffer("weight", linear.weight.detach().to(torch.bfloat16))
            self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


# Transfers between the CPU and a GPU without waiting: arrays are sent in one copy from pinned memory, and results are
# read as late as possible.

ALIGNMENT = 8  # bytes, enough for any type


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Sends arrays to a device: tensors by name, of the same shapes and types.

    On a GPU the tensors are views of one buffer, which is copied from pinned memory. On a CPU nothing is copied.
    """
    if device.type != "cuda":
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    parts: dict[str, slice] = {}
    total = 0
    for name, array in arrays.items():
        parts[name] = slice(total, total + array.nbytes)
        total += math.ceil(array.nbytes / ALIGNMENT) * ALIGNMENT
    # torch's allocator does not reuse this pinned memory before the copy from it has run
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    buffer = packed.numpy()
    for name, array in arrays.items():
        buffer[parts[name]] = array.reshape(-1).view(np.uint8)
    on_device = packed.to(device, non_blocking=True)
    sent = {}
    for name, array in arrays.items():
        dtype = torch.from_numpy(array).dtype
        sent[name] = on_device[parts[name]].view(dtype).view(array.shape)
    return sent


def on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Constants on a device, int64 or float32 [N]; cached forever, as a graph reads them at a fixed address."""
    return _on_device(numbers, not numbers or isinstance(numbers[0], int), device)


@functools.cache
def _on_device(numbers: tuple[float, ...], are_integers: bool, device: torch.device) -> Tensor:
    """`on_device`: as a key (0,) equals (0.0,), whose tensor has another type."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


def send_integers(values: Sequence | np.ndarray, device: torch.device) -> Tensor:
    """Sends integers to a device, as one int64 tensor."""
    return send({"values": np.asarray(values, dtype=np.int64)}, device)["values"]


class Report:
    """A tensor on its way to the CPU. Reading it waits only for work that was launched before the report was made."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            # by default the stream of the current device is taken, which may be another one
            self._arrived.record(torch.cuda.current_stream(values.device))

    def array(self) -> np.ndarray:
        """The values."""
        if self._arrived:
            self._arrived.synchronize()
        return self._values.numpy()

    def tolist(self) -> list:
        """The values as Python numbers."""
        return self.array().tolist()
