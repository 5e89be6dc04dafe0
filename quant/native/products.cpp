// Products of rows with matrices in order `tiles`: one matrix, or all experts of a layer. matmul/tiled.py calls them.
//
// Several threads call a function with the same arguments, and each takes the next item from a shared counter until
// none is left. A phase begins when every item of the one before has ended; the few microseconds until then are waited
// for by giving the processor away.
#include "activations.h"
#include "tiles_words.h"
#include "work.h"

namespace {

// Of `tiles` tiles of such a matrix, those that one item computes with so many rows: some tens of microseconds' work, since a
// processor reads past the end of an item what then is another thread's, and waits for the start of the next. At most a part
// of them, so that threads end together. Four rows take about as long as one, for which codes have to be read.
int64_t tiles_at_once(const Matrix& matrix, int64_t rows, int64_t tiles) {
    const int64_t codes = matrix.columns * OUTPUTS / (matrix.type == Type::INT8 ? 1 : 2);
    const int64_t most = tiles / (num_processors() < 4 ? 8 : 16), few = (int64_t(1) << 20) / (codes * ceil_of(rows, 4));
    return few < 2 || most < 2 ? 1 : few < most ? few : most;
}

// The memory of `rows` inputs of a matrix: bfloat16 and the sums of their chunks, or integers, which take less.
struct Memory {
    const Matrix& matrix;
    int64_t rows;
    uint16_t* x;
    float* sums;
    IntegerInputs integers;

    Memory(char* scratch, int64_t num_rows, const Matrix& weights)
        : matrix(weights), rows(num_rows), x((uint16_t*)scratch), sums((float*)(x + num_rows * weights.columns)),
          integers(scratch, num_rows, weights.columns) {}
    static int64_t nbytes(int64_t rows, int64_t columns) { return rows * columns / CHUNK * (CHUNK * 2 + 4); }

    // A chunk of one row, in bfloat16.
    void put(const uint16_t* from, int64_t chunk, int64_t row) const {
        if (matrix.integers) integers.put(from, chunk, row, matrix);
        else put_floats(from, chunk * rows + row);
    }

    // A chunk of all rows, [rows, CHUNK].
    void put_chunk(const float* from, int64_t chunk) const {
        for (int64_t r = 0; r < rows; r++, from += CHUNK) {
            if (matrix.integers) {
                vf numbers[VECTORS];
                for (int v = 0; v < VECTORS; v++) numbers[v] = load(from + v * W);
                integers.put(numbers, chunk, r, matrix);
            } else {
                uint16_t rounded[CHUNK];
                round_all(from, rounded);
                put_floats(rounded, chunk * rows + r);
            }
        }
    }

    void put_floats(const uint16_t* from, int64_t at) const {
#if MOEDGE_LEVEL == 1
        if (multiplies_words(matrix)) {
            const ChunkOfWords told = words_of_chunk(from, matrix, (int16_t*)x + at * CHUNK);
            memcpy(sums + at, &told, sizeof told);
            return;
        }
#endif
        memcpy(x + at * CHUNK, from, CHUNK * sizeof(uint16_t));
        sums[at] = sum_of(from);
    }

