"""CPU kernels compiled by numba and called through XLA's typed FFI, without a C compiler.

support       whether they can run in this process, and with which vector instructions
call_frame    reading XLA's call frame by byte offset, errors, small LLVM intrinsics
object_cache  compiled code kept on disk in a folder private to the user
parallel      handlers whose work items run on XLA's own thread pool
vectors       a small emitter of 16-lane LLVM vector code
"""
