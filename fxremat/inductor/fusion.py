"""Fusion: which values of a schedule get a buffer, and when the kernel that makes them runs. All its rules.

Without fusion every step is a kernel and every value has a buffer, or takes over that of an operand
(``memory/inplace.py``). Under Inductor these things differ:

1. *Inlining* (``inlining.py``). A pointwise value with few reads is not computed where it stands but inside
   each of its readers; what it reads is then held until the last of those has run. It is realized all the
   same if the backward or the caller needs it, if an external kernel reads it, if it draws random numbers, if
   windows of it are read and it reads more than one buffer, or if it is read more than once and expensive
   (more than 4 buffers read, or transcendental, on a CPU), or transcendental and broadcast. So it is if it
   takes many operations and reads more than one buffer (``operations.py``). What external kernels read
   through views is realized for the first of them, and so is what is added to a product; loops before that
   compute it themselves. A view of a value that reads one buffer is copied, where a product and others read
   it, and all other loops compute the value themselves. Sums of gradients of images are realized, since a
   plan has them so (``sums.py``).
2. *Fusion* (``grouping.py``). Realized loops over the same elements become one kernel where no path between
   them leaves it: a loop with what it reads, and loops near each other that read the same part of a buffer,
   or an input. A value that only its own kernel reads needs no buffer. Reductions over different dimensions
   do not fuse, nor one of outer dimensions and a loop over what it reads; nor does a loop that writes to
   places which are computed with what reads its result, nor on a CPU with any; nor, past an external kernel,
   reductions and a loop over what they write (``order.may_fuse``). The kernel runs where the first of its
   loops stands, or as soon as all that it reads is there (``timing.py``).
3. *Products.* A product of two matrices that a sum of the same size alone reads is computed with the sum,
   by ``addmm``, where the sum stands (``products.py``).
4. *In place* (``buffers.py``). A loop writes over an operand of the same size that no later kernel reads, nor
   a loop of its own kernel that it does not depend on; so does what is used inside of a kernel alone, and
   then a later loop of it over that, unless loops of it go through rows again on a CPU, as a softmax does.
   The first such operand that a loop reads it takes, be it one that its kernel alone uses and that has no
   buffer. Where images lie channels last, it does not if they lie otherwise in the other value: in the order
   of their sizes, or the channels of several as those of one (``orders.py``).
5. *Layout* (``layout.py``). Convolutions work channels last where Inductor says so, which it does for the
   forward and the backward apart. What they read of the caller's (weights, images) is copied at the forward's
   start, and the copy is held as long as a convolution or its gradient reads it.
   Parts of values that they read are copied alone (``copies.py``), and images that were stored as the
   channels of one, or as a concatenation in the order of its sizes (``arrangement.py``). Convolutions over
   sequences read copies of what neither lies in the order of its sizes nor is stored for them
   (``sequences.py``); these count while the convolution runs, beside what is copied if that is read again. A
   CPU makes them in one call, others one after the other.
6. *Concatenation* (``concatenation.py``). Where the operands' loops and products write to slices of the
   result, its buffer is allocated with the first of them, and an operand that nothing has fixed otherwise is
   read from there. On a GPU it is a loop of its own instead where all operands would have to be copied, or
   one and loops alone read it. An operand that is copied there by a near kernel is read by that kernel, not
   where the concatenation stands; what one is computed of, alone, has no buffer then.

On a CPU two more:

7. *Rows.* Numbers that are drawn for a kernel that reduces rows have a buffer: they are drawn in a loop over
   all elements.
8. *Ranges.* Loops over the same elements are fused where they run over the same ranges, one inside of the
   other, or one over all as if they had one dimension, of the same sizes and not fused yet. A loop that
   reads one mask for several heads, and one over rows that reads none, are not (``nests.py``). One over all
   is fused first with a reader that reads all that it does. Kernels with the same outermost ranges, one of
   which reads what another computes, run as one in the end, and hold all that they work on (``chains.py``).

Inductor would run all loops between two external kernels in one call on a CPU, and hold what they need all
the while. Such groups end where a plan needs it (``kernel_groups.py``), so each loop counts by itself here.
Those that are made for one external kernel, right before it, are of one call.

A value of pooling may be computed again where it is read, and its gradient may be a scatter (``pooling.py``).

This is a model of Inductor's defaults, not Inductor: it sees operators and sizes, and little of loop indices.
How far it is off is a tested figure (docs/limits). What code has shown of a value goes before the rules
(``shown.py``). Linear in steps and reads.
"""

from __future__ import annotations

from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.inductor.buffers import buffers
from fxremat.inductor.grouping import group
from fxremat.inductor.timing import timing
from fxremat.memory.lowering import Lowering


def lower(graph: JointGraph, binding: Binding) -> Lowering:
    """What Inductor makes of a resolved schedule of a traced graph."""
    grouping = group(graph, binding)
    return buffers(grouping, timing(grouping))