    // Products of all rows with a tile, [rows, OUTPUTS].
    void multiply(int64_t tile, float* results) const {
        if (matrix.integers) return multiply_integers(matrix, tile, integers, results);
#if MOEDGE_LEVEL == 1
        if (multiplies_words(matrix)) return multiply_words(matrix, tile, {x, sums, rows}, results);
#endif
        multiply_tile(matrix, tile, {x, sums, rows}, results);
    }
};

// Writes products with the tile to the rows of y, rounded to bfloat16.
void write_tile(const Memory& memory, int64_t tile, uint16_t* y, int64_t stride) {
    alignas(64) float results[MOST_ROWS * OUTPUTS];
    memory.multiply(tile, results);
    for (int64_t r = 0; r < memory.rows; r++) round_all(results + r * OUTPUTS, y + r * stride + tile * OUTPUTS);
}

// Writes the activations of rows of two tiles over the first of them: [gate] and [up], or pairs that alternate.
template <Activation ACTIVATION>
void gate_rows(float* gate, const float* up, bool alternating, int64_t rows) {
    for (int64_t r = 0; r < rows; r++, gate += OUTPUTS, up += OUTPUTS) {
        float gates[OUTPUTS], ups[OUTPUTS];
        for (int i = 0; i < OUTPUTS; i++) {
            const float* pair = i < OUTPUTS / 2 ? gate + 2 * i : up + 2 * i - OUTPUTS;
            gates[i] = alternating ? pair[0] : gate[i];
            ups[i] = alternating ? pair[1] : up[i];
        }
        for (int i = 0; i < OUTPUTS; i += W) store(gate + i, gated(ACTIVATION, load(gates + i), load(ups + i)));
    }
}

// One expert and at most MOST_ROWS of its rows.
struct Job {
    int64_t first, rows, offset;
    Matrix up, down;

    Job(const moedge_job& job, bool integers)
        : first(job.first_row), rows(job.rows), offset(job.scratch_offset),
          up(job.expert.up, job.expert.up_bias, integers), down(job.expert.down, job.expert.down_bias, integers) {}

    Memory input(char* scratch) const { return Memory(scratch + offset, rows, up); }
    Memory inner(char* scratch) const { return Memory(scratch + offset + Memory::nbytes(rows, up.columns), rows, down); }
};

struct Experts : moedge_mixture {
    explicit Experts(const moedge_mixture& mixture) : moedge_mixture(mixture) {}

    Job job(int64_t index) const { return Job(jobs[index], integers != 0); }
    int64_t rows_of_job() const {
        int64_t rows = 0;
        for (int64_t j = 0; j < num_jobs; j++) rows += jobs[j].rows;
        return ceil_of(rows, num_jobs);
    }

    void gather(const Job& job) const {
        const Memory memory = job.input(scratch);
        for (int64_t r = 0; r < job.rows; r++)
            for (int64_t chunk = 0; chunk < job.up.columns / CHUNK; chunk++)
                memory.put(hidden + token_ids[job.first + r] * hidden_stride + chunk * CHUNK, chunk, r);
    }

    // Chunks `begin` to `end` of the second matrix's inputs: 32 inner numbers of all rows each, of two tiles of the first
    // matrix. Tiles of gates are multiplied one after the other where their results fit: codes are read in one piece.
    void activate(const Job& job, int64_t begin, int64_t end) const {
        alignas(64) float gates[MOST_ROWS * OUTPUTS], up[MOST_ROWS * OUTPUTS];
        const Memory from = job.input(scratch);
        const int64_t numbers = job.rows * OUTPUTS, run = alternating ? 1 : MOST_ROWS / job.rows;
        for (int64_t first = begin; first < end; first += run) {
            const int64_t last = first + run < end ? first + run : end;
            for (int64_t chunk = first; chunk < last; chunk++)
                from.multiply(alternating ? 2 * chunk : chunk, gates + (chunk - first) * numbers);
            for (int64_t chunk = first; chunk < last; chunk++) {
                float* const gate = gates + (chunk - first) * numbers;
                from.multiply(alternating ? 2 * chunk + 1 : job.up.tiles() / 2 + chunk, up);
                if (activation == Activation::SILU) gate_rows<Activation::SILU>(gate, up, alternating, job.rows);
                if (activation == Activation::GELU_TANH) gate_rows<Activation::GELU_TANH>(gate, up, alternating, job.rows);
                if (activation == Activation::CLAMPED_SWIGLU) gate_rows<Activation::CLAMPED_SWIGLU>(gate, up, alternating, job.rows);
                job.inner(scratch).put_chunk(gate, chunk);
            }
        }
    }

