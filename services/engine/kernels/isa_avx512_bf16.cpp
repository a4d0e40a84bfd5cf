#define CW_ISA kAvx512Bf16
#define CW_NAME "avx512_bf16"
#define CW_BYTES 64
#define CW_BF16 1
#define CW_ROWS 12
#include "isa.inl"
