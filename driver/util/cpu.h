/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.h - the instructions that differ between processors and have no portable name.
 */
#ifndef HIFC_CPU_H
#define HIFC_CPU_H

/* Tells the processor that this is a loop that waits for memory to change: it saves power, and the
 * other hardware thread of the core runs faster. A processor without such a hint does nothing. */
static inline void hifc_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    /* Not `yield`, which does nothing on most cores; `isb` takes about as long as x86's pause. */
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

#endif
