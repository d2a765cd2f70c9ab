// A movement: boxes to and from the lanes, and boxes that stay.

struct Movement {      // by value: a table that fits costs no look into memory
    u64 fault;         // a word of the host's, which says what a kernel waited for in vain
    u64 limit;         // nanoseconds that it waits
    u64 table;         // the table's address; 0: it is `words`
    u32 movers;        // teams that send or receive; blocks behind theirs copy what stays
    u32 name;          // of the movement, for `fault`
    char* base[BASES]; // the tensors' addresses
    i64 words[INLINE];
};

__device__ __forceinline__ u32 over(u32 n, i64 divisor, u32 shift) {  // n / size, of (size, factor) packed as one
    return __umulhi(n, (u32)(divisor >> 32)) >> (shift & 31);
}

// The boxes of one message, or of what stays, as words of one size, which are numbered through: where word j of a chunk is.
template <bool PLAIN>  // one box of two dims at most: all of it is in registers
struct Boxes {
    const i64* parts;
    char* const* base;
    u32 count;
    i64 first;       // the chunk's first word
    int begin, end;  // the words of the chunk that the current box may have
    const i64* part;
    char* at;
    i64 divisor, inner, outer;
    u32 shift, length;

    __device__ __forceinline__ Boxes(const i64* parts, u32 count, char* const* base) : parts(parts), base(base), count(count), begin(0), end(0) {
        if (PLAIN) {
            at = base[parts[2]] + parts[3];
            divisor = parts[6], inner = parts[7], outer = parts[9];
            shift = parts[5], length = parts[1];
        }
    }
    __device__ __forceinline__ void enter(i64 word) {
        first = word;
        begin = end = 0;
    }
    __device__ void find(u32 j) {  // the last box that begins at or before a word
        u32 low = 0, high = count - 1;
        while (low < high) {
            u32 middle = (low + high + 1) / 2;
            if (parts[middle * PART] <= first + j) low = middle; else high = middle - 1;
        }
        part = parts + low * PART;
        begin = (int)(part[0] - first);
        i64 stop = low + 1 < count ? part[PART] - first : FAR;
        end = stop < FAR ? (int)stop : FAR;
    }
    __device__ __forceinline__ char* operator()(u32 j) {  // null: a gap between boxes
        if (PLAIN) {
            u32 rest = (u32)first + j, q = over(rest, divisor, shift);
            return rest < length ? at + (rest - q * (u32)divisor) * inner + q * outer : nullptr;
        }
        if ((int)j < begin || (int)j >= end) find(j);
        u32 rest = j - begin;
        if (rest >= (u32)part[1]) return nullptr;
        char* found = base[part[2]] + part[3];
        u32 dims = part[4];
        const i64* dim = part + 6;
        for (u32 d = 0; d + 1 < dims; ++d, dim += 2) {
            u32 q = over(rest, dim[0], (u32)(part[5] >> (5 * d)));
            found += (rest - q * (u32)dim[0]) * dim[1];
            rest = q;
        }
        return found + rest * dim[1];
    }
};

