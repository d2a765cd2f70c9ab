// What only a device has; a test plays it on the host. All else here is plain C++.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

template <int N> struct Bits;
template <> struct Bits<1> { typedef unsigned char Type; };
template <> struct Bits<2> { typedef unsigned short Type; };
template <> struct Bits<4> { typedef u32 Type; };
template <> struct Bits<8> { typedef uint2 Type; };
template <> struct Bits<16> { typedef uint4 Type; };

__device__ __forceinline__ u32 acquire(const u32* a) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
    return v;
}
__device__ __forceinline__ void release(u32* a, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory");
}
// What a peer has written into a slot: never out of a cache that does not see it.
template <typename W>
__device__ __forceinline__ W fresh(const W* from) {
    typedef typename Bits<sizeof(W)>::Type B;
    B bits = __ldcg((const B*)from);
    return *(W*)&bits;
}
__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// All threads of a team have come here.
__device__ __forceinline__ void together() {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / TEAM + 1), "n"(TEAM) : "memory");
}

// Eight bytes with the sum's number beside each half: 16 bytes that are written and read as one, so that who sees the
// number sees the bytes.
__device__ __forceinline__ void put(char* at, uint2 v, u32 number) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(number), "r"(v.y), "r"(number) : "memory");
}
__device__ __forceinline__ bool get(const char* at, uint2& v, u32 number) {
    u32 a, b;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(a), "=r"(v.y), "=r"(b) : "l"(at) : "memory");
    return a == number && b == number;
}

// An address like others: NVRTC 13.0 fails where it looks through that of an argument.
__device__ __forceinline__ const i64* unseen(const i64* words) {
    asm volatile("" : "+l"(words));
    return words;
}

__device__ __forceinline__ float float_of_half(unsigned short bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}
__device__ __forceinline__ unsigned short half_of_float(float f) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}
__device__ __forceinline__ float float_of_brain(unsigned short bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ unsigned short brain_of_float(float f) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}
