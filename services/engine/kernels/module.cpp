// The extension module engine.kernels._kernels.
#include <nanobind/nanobind.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

// The best instruction set that the CPU has and the kernel keeps registers for.
// cpuid by hand and not __builtin_cpu_supports: zig's runtime answers that one with 0, always.
const char* isa() {
#if defined(__x86_64__)
    constexpr unsigned kXsave = 1u << 27;                        // leaf 1, ecx: OSXSAVE
    constexpr unsigned kFma = 1u << 12;                          // leaf 1, ecx
    constexpr unsigned kAvx2 = 1u << 5;                          // leaf 7.0, ebx
    constexpr unsigned kAvx512 =                                 // leaf 7.0, ebx:
        1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;               //   F, DQ, BW, VL
    constexpr unsigned kBf16 = 1u << 5;                          // leaf 7.1, eax
    constexpr unsigned kYmmState = 0x06, kZmmState = 0xe6;       // XCR0

    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & (kXsave | kFma)) != (kXsave | kFma)) {
        return "portable";
    }
    unsigned xcr0, high;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & kAvx2) ||
        (xcr0 & kYmmState) != kYmmState) {
        return "portable";
    }
    if ((ebx & kAvx512) != kAvx512 || (xcr0 & kZmmState) != kZmmState) {
        return "avx2";
    }
    const bool has_leaf_7_1 = eax >= 1;  // eax of leaf 7.0 is the highest subleaf
    if (has_leaf_7_1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kBf16)) {
        return "avx512_bf16";
    }
    return "avx512";
#else
    return "portable";
#endif
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.def("isa", &isa,
          "The best instruction set of this CPU: avx512_bf16, avx512, avx2 or portable.");
}
