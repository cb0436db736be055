"""Where the cases of the kernels run: in a process of their own under Triton's interpreter, and on a GPU.

Triton decides when a kernel is defined whether it is interpreted, and the interpreter replaces parts of Triton for
the whole process. So ``test_interpreted.py`` starts a process for them; they are not collected beside other tests.
``TRITON_INTERPRET=1 pytest tests/runtime/kernels`` runs them where a debugger can look.
"""

from __future__ import annotations

from tests.runtime.kernels.device import HAS_KERNELS, INTERPRETED

collect_ignore: list[str] = [] if HAS_KERNELS else ["cases"]
if INTERPRETED:
    # They start such a process, or look at what is there without one.
    collect_ignore += ["test_interpreted.py", "test_limits.py"]
