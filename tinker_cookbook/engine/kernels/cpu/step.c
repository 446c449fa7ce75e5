/* All kernels in one library, and the list of operations that computes the layers of a step.

   Each operation is a call of a kernel. One parallel region runs the whole list: threads are woken
   once for a step, not for each of some hundred operations. */

#include "attention.c"
#include "elementwise.c"
#include "product.c"

/* `count` calls of a kernel, which do not depend on one another. */
typedef struct {
    int64_t kind, count;
    const void *calls;
} Operation;

static void run(const Operation *o, int *failed) {
    enum { NORM, PRODUCT, ROTATION, ATTENTION, GATE, EXPONENTIALS }; /* as in build.py */
    for (int64_t i = 0; i < o->count; i++)
        switch (o->kind) {
            case NORM: norm((const Norm *)o->calls + i); break;
            case PRODUCT: products(o->calls, o->count); return; /* all at once */
            case ROTATION: rotation((const Rotation *)o->calls + i); break;
            case ATTENTION: attention((const Attention *)o->calls + i, failed); break;
            case GATE: gate((const Gate *)o->calls + i); break;
            case EXPONENTIALS: exponentials((const Exponentials *)o->calls + i); break;
        }
}

/* Runs operations, one after another. Returns 1 if memory runs out, else 0. */
int tinker_run(const Operation *list, int64_t count, int64_t threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        run(&list[i], &failed);
        /* The next operation reads the results of all threads. */
#pragma omp barrier
    }
    return failed;
}
