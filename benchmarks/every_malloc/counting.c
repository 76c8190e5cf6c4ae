/* Counts every malloc of a process, refuses above an exact limit, and fails one chosen allocation.
 *
 * Loaded before the C library (LD_PRELOAD). What counts is what the allocator hands out (malloc_usable_size). Allocations of
 * fewer than LARGE bytes are counted and never refused: Python itself would die of it, where a tensor is what is asked about.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

#define LARGE 2048

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long live, peak, limit = -1, countdown = -1, num_large, num_refused;
static int signal_of_refusals;

static int refuses(long size) {
    if (size < LARGE) return 0;
    atomic_fetch_add(&num_large, 1);
    long most = atomic_load(&limit);
    int over = most >= 0 && atomic_load(&live) + size > most;
    if (atomic_load(&countdown) >= 0 && atomic_fetch_sub(&countdown, 1) == 0) over = 1;
    if (over) {
        atomic_fetch_add(&num_refused, 1);
        if (signal_of_refusals) raise(signal_of_refusals);
        errno = ENOMEM;
    }
    return over;
}

static void *taken(void *p) {
    if (p) {
        long size = (long)malloc_usable_size(p), now = atomic_fetch_add(&live, size) + size;
        long before = atomic_load(&peak);
        while (now > before && !atomic_compare_exchange_weak(&peak, &before, now)) {}
    }
    return p;
}

void *malloc(size_t n) { return refuses((long)n) ? NULL : taken(__libc_malloc(n)); }
void *calloc(size_t n, size_t m) { return refuses((long)(n * m)) ? NULL : taken(__libc_calloc(n, m)); }
void *memalign(size_t a, size_t n) { return refuses((long)n) ? NULL : taken(__libc_memalign(a, n)); }
void *aligned_alloc(size_t a, size_t n) { return memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) {
    void *q = memalign(a, n);
    if (!q) return ENOMEM;
    *p = q;
    return 0;
}
void free(void *p) {
    if (p) atomic_fetch_sub(&live, (long)malloc_usable_size(p));
    __libc_free(p);
}
void *realloc(void *p, size_t n) {
    long was = p ? (long)malloc_usable_size(p) : 0;
    if ((long)n > was && refuses((long)n - was)) return NULL;
    void *q = __libc_realloc(p, n);
    if (q || n == 0) { atomic_fetch_sub(&live, was); taken(q); }
    return q;
}

long counted_live(void) { return atomic_load(&live); }
long counted_peak(void) { return atomic_load(&peak); }
void counted_restart(void) { atomic_store(&peak, atomic_load(&live)); atomic_store(&num_large, 0); atomic_store(&num_refused, 0); }
void counted_limit(long most) { atomic_store(&limit, most); }
void counted_signal(int number) { signal_of_refusals = number; }
void counted_fail_after(long n) { atomic_store(&countdown, n); }
long counted_large(void) { return atomic_load(&num_large); }
long counted_refused(void) { return atomic_load(&num_refused); }
