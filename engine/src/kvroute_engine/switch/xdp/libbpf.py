"""Compiling, loading and attaching BPF programs: clang as a command, libbpf through ctypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from kvroute_engine.errors import InputError

_LINK_XDP = 37
_NATIVE = 4
_INSTALL = "install clang, libbpf-dev and linux-libc-dev"


class XdpUnavailable(InputError):
    """This machine or process cannot run the program. The message says what is missing."""


class _LinkOptions(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("flags", ctypes.c_uint32), ("iterator_length", ctypes.c_uint32))


class _RunOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("data_in", ctypes.c_char_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("context_in", ctypes.c_char_p),
        ("context_out", ctypes.c_void_p),
        ("context_size_in", ctypes.c_uint32),
        ("context_size_out", ctypes.c_uint32),
        ("returned", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("duration_ns", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("cpu", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
    )


@cache
def _libbpf() -> ctypes.CDLL:
    for name in ("libbpf.so.1", "libbpf.so.0"):
        try:
            library = ctypes.CDLL(name, use_errno=True)
        except OSError:
            continue
        pointers = ("object__open_file", "object__find_program_by_name", "object__find_map_by_name")
        for function in pointers:
            getattr(library, f"bpf_{function}").restype = ctypes.c_void_p
        library.libbpf_set_print(None)
        return library
    raise XdpUnavailable("libbpf is not installed", where="XDP", hint=_INSTALL)


def compile_program(source: Path, folder: Path) -> Path:
    """Compile a C file to a BPF object file in `folder`, and return its path.

    Raises:
        XdpUnavailable: clang or the header files are missing.
    """
    clang = shutil.which("clang")
    if clang is None:
        raise XdpUnavailable("clang is not installed", where="XDP", hint=_INSTALL)
    target = folder / f"{source.stem}.o"
    headers = f"-I/usr/include/{sysconfig.get_config_var('MULTIARCH') or ''}"
    command = [clang, "-O2", "-g", "-mcpu=v3", "-target", "bpf", headers, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = next((line for line in done.stderr.splitlines() if "error" in line), "no error output")
        raise XdpUnavailable(f"clang cannot compile {source.name}: {why}", where="XDP", hint=_INSTALL)
    return target


class Map:
    """A map of a loaded program. Keys and values are bytes."""

    def __init__(self, descriptor: int, value_bytes: int) -> None:
        self.descriptor, self._value_bytes = descriptor, value_bytes

    def set(self, key: bytes, value: bytes) -> None:
        """Set an entry.

        Raises:
            OSError: the map is full.
        """
        assert len(value) == self._value_bytes
        if _libbpf().bpf_map_update_elem(self.descriptor, key, value, ctypes.c_uint64(0)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def get(self, key: bytes) -> bytes | None:
        """Return an entry; None if there is none."""
        value = ctypes.create_string_buffer(self._value_bytes)
        return None if _libbpf().bpf_map_lookup_elem(self.descriptor, key, value) else value.raw

    def remove(self, key: bytes) -> None:
        """Remove an entry, if it exists."""
        _libbpf().bpf_map_delete_elem(self.descriptor, key)

    def sum(self, number: int) -> int:
        """Return the sum over all CPUs of an entry of a per-CPU array of 8-byte numbers."""
        cpus = _libbpf().libbpf_num_possible_cpus()
        value = ctypes.create_string_buffer(8 * cpus)
        _libbpf().bpf_map_lookup_elem(self.descriptor, struct.pack("=I", number), value)
        return sum(struct.unpack(f"={cpus}Q", value.raw))


class Program:
    """A loaded BPF object file. Its programs and maps exist until `close` or the end of the process."""

    def __init__(self, source: Path, sizes: dict[str, int]) -> None:
        """Compile and load.

        Args:
            source: C file.
            sizes: number of entries of maps, by name, instead of those in the file.

        Raises:
            XdpUnavailable: a tool is missing, or the kernel refuses the program, such as for a missing privilege.
        """
        library = _libbpf()
        with tempfile.TemporaryDirectory() as folder:
            compiled = compile_program(source, Path(folder))
            self._object = library.bpf_object__open_file(str(compiled).encode(), None)
        if not self._object:
            raise XdpUnavailable("libbpf cannot read the program", where="XDP", hint="install libbpf 1.0 or later")
        for name, entries in sizes.items():
            found = library.bpf_object__find_map_by_name(ctypes.c_void_p(self._object), name.encode())
            library.bpf_map__set_max_entries(ctypes.c_void_p(found), ctypes.c_uint32(entries))
        if error := library.bpf_object__load(ctypes.c_void_p(self._object)):
            self.close()
            hint = "run it as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
            raise XdpUnavailable(f"the kernel refuses the program: {os.strerror(-error)}", where="XDP", hint=hint)

    def map(self, name: str, value_bytes: int) -> Map:
        """Return a map by its name."""
        library = _libbpf()
        return Map(library.bpf_object__find_map_fd_by_name(ctypes.c_void_p(self._object), name.encode()), value_bytes)

    def descriptor(self, name: str) -> int:
        """Return the file descriptor of a program by its name."""
        library = _libbpf()
        found = library.bpf_object__find_program_by_name(ctypes.c_void_p(self._object), name.encode())
        return int(library.bpf_program__fd(ctypes.c_void_p(found)))

    def attach(self, name: str, interface: int) -> int:
        """Attach a program to the driver of an interface; return a file descriptor that detaches it when closed.

        Raises:
            OSError: the driver does not support XDP, or another program is attached.
        """
        options = _LinkOptions(ctypes.sizeof(_LinkOptions), _NATIVE, 0)
        link = _libbpf().bpf_link_create(self.descriptor(name), interface, _LINK_XDP, ctypes.byref(options))
        if link < 0:
            raise OSError(-link, os.strerror(-link))
        return int(link)

    def run(self, name: str, frame: bytes, interface: int, repeat: int = 1) -> tuple[int, bytes, float]:
        """Run a program once or more on a frame, without a network.

        Args:
            name: name of the program.
            frame: Ethernet frame.
            interface: index of the interface by which the frame arrives.
            repeat: number of runs.

        Returns:
            The program's return code, the frame afterwards, and the mean time of one run in seconds.
        """
        output = ctypes.create_string_buffer(4096)
        context = struct.pack("=6I", 0, len(frame), 0, interface, 0, 0)
        options = _RunOptions(
            ctypes.sizeof(_RunOptions),
            data_in=frame,
            data_out=ctypes.cast(output, ctypes.c_void_p),
            data_size_in=len(frame),
            data_size_out=len(output),
            context_in=context,
            context_size_in=len(context),
            repeat=repeat,
        )
        if error := _libbpf().bpf_prog_test_run_opts(self.descriptor(name), ctypes.byref(options)):
            raise OSError(-error, os.strerror(-error))
        return options.returned, output.raw[: options.data_size_out], options.duration_ns * 1e-9

    def close(self) -> None:
        """Unload the programs and maps."""
        if self._object:
            _libbpf().bpf_object__close(ctypes.c_void_p(self._object))
        self._object = None
