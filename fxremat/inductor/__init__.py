"""All that is known of Inductor: what it fuses, materialises and orders, and what its code allocates.

What a schedule becomes is predicted in stages, each of which reads what those before it found. They are best
read in this order:

    fusion           the rules that are modelled, and the stages: from a resolved schedule to its ``Lowering``
      facts          what is known of the graph's operators, whatever the schedule
        shown        what the code of other schedules has shown of its values
      segments       which recomputed steps may be fused, and which wait
      inlining       which values are computed inside of their readers; the others are *realized*
        operations   how many a loop takes
          terms      what was found of loops, of whatever schedule
        products     products of matrices that are computed with the sum that reads them
        concatenation    which concatenations the loops of their operands write to
      orders         which images are stored in the order of their sizes, and which channels last
      nests          over which ranges loops run on a CPU
        frames, ranges       how a loop goes through what it reads, and which loops may be one
      grouping       which realized loops become one kernel
        kernels, chains      a kernel, and what it needs of others; those whose outer loops are fused
      timing         when kernels run, and until when what they read is held
      buffers        which values get a buffer, and which take the place of another
        arrangement, copies     what images may take the place of, and what is copied to lie otherwise
        layout, pooling      two operators with ways of their own

Six modules have to do with Inductor itself:

    images, sequences, operands     what it is told of the order in which values lie that are read by
                         convolutions, by those over sequences, and by products
    order                what holds it to the plan's order: control dependencies, and marks of segments
    generated            what its code allocates, once it is there
    learning             what the code shows where the prediction errs
"""
