// What clang lacks of nvcc's language, for tools/compilers.sh: enough to compile our CUDA sources, not to run them fast.
#pragma once

#define grid_constant  // of __grid_constant__, which clang before 20 does not know: __attribute__((grid_constant))

inline __device__ uint4 __ldcs(const uint4* from) { return *from; }
inline __device__ void __stcs(uint4* to, uint4 value) { *to = value; }
