# Registers memory through the C API, and then forks workers. Each worker writes to its copy of the
# memory and opens the device itself.

import ctypes
import mmap
import multiprocessing

verbs = ctypes.CDLL("libibverbs.so.1")
for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
    getattr(verbs, name).restype = ctypes.c_void_p

LENGTH = 1 << 20


def domain():
    devices = ctypes.cast(verbs.ibv_get_device_list(None), ctypes.POINTER(ctypes.c_void_p))
    context = verbs.ibv_open_device(ctypes.c_void_p(devices[0]))
    return ctypes.c_void_p(verbs.ibv_alloc_pd(ctypes.c_void_p(context)))


def register(pd, memory):
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    region = verbs.ibv_reg_mr(pd, ctypes.c_void_p(address), ctypes.c_size_t(LENGTH), 7)
    assert region, "not registered"
    return region


shared = mmap.mmap(-1, LENGTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def work(number):
    before = shared[:LENGTH] == b"\x07" * LENGTH
    shared[:LENGTH] = bytes([number]) * LENGTH
    own = mmap.mmap(-1, LENGTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own[:LENGTH] = b"\x01" * LENGTH
    register(domain(), own)
    return before and shared[:LENGTH] == bytes([number]) * LENGTH


if __name__ == "__main__":
    shared[:LENGTH] = b"\x07" * LENGTH
    register(domain(), shared)
    with multiprocessing.get_context("fork").Pool(3, maxtasksperchild=1) as pool:
        assert all(pool.map(work, range(20, 26), chunksize=1)), "a worker has other memory contents"
    assert shared[:LENGTH] == b"\x07" * LENGTH, "a worker changed its parent's memory"
    print("done")
