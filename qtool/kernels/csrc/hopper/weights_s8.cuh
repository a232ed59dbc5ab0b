// The 8-bit weight operand of gemm.cuh, natural [N, K] order: both operands of wgmma come from
// shared memory, where TMA has swizzled their rows of 128 bytes.
#pragma once
#include "hopper/ring.cuh"
#include "hopper/params.cuh"

struct Weights8 {
    using Sum = int;
    // The members that Gemm expects (gemm.cuh).
    static constexpr int kInputs = 128, kTokenBytes = 128, kTokenGroups = 0;
    static constexpr bool kGrouped = false;  // the sums of a tile are exact integers
    static constexpr bool kZero = false, kReadsAhead = false, kTokenScales = true;
    static constexpr int kHalf = 64 * 128;  // bytes of one warpgroup's rows in a stage
    static constexpr int kStageBytes = 2 * kHalf;

    static __device__ __forceinline__ int channel(int n) { return n; }  // where its scale lies

    // The copies of 64 rows, stage after stage, by one warp. Rows beyond the weight arrive as
    // zeros.
    struct Source {
        const TensorMap* map;
        int row, column;

        __device__ __forceinline__ Source(const Params& p, int row, int step) : map(&p.weights), row(row), column(128 * step) {}
        __device__ __forceinline__ void load(u32 stage, int half, u32 bar) {
            if (elect_one()) {
                mbar_expect(bar, kHalf);
                tensor_copy(stage + half * kHalf, map, column, row, bar);
            }
            column += 128;
        }
    };

    // The main loop over `steps` stages. A stage is four k32 instructions a panel, 32 bytes (2 in a
    // descriptor) apart. One batch is left under way while the next stage is waited for.
    template <int kPanels, int kTokens, class Pipe>
    static __device__ __forceinline__ void multiply(int (&acc)[kPanels][kTokens / 2], Pipe& pipe, int steps, int wg, int) {
        for (int i = 0; i < steps; ++i) {
            pipe.wait_full();
            const u64 rows = swizzled_operand(smem_address(pipe.stage()) + wg * kHalf), tokens = pipe.tokens();
            wgmma_fence();
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
                for (int j = 0; j < 4; ++j) Wgmma<kTokens>::ss(acc[panel], rows + panel * (kStageBytes / 16) + 2 * j, tokens + 2 * j);
            wgmma_commit();
            wgmma_wait<1>();
            pipe.release_previous();
            pipe.advance();
        }
        wgmma_wait<0>();
        pipe.release_previous();
    }
};
