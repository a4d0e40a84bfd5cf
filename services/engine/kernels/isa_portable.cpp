// What every CPU has: SSE2 or NEON by way of the compiler's vector types.
#define CW_ISA kPortable
#define CW_NAME "portable"
#define CW_BYTES 16
#define CW_BF16 0
#define CW_ROWS 2
#include "isa.inl"