    void multiply(const Job& job, int64_t tile) const {
        write_tile(job.inner(scratch), tile, out + job.first * out_stride, out_stride);
    }
};

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_multiply)(const moedge_product* product) {
    const int64_t rows = product->rows;
    const Work work = {product->counters};
    const Matrix matrix(product->weights, product->bias, product->integers != 0);
    // Blocks of about the same number of rows. An item of packing is a run of chunks of all rows of a block, about as much as
    // PACKED rows: what rows of a chunk have lies together, and threads that wrote rows apart would share cache lines.
    constexpr int64_t PACKED = 8, ROWS_AHEAD = 16;
    const int64_t at_once = ceil_of(rows, ceil_of(rows, MOST_ROWS)), chunks = matrix.columns / CHUNK;
    const int64_t run = ceil_of(chunks, ceil_of(at_once, PACKED)), runs = ceil_of(chunks, run);
    const auto rows_of = [&](int64_t block) { return rows - block * at_once < at_once ? rows - block * at_once : at_once; };
    const auto memory_of = [&](int64_t block) {
        char* const scratch = product->scratch + block * Memory::nbytes(at_once, matrix.columns);
        return Memory(scratch, rows_of(block), matrix);
    };
    const int64_t step = tiles_at_once(matrix, rows, matrix.tiles()), packing = ceil_of(rows, at_once) * runs, items = ceil_of(matrix.tiles(), step);
    for (int64_t item; (item = work.take()) < packing + items * ceil_of(rows, at_once);) {
        if (item < packing) {
            const int64_t block = item / runs, begin = item % runs * run, end = begin + run < chunks ? begin + run : chunks;
            const Memory memory = memory_of(block);
            const uint16_t* const x = product->x + block * at_once * product->x_stride;
            for (int64_t r = 0; r < memory.rows; r++) {
                const uint16_t* const row = x + r * product->x_stride;
                for (int64_t chunk = begin; chunk < end; chunk++) {
                    _mm_prefetch((const char*)(row + ROWS_AHEAD * product->x_stride + chunk * CHUNK), _MM_HINT_T0);
                    memory.put(row + chunk * CHUNK, chunk, r);
                }
            }
            work.finish();
            continue;
        }
        work.wait(packing);
        const int64_t block = (item - packing) / items, first = (item - packing) % items * step;
        const Memory memory = memory_of(block);
        uint16_t* const to = product->y + block * at_once * product->y_stride;
        for (int64_t tile = first; tile < first + step && tile < matrix.tiles(); tile++)
            write_tile(memory, tile, to, product->y_stride);
    }
}

extern "C" void MOEDGE_NAMED(moedge_experts)(const moedge_mixture* mixture) {
    const Experts experts(*mixture);
    const Work work = {experts.counters};
    const int64_t jobs = experts.num_jobs;
    if (jobs == 0) return;
    const Job any = experts.job(0);
    // Chunks of the second matrix's inputs take two tiles of the first one each. Items are of one job.
    const int64_t chunks = any.down.columns / CHUNK, rows = experts.rows_of_job();
    const int64_t run = ceil_of(tiles_at_once(any.up, rows, jobs * any.up.tiles()), 2), runs = ceil_of(chunks, run);
    const int64_t step = tiles_at_once(any.down, rows, jobs * any.down.tiles()), pieces = ceil_of(any.down.tiles(), step);
    const int64_t gathered = jobs, activated = gathered + jobs * runs;
    for (int64_t item; (item = work.take()) < activated + jobs * pieces;) {
        if (item < gathered) {
            experts.gather(experts.job(item));
        } else if (item < activated) {
            work.wait(gathered);
            const Job job = experts.job((item - gathered) / runs);
            const int64_t first = (item - gathered) % runs * run;
            experts.activate(job, first, first + run < chunks ? first + run : chunks);
        } else {
            work.wait(activated);
            const Job job = experts.job((item - activated) / pieces);
            const int64_t first = (item - activated) % pieces * step;
            for (int64_t tile = first; tile < first + step && tile < job.down.tiles(); tile++) experts.multiply(job, tile);
        }
        work.finish();
    }
}
