// What memory gives the W4A8 GEMM: its ring of shared-memory stages and its copies, without its arithmetic.
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -DSLOTS=14 -o read_weights read_weights.cu && ./read_weights
//
// A tile is 128 rows; a step of it 128 input channels: two warps copy 64 rows' codes (4 KB) and level 2 (2 x 128 bytes)
// each, a third 16 tokens (2 KB); eight warps wait for a stage and free it. SLOTS up to 10: two blocks an SM. `rotation`
// starts blocks at other steps of a tile (1: evenly spread, 2: scattered). CUDA graphs over 3 GB, launches overlap, medians.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

typedef unsigned char u8;
typedef unsigned int u32;

#define CHECK(call)                                                                \
    do {                                                                           \
        const cudaError_t error = (call);                                          \
        if (error != cudaSuccess) {                                                \
            std::printf("%s: %s\n", #call, cudaGetErrorString(error)), std::exit(1); \
        }                                                                          \
    } while (0)

constexpr int kSlots = SLOTS, kCodes = 4096, kLevel2 = 128, kTokens = 2048, kStage = 2 * kCodes + 4 * kLevel2 + kTokens;
constexpr long kPool = 3l << 30, kFirst = 1 << 20;  // tokens lie before kFirst

struct Params {
    const u8 *codes, *level2, *tokens;
    int steps, tiles, rotation;
};

__device__ __forceinline__ void wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}
__device__ __forceinline__ bool elect() {
    u32 one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one)::"memory");
    return one;
}
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void grid_release() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <bool kWithTokens, bool kWithLevel2>
__global__ void __launch_bounds__(384) read(Params p) {
    extern __shared__ __align__(1024) u8 raw[];
    const u32 base = static_cast<u32>(__cvta_generic_to_shared(raw)), bars = base + kSlots * kStage;  // full, empty of each slot
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) init(bars + 16 * i, kWithTokens ? 3 : 2), init(bars + 16 * i + 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), w = warp - 8, blocks = gridDim.x, block = blockIdx.x;
    int slot = 0;
    u32 parity = 0;
    if (w == 3 || (w == 2 && !kWithTokens)) return;
    if (w < 0 || w == 2) grid_wait();
    for (int tile = block; tile < p.tiles; tile += blocks) {
        const u8* codes = p.codes + (2l * tile + w) * p.steps * kCodes;
        const u8* level2 = p.level2 + (4l * tile + w) * p.steps * kLevel2;
        int step = p.rotation == 1 ? block * p.steps / blocks : p.rotation == 2 ? (block * 37 + 11 * (block / 16)) % p.steps : 0;
        for (int i = 0; i < p.steps; ++i) {
            const u32 full = bars + 16 * slot, at = base + slot * kStage;
            if (w < 0) {
                wait(full, parity);
                if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(full + 8) : "memory");
            } else {
                wait(full + 8, parity ^ 1);
                if (elect()) {
                    if (w == 2) {
                        expect(full, kTokens);
                        copy(at + 2 * kCodes + 4 * kLevel2, p.tokens + step * kTokens, kTokens, full);
                    } else {
                        expect(full, kCodes + (kWithLevel2 ? 2 * kLevel2 : 0));
                        copy(at + w * kCodes, codes + static_cast<long>(step) * kCodes, kCodes, full);
                        if (kWithLevel2)
                            for (int part = 0; part < 2; ++part)
                                copy(at + 2 * kCodes + (2 * part + w) * kLevel2, level2 + (2l * part * p.steps + step) * kLevel2, kLevel2, full);
                    }
                }
                if (++step == p.steps) step = 0;
                if (w == (kWithTokens ? 2 : 0) && tile + blocks >= p.tiles && i == max(0, p.steps - kSlots)) grid_release();
            }
            if (++slot == kSlots) slot = 0, parity ^= 1;
        }
    }
}

__global__ void fill(u32* p, long n) {
    for (long i = blockIdx.x * 256l + threadIdx.x; i < n; i += gridDim.x * 256l) p[i] = i * 2654435761u;
}

template <bool kWithTokens, bool kWithLevel2>
void measure(u8* pool, int tiles, int steps, int rotation) {
    const int blocks = kSlots > 10 ? 132 : 264, shared = kSlots * (kStage + 16);
    CHECK(cudaFuncSetAttribute(read<kWithTokens, kWithLevel2>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    const long codes = 2l * kCodes * steps * tiles, each = (codes + 4l * kLevel2 * steps * tiles + 4095) / 4096 * 4096;
    const int copies = static_cast<int>(std::min((kPool - kFirst) / each, 24l));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < copies; ++i) {
        const u8* here = pool + kFirst + i * each;
        cudaLaunchAttribute overlap;
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization, overlap.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = blocks, config.blockDim = 384, config.dynamicSmemBytes = shared, config.stream = stream;
        config.attrs = &overlap, config.numAttrs = 1;
        CHECK(cudaLaunchKernelEx(&config, read<kWithTokens, kWithLevel2>, Params{here, here + codes, pool, steps, tiles, rotation}));
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0ull));
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 12; ++i) {
        float ms;
        CHECK(cudaEventRecord(start, stream));
        CHECK(cudaGraphLaunch(replay, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms, start, end));
        if (i > 2) times.push_back(1000 * ms / copies);
    }
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2], bytes = (2. * kCodes + (kWithLevel2 ? 4 * kLevel2 : 0)) * steps * tiles;
    std::printf("%3d tiles x %3d steps, %d slots, rotation %d, tokens %d, level 2 %d: %6.2f us, %.3f TB/s\n", tiles, steps, kSlots,
                rotation, kWithTokens, kWithLevel2, us, bytes / us / 1e6);
}

int main() {
    u8* pool;
    CHECK(cudaMalloc(&pool, kPool));
    fill<<<1024, 256>>>(reinterpret_cast<u32*>(pool), kPool / 4);
    CHECK(cudaDeviceSynchronize());
    for (int tiles : {396, 448, 528})  // 448 x 64: gate_up of Llama-2-70B, 3.4 waves of 132
        for (int rotation : {0, 1, 2}) {
            measure<false, false>(pool, tiles, 64, rotation);
            measure<false, true>(pool, tiles, 64, rotation);
            measure<true, true>(pool, tiles, 64, rotation);
        }
    measure<true, true>(pool, 132, 224, 0);
    return 0;
}
