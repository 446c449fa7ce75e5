/* All kernels in one library, and the list of operations that computes the layers of a step.

   Each operation is a call of a kernel. One parallel region runs the whole list: threads are woken
   once for a step, not for each of some hundred operations. */

#include "attention.c"
#include "elementwise.c"
#include "product.c"

enum { NORM, PRODUCT, ROTATION, ATTENTION, GATE };

/* `count` calls of a kernel, which do not depend on one another. */
typedef struct {
    int64_t kind, count;
    const void *calls;
} Operation;

/* Runs `count` operations, one after another. Returns 1 if memory runs out, else 0. */
int tinker_step(const Operation *list, int64_t count, int64_t threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const Operation *o = &list[i];
        if (o->kind == PRODUCT) products_of(o->calls, o->count);
        else
            for (int64_t j = 0; j < o->count; j++)
                switch (o->kind) {
                    case NORM: norms((const Norm *)o->calls + j); break;
                    case ROTATION: rotations((const Rotation *)o->calls + j); break;
                    case ATTENTION: attention((const Attention *)o->calls + j, &failed); break;
                    case GATE: gates((const Gate *)o->calls + j); break;
                }
        /* The next operation reads the results of all threads. */
#pragma omp barrier
    }
    return failed;
}