// One lane of one message, at one of its ends.
template <typename W, bool SENDS, bool PLAIN>
__device__ __forceinline__ void carry(const Movement& m, const i64* table, const i64* message, u32 lane) {
    __shared__ u32 starts[THREADS / TEAM];
    u32& start = starts[threadIdx.x / TEAM];
    const u32 thread = threadIdx.x % TEAM;
    const i64 total = message[1];
    const u32 per = message[2], lanes = message[3];
    Boxes<PLAIN> boxes(table + message[6], message[5], m.base);
    if (thread == 0) start = *(const u32*)(message[10] + lane * LINE);
    u32 k = 0;
    for (i64 first = (i64)lane * per; first < total; first += (i64)lanes * per, ++k) {
        const u32 n = total - first < per ? total - first : per;
        u32 j = thread;
        W v[UNROLL];
        boxes.enter(first);
        u32 there = 0;
        if (SENDS) {
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u) {
                char* from = j + u * TEAM < n ? boxes(j + u * TEAM) : nullptr;
                if (from) v[u] = *(const W*)from, there |= 1 << u;
            }
        }
        if (thread == 0) await((const u32*)(message[8] + lane * LINE), start + k + 1 - (SENDS ? SLOTS : 0), m, message[11]);
        together();
        W* slot = (W*)(message[7] + (i64)(lane * SLOTS + (start + k) % SLOTS) * CAPACITY);
        while (j < n) {
            if (SENDS) {
#pragma unroll
                for (u32 u = 0; u < UNROLL; ++u) {
                    if (there >> u & 1) slot[j + u * TEAM] = v[u];
                }
                j += UNROLL * TEAM, there = 0;
#pragma unroll
                for (u32 u = 0; u < UNROLL; ++u) {
                    char* from = j + u * TEAM < n ? boxes(j + u * TEAM) : nullptr;
                    if (from) v[u] = *(const W*)from, there |= 1 << u;
                }
            } else {
#pragma unroll
                for (u32 u = 0; u < UNROLL; ++u) {
                    if (j + u * TEAM < n) v[u] = fresh(slot + j + u * TEAM);
                }
#pragma unroll
                for (u32 u = 0; u < UNROLL; ++u) {
                    char* to = j + u * TEAM < n ? boxes(j + u * TEAM) : nullptr;
                    if (to) *(W*)to = v[u];
                }
                j += UNROLL * TEAM;
            }
        }
        together();
        if (thread == 0) release((u32*)(message[9] + lane * LINE), start + k + 1);
    }
    if (thread == 0) *(u32*)(message[10] + lane * LINE) = start + k;
}

// What stays: pairs of boxes of one shape.
template <typename W, bool PLAIN>
__device__ __forceinline__ void keep(const Movement& m, const i64* table, const i64* kept, u32 block, u32 blocks) {
    Boxes<PLAIN> from(table + kept[3], kept[0], m.base), to(table + kept[4], kept[0], m.base);
    const u32 per = UNROLL * THREADS;
    const i64 total = kept[1];
    for (i64 first = (i64)block * per; first < total; first += (i64)blocks * per) {
        const u32 n = total - first < per ? total - first : per;
        from.enter(first);
        to.enter(first);
        W v[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u) {
            u32 j = threadIdx.x + u * THREADS;
            if (j < n) v[u] = *(const W*)from(j);
        }
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u) {
            u32 j = threadIdx.x + u * THREADS;
            if (j < n) *(W*)to(j) = v[u];
        }
    }
}

// (word, whether there is one box of two dims at most) to an instance
#define EACH(word, plain, call)                                     \
    switch (word) {                                                 \
        case 16: if (plain) { call(uint4, true); } else { call(uint4, false); } break; \
        case 8: call(uint2, false); break;                          \
        case 4: if (plain) { call(u32, true); } else { call(u32, false); } break; \
        case 2: call(unsigned short, false); break;                 \
        default: call(unsigned char, false);                        \
    }
#define SEND(W, PLAIN) carry<W, true, PLAIN>(m, table, message, lane)
#define RECEIVE(W, PLAIN) carry<W, false, PLAIN>(m, table, message, lane)
#define KEEP(W, PLAIN) keep<W, PLAIN>(m, table, kept, blockIdx.x - movers, gridDim.x - movers)

extern "C" __global__ void __launch_bounds__(THREADS, 1) move_boxes(const __grid_constant__ Movement m) {
    const i64* table = m.table ? (const i64*)m.table : unseen(m.words);
    const u32 movers = (m.movers * TEAM + THREADS - 1) / THREADS;
    if (blockIdx.x < movers) {
        const u32 team = (blockIdx.x * THREADS + threadIdx.x) / TEAM;
        if (team >= m.movers) return;
        const i64 entry = table[team];
        const i64* message = table + (u32)entry;
        const u32 lane = entry >> 32;
        if (message[0]) {
            EACH(message[4], message[12], SEND)
        } else {
            EACH(message[4], message[12], RECEIVE)
        }
    } else {
        const i64* kept = table + m.movers;
        EACH(kept[2], kept[5], KEEP)
    }
}
