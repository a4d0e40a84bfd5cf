#define CW_ISA kAvx512
#define CW_NAME "avx512"
#define CW_BYTES 64
#define CW_BF16 0
#define CW_ROWS 12
#include "isa.inl"
