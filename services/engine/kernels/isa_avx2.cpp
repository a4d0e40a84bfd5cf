#define CW_ISA kAvx2
#define CW_NAME "avx2"
#define CW_BYTES 32
#define CW_BF16 0
#define CW_ROWS 3
#include "isa.inl"
