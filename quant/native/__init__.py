"""Kernels in C++ for x86-64, as a shared library that Python calls through ctypes.

`build` compiles it where g++ is found, `library` loads it. Everything works without it, slower.

A kernel is a C++ file of its own that is compiled once for each instruction set (`build.SETS`), with MOEDGE_SET as the
suffix of every name that it exports. To add one:

1. Write `NAME.cpp`. Put all code into an anonymous namespace, except functions `extern "C" ... MOEDGE_NAMED(function)`.
   Use no templates of the standard library: the linker would keep one instruction set's copy of them for all. Allocate
   nothing and start no thread: a kernel computes the work items `begin` to `end`, in scratch that its caller owns, and
   Python's worker pool calls it from its threads (ctypes releases Python's lock).
2. Add the file to `build.KERNELS`.
3. Write the struct of its arguments into `interface.h`, and name ctypes' structure of it in `library.py`, which reads
   the fields from there. Add the function to MOEDGE_KERNELS in `moedge_cpu.h`; `library.cpp` then exports it under its
   plain name and calls the one for the instruction set that was chosen.
   One that has code for processors without AVX2 is in MOEDGE_PORTABLE_KERNELS and `build.PORTABLE`: its file is
   compiled with MOEDGE_LEVEL 0 as well, and Python asks for it by `library.portable`.
4. Call it where Python needs it (`library.function`, with a pointer to the structure).

The sum of a result must not depend on how work is divided into items, nor on neighbouring items.
"""
